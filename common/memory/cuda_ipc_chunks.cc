// Pool memory over cudaIpcMemHandle: one allocation whose handle travels inside a memfd in place of a chunk. For drivers that
// cannot export descriptors. The memory is its maker's: it dies with that process.
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "common/base/check.h"
#include "common/base/log.h"
#include "common/base/units.h"
#include "common/gpu/cuda_status.h"
#include "common/memory/pool_chunks.h"

namespace tandem {
namespace {

constexpr std::uint64_t kGranularityBytes = 2 * kMiB;  // cudaMalloc gives such sizes on such boundaries

class IpcMapping final : public PoolMapping {
 public:
  IpcMapping(void* base, std::uint64_t size, bool is_maker) : base_(base), size_(size), is_maker_(is_maker) {}
  ~IpcMapping() override {
    const absl::Status status = is_maker_ ? CudaToStatus(cudaFree(base_), "freeing the pool")
                                          : CudaToStatus(cudaIpcCloseMemHandle(base_), "closing the pool");
    if (!status.ok()) TANDEM_LOG(kWarning, "memory", status.ToString());
  }
  std::byte* base() const override { return static_cast<std::byte*>(base_); }
  std::uint64_t size_bytes() const override { return size_; }
  absl::Status Protect(std::uint64_t begin, std::uint64_t end, Access access) override {
    TANDEM_CHECK(begin <= end && end <= size_, "[", begin, ", ", end, ") of ", size_);
    if (access != Access::kNone) return absl::OkStatus();
    return absl::UnimplementedError("memory of the transport cuda_ipc cannot be unmapped in parts: no --strict_leases with it");
  }

 private:
  void* const base_;
  const std::uint64_t size_;
  const bool is_maker_;
};

// A handle as it travels. Same machine, same byte order.
struct IpcTicket {
  char magic[8] = {'T', 'D', 'I', 'P', 'C', '0', '0', '1'};
  std::uint64_t size_bytes = 0;
  cudaIpcMemHandle_t handle{};
};

class CudaIpcMemory final : public PoolMemory {
 public:
  explicit CudaIpcMemory(std::string uuid) : uuid_(std::move(uuid)) {}
  ~CudaIpcMemory() override {
    if (made_ != nullptr) cudaFree(made_);
  }
  const char* transport() const override { return "cuda_ipc"; }
  Device device() const override { return Device::kCuda; }
  std::string device_uuid() const override { return uuid_; }
  std::uint64_t granularity_bytes() const override { return kGranularityBytes; }
  bool dies_with_maker() const override { return true; }

  absl::StatusOr<std::vector<UniqueFd>> CreateChunks(std::uint32_t num_chunks, std::uint64_t chunk_bytes) override {
    TANDEM_CHECK(num_chunks == 1 && made_ == nullptr, num_chunks, " chunks; the pool is one allocation");
    TANDEM_RETURN_IF_ERROR(CudaToStatus(cudaMalloc(&made_, chunk_bytes), "making the pool"));
    IpcTicket ticket;
    ticket.size_bytes = chunk_bytes;
    TANDEM_RETURN_IF_ERROR(CudaToStatus(cudaIpcGetMemHandle(&ticket.handle, made_), "exporting the pool"));
    UniqueFd fd(::memfd_create("tandem_ipc", MFD_CLOEXEC));
    if (!fd.is_open() || ::write(fd.get(), &ticket, sizeof ticket) != static_cast<ssize_t>(sizeof ticket))
      return absl::ResourceExhaustedError(absl::StrCat("writing the pool's handle: ", std::strerror(errno)));
    std::vector<UniqueFd> chunks;
    chunks.push_back(std::move(fd));
    return chunks;
  }

  absl::StatusOr<std::unique_ptr<PoolMapping>> Map(std::span<const UniqueFd> chunks, std::uint64_t chunk_bytes) override {
    IpcTicket ticket;
    if (chunks.size() != 1 || chunk_bytes == 0 || chunk_bytes % kGranularityBytes != 0)
      return absl::InvalidArgumentError(absl::StrCat("pool of ", chunks.size(), " chunks of ", chunk_bytes,
                                                     " bytes: wanted one, of a multiple of ", kGranularityBytes, " bytes"));
    const std::string wanted(ticket.magic, sizeof ticket.magic);
    if (::pread(chunks[0].get(), &ticket, sizeof ticket, 0) != static_cast<ssize_t>(sizeof ticket) ||
        wanted != std::string(ticket.magic, sizeof ticket.magic) || ticket.size_bytes != chunk_bytes)
      return absl::InvalidArgumentError(
          absl::StrCat("the descriptor holds no handle of ", chunk_bytes, " bytes of device memory"));
    if (made_ != nullptr)  // a process cannot open its own handle
      return std::make_unique<IpcMapping>(std::exchange(made_, nullptr), chunk_bytes, true);
    void* base = nullptr;
    TANDEM_RETURN_IF_ERROR(
        CudaToStatus(cudaIpcOpenMemHandle(&base, ticket.handle, cudaIpcMemLazyEnablePeerAccess), "opening the pool's handle"));
    return std::make_unique<IpcMapping>(base, chunk_bytes, false);
  }

 private:
  const std::string uuid_;
  void* made_ = nullptr;  // between CreateChunks and Map
};

}  // namespace

absl::StatusOr<std::unique_ptr<PoolMemory>> PoolMemory::CreateCudaIpc() {
  if (!HasCudaDevice()) return absl::FailedPreconditionError("no GPU is visible");
  TANDEM_ASSIGN_OR_RETURN(std::string uuid, DeviceUuid(Device::kCuda));
  return std::make_unique<CudaIpcMemory>(std::move(uuid));
}

}  // namespace tandem
