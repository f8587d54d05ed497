#include <cuda_runtime_api.h>

#include <cstring>
#include <utility>

#include "common/base/log.h"
#include "common/gpu/cuda_device.h"
#include "common/gpu/cuda_status.h"

namespace tandem {

bool HasCudaDevice() {
  static const bool has_device = [] {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
  }();
  return has_device;
}

absl::Status CudaToStatus(int error, const char* what) {
  const auto code = static_cast<cudaError_t>(error);
  if (code == cudaSuccess) return absl::OkStatus();
  (void)cudaGetLastError();  // else the next launch's check would take this fault for its own; a lost context keeps failing
  const std::string message = absl::StrCat(what, ": ", cudaGetErrorName(code), ": ", cudaGetErrorString(code));
  if (code == cudaErrorMemoryAllocation) return absl::ResourceExhaustedError(message);
  if (code == cudaErrorInvalidValue || code == cudaErrorInvalidConfiguration) return absl::InvalidArgumentError(message);
  return absl::InternalError(message);
}

namespace internal {
namespace {

class CudaStream final : public Stream {
 public:
  explicit CudaStream(cudaStream_t stream) : stream_(stream) {}
  ~CudaStream() override {
    if (const absl::Status status = CudaToStatus(cudaStreamDestroy(stream_), "destroying a stream"); !status.ok())
      TANDEM_LOG(kWarning, "gpu", status.ToString());
  }
  void* handle() const override { return stream_; }
  absl::Status Synchronize() override { return CudaToStatus(cudaStreamSynchronize(stream_), "stream fence"); }

 private:
  const cudaStream_t stream_;
};

class PinnedBuffer final : public HostBuffer {
 public:
  explicit PinnedBuffer(std::span<std::byte> bytes) : bytes_(bytes) {}
  ~PinnedBuffer() override {
    if (const absl::Status status = CudaToStatus(cudaFreeHost(bytes_.data()), "freeing pinned memory"); !status.ok())
      TANDEM_LOG(kWarning, "gpu", status.ToString());
  }
  std::span<std::byte> bytes() const override { return bytes_; }

 private:
  const std::span<std::byte> bytes_;
};

}  // namespace

std::string CudaDeviceName() {
  cudaDeviceProp properties{};
  return cudaGetDeviceProperties(&properties, 0) == cudaSuccess ? properties.name : "none";
}

absl::StatusOr<std::string> CudaDeviceUuid() {
  if (!HasCudaDevice()) return absl::FailedPreconditionError("device uuid: no GPU is visible");
  cudaDeviceProp properties{};
  TANDEM_RETURN_IF_ERROR(CudaToStatus(cudaGetDeviceProperties(&properties, 0), "reading the GPU's properties"));
  std::string uuid = "GPU-";
  for (int i = 0; i < 16; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) uuid += '-';
    absl::StrAppend(&uuid, absl::Hex(static_cast<unsigned char>(properties.uuid.bytes[i]), absl::kZeroPad2));
  }
  return uuid;
}

absl::StatusOr<ComputeCapability> CudaCapability() {
  if (!HasCudaDevice()) return absl::FailedPreconditionError("device capability: no GPU is visible");
  ComputeCapability capability;
  TANDEM_RETURN_IF_ERROR(CudaToStatus(cudaDeviceGetAttribute(&capability.major, cudaDevAttrComputeCapabilityMajor, 0),
                                      "reading the GPU's compute capability"));
  TANDEM_RETURN_IF_ERROR(CudaToStatus(cudaDeviceGetAttribute(&capability.minor, cudaDevAttrComputeCapabilityMinor, 0),
                                      "reading the GPU's compute capability"));
  return capability;
}

const char* CudaArchitectures() { return TANDEM_CUDA_ARCHITECTURES; }

absl::Status CudaCopy(void* destination, const void* source, std::size_t size_bytes) {
  if (size_bytes == 0) return absl::OkStatus();
  TANDEM_RETURN_IF_ERROR(
      CudaToStatus(cudaMemcpyAsync(destination, source, size_bytes, cudaMemcpyDefault, cudaStreamPerThread), "device copy"));
  return CudaToStatus(cudaStreamSynchronize(cudaStreamPerThread), "device copy");
}

absl::Status CudaZero(void* destination, std::size_t size_bytes) {
  if (size_bytes == 0) return absl::OkStatus();
  TANDEM_RETURN_IF_ERROR(CudaToStatus(cudaMemsetAsync(destination, 0, size_bytes, cudaStreamPerThread), "device memset"));
  return CudaToStatus(cudaStreamSynchronize(cudaStreamPerThread), "device memset");
}

absl::StatusOr<DeviceMemoryUse> CudaDriverMemory() {
  std::size_t free_bytes = 0, total_bytes = 0;
  TANDEM_RETURN_IF_ERROR(CudaToStatus(cudaMemGetInfo(&free_bytes, &total_bytes), "driver memory"));
  return DeviceMemoryUse{.total_bytes = total_bytes, .free_bytes = free_bytes};
}

absl::Status CudaSynchronize() { return CudaToStatus(cudaDeviceSynchronize(), "device fence"); }

absl::Status CudaContextHealth() {
  const cudaError_t error = cudaStreamQuery(cudaStreamPerThread);
  return error == cudaErrorNotReady ? absl::OkStatus() : CudaToStatus(error, "device context");
}

absl::StatusOr<std::unique_ptr<Stream>> CreateCudaStream() {
  cudaStream_t stream = nullptr;
  TANDEM_RETURN_IF_ERROR(CudaToStatus(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream"));
  return std::make_unique<CudaStream>(stream);
}

absl::StatusOr<std::unique_ptr<HostBuffer>> CreatePinnedBuffer(std::size_t size_bytes) {
  void* bytes = nullptr;
  TANDEM_RETURN_IF_ERROR(CudaToStatus(cudaMallocHost(&bytes, size_bytes == 0 ? 1 : size_bytes), "pinning memory"));
  std::memset(bytes, 0, size_bytes);
  return std::make_unique<PinnedBuffer>(std::span(static_cast<std::byte*>(bytes), size_bytes));
}

}  // namespace internal
}  // namespace tandem
