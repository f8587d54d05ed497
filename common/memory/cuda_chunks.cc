// Pool memory that the driver makes and exports as descriptors: the GPU's.
#include <fcntl.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "common/base/check.h"
#include "common/base/log.h"
#include "common/base/mutex.h"
#include "common/base/units.h"
#include "common/memory/cuda_driver.h"
#include "common/memory/pool_chunks.h"

namespace tandem {
namespace {

constexpr CUmemAllocationHandleType kHandleType = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

// A process sees its first GPU only: ordinal 0.
CUmemAllocationProp Properties() {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = kHandleType;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = 0;
  return properties;
}

// One reference to a chunk's physical memory, which lives while any reference, mapping or descriptor of any process does.
class ChunkHandle {
 public:
  ChunkHandle(const CudaDriver* driver, CUmemGenericAllocationHandle handle) : driver_(driver), handle_(handle) {}
  ChunkHandle(ChunkHandle&& other) noexcept : driver_(other.driver_), handle_(std::exchange(other.handle_, 0)) {}
  ~ChunkHandle() {
    if (handle_ == 0) return;
    if (const absl::Status status = driver_->ToStatus(driver_->release(handle_), "cuMemRelease"); !status.ok())
      TANDEM_LOG(kWarning, "memory", status.ToString());
  }
  CUmemGenericAllocationHandle get() const { return handle_; }

 private:
  const CudaDriver* const driver_;
  CUmemGenericAllocationHandle handle_;
};

class CudaMapping final : public PoolMapping {
 public:
  CudaMapping(const CudaDriver* driver, CUdeviceptr base, std::uint64_t chunk_bytes, std::vector<ChunkHandle> chunks)
      : driver_(driver), base_(base), chunk_bytes_(chunk_bytes), chunks_(std::move(chunks)), is_mapped_(chunks_.size(), false) {}
  ~CudaMapping() override {
    MutexLock lock(&mutex_);
    for (std::size_t i = 0; i < chunks_.size(); ++i) LogFailure(Unmap(i));
    LogFailure(driver_->ToStatus(driver_->free_addresses(base_, size_bytes()), "cuMemAddressFree"));
  }

  std::byte* base() const override { return reinterpret_cast<std::byte*>(base_); }
  std::uint64_t size_bytes() const override { return chunks_.size() * chunk_bytes_; }

  // Unmapped, a chunk is out of reach: a kernel that touches it faults, which ends this process and no other.
  absl::Status Protect(std::uint64_t begin, std::uint64_t end, Access access) override {
    TANDEM_CHECK(begin <= end && end <= size_bytes(), "[", begin, ", ", end, ") of ", size_bytes());
    TANDEM_RETURN_IF_ERROR(CudaDriver::Get().status());  // the calling thread may be new to the device
    MutexLock lock(&mutex_);
    const std::size_t first = RoundUp(begin, chunk_bytes_) / chunk_bytes_, last = end / chunk_bytes_;
    for (std::size_t i = first; i < last; ++i) TANDEM_RETURN_IF_ERROR(access == Access::kNone ? Unmap(i) : Map(i));
    return absl::OkStatus();
  }

 private:
  CUdeviceptr AddressOf(std::size_t chunk) const { return base_ + chunk * chunk_bytes_; }
  absl::Status Map(std::size_t chunk) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (is_mapped_[chunk]) return absl::OkStatus();
    const std::string what = absl::StrCat("mapping chunk ", chunk, " of ", chunks_.size(), ", ", FormatBytes(chunk_bytes_));
    TANDEM_RETURN_IF_ERROR(driver_->ToStatus(driver_->map(AddressOf(chunk), chunk_bytes_, 0, chunks_[chunk].get(), 0), what));
    CUmemAccessDesc access{};
    access.location = Properties().location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    const absl::Status status = driver_->ToStatus(driver_->set_access(AddressOf(chunk), chunk_bytes_, &access, 1), what);
    if (status.ok()) {
      is_mapped_[chunk] = true;
    } else {
      LogFailure(driver_->ToStatus(driver_->unmap(AddressOf(chunk), chunk_bytes_), absl::StrCat("unmapping chunk ", chunk)));
    }
    return status;
  }
  absl::Status Unmap(std::size_t chunk) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!is_mapped_[chunk]) return absl::OkStatus();
    is_mapped_[chunk] = false;
    return driver_->ToStatus(driver_->unmap(AddressOf(chunk), chunk_bytes_), absl::StrCat("unmapping chunk ", chunk));
  }
  static void LogFailure(const absl::Status& status) {
    if (!status.ok()) TANDEM_LOG(kWarning, "memory", status.ToString());
  }

  const CudaDriver* const driver_;
  const CUdeviceptr base_;
  const std::uint64_t chunk_bytes_;
  const std::vector<ChunkHandle> chunks_;
  Mutex mutex_;
  std::vector<bool> is_mapped_ ABSL_GUARDED_BY(mutex_);
};

class CudaMemory final : public PoolMemory {
 public:
  CudaMemory(const CudaDriver* driver, std::string uuid, std::uint64_t granularity)
      : driver_(driver), uuid_(std::move(uuid)), granularity_(granularity) {}
  const char* transport() const override { return "cuda_vmm"; }
  Device device() const override { return Device::kCuda; }
  std::string device_uuid() const override { return uuid_; }
  std::uint64_t granularity_bytes() const override { return granularity_; }

  absl::StatusOr<std::vector<UniqueFd>> CreateChunks(std::uint32_t num_chunks, std::uint64_t chunk_bytes) override {
    const CUmemAllocationProp properties = Properties();
    made_.clear();
    made_.reserve(num_chunks);
    std::vector<UniqueFd> chunks;
    chunks.reserve(num_chunks);
    for (std::uint32_t i = 0; i < num_chunks; ++i) {
      const std::string what = absl::StrCat("making chunk ", i, " of ", num_chunks, ", each ", FormatBytes(chunk_bytes));
      CUmemGenericAllocationHandle handle = 0;
      TANDEM_RETURN_IF_ERROR(driver_->ToStatus(driver_->create(&handle, chunk_bytes, &properties, 0), what));
      made_.emplace_back(driver_, handle);
      int fd = -1;
      TANDEM_RETURN_IF_ERROR(driver_->ToStatus(driver_->export_handle(&fd, handle, kHandleType, 0), what + ", exporting it"));
      UniqueFd chunk(fd);
      if (::fcntl(fd, F_SETFD, FD_CLOEXEC) != 0) return absl::InternalError(absl::StrCat(what, ": ", std::strerror(errno)));
      chunks.push_back(std::move(chunk));
    }
    return chunks;
  }

  absl::StatusOr<std::unique_ptr<PoolMapping>> Map(std::span<const UniqueFd> chunks, std::uint64_t chunk_bytes) override {
    std::uint64_t size = 0;
    if (chunk_bytes == 0 || chunk_bytes % granularity_ != 0 || chunks.empty() || !MultiplyFits(chunks.size(), chunk_bytes, &size))
      return absl::InvalidArgumentError(absl::StrCat("pool of ", chunks.size(), " chunks of ", chunk_bytes,
                                                     " bytes: wanted at least one, of a multiple of ", granularity_, " bytes"));
    std::vector<ChunkHandle> handles = std::exchange(made_, {});
    if (handles.size() != chunks.size()) handles.clear();
    const bool is_imported = handles.empty();
    handles.reserve(chunks.size());
    for (std::size_t i = handles.size(); i < chunks.size(); ++i) {
      CUmemGenericAllocationHandle handle = 0;
      void* const descriptor = reinterpret_cast<void*>(static_cast<std::uintptr_t>(chunks[i].get()));
      const absl::Status imported =
          driver_->ToStatus(driver_->import_handle(&handle, descriptor, kHandleType), absl::StrCat("importing chunk ", i));
      if (absl::IsResourceExhausted(imported)) return imported;
      if (!imported.ok()) return absl::InvalidArgumentError(absl::StrCat(imported.message(), ": it is no device memory"));
      handles.emplace_back(driver_, handle);
    }
    CUdeviceptr base = 0;
    if (const absl::Status reserved = driver_->ToStatus(driver_->reserve_addresses(&base, size, 0, 0, 0),
                                                        absl::StrCat("reserving ", FormatBytes(size), " of device addresses"));
        !reserved.ok())
      return absl::ResourceExhaustedError(reserved.message());
    auto mapping = std::make_unique<CudaMapping>(driver_, base, chunk_bytes, std::move(handles));
    const absl::Status mapped = mapping->Protect(0, size, Access::kReadWrite);
    // The driver tells nobody the size of an imported chunk; it refuses to map it with another one.
    if (is_imported && !mapped.ok() && !absl::IsResourceExhausted(mapped) && ContextHealth(Device::kCuda).ok())
      return absl::InvalidArgumentError(absl::StrCat(mapped.message(), ": the chunk received has another size"));
    TANDEM_RETURN_IF_ERROR(mapped);
    return std::unique_ptr<PoolMapping>(std::move(mapping));
  }

 private:
  const CudaDriver* const driver_;
  const std::string uuid_;
  const std::uint64_t granularity_;
  std::vector<ChunkHandle> made_;  // by the last CreateChunks, until Map takes them: a maker imports nothing
};

}  // namespace

absl::StatusOr<std::unique_ptr<PoolMemory>> PoolMemory::CreateCuda() {
  TANDEM_ASSIGN_OR_RETURN(const CudaDriver* const driver, CudaDriver::Get());
  int can_export = 0;
  TANDEM_RETURN_IF_ERROR(
      driver->ToStatus(driver->get_attribute(&can_export, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 0),
                       "asking whether device memory can be exported"));
  if (can_export == 0)
    return absl::FailedPreconditionError(
        absl::StrCat(DeviceName(Device::kCuda), " cannot export device memory as descriptors: give --pool_transport=cuda_ipc"));
  TANDEM_ASSIGN_OR_RETURN(std::string uuid, DeviceUuid(Device::kCuda));
  const CUmemAllocationProp properties = Properties();
  std::size_t granularity = 0;
  TANDEM_RETURN_IF_ERROR(driver->ToStatus(driver->get_granularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
                                          "asking for the granularity of device memory"));
  return std::make_unique<CudaMemory>(driver, std::move(uuid), granularity);
}

}  // namespace tandem
