// Stands in for device_cuda.cc where the build has no device code.
#include "common/gpu/cuda_device.h"
#include "common/gpu/stage_clock.h"

namespace tandem {

bool HasCudaDevice() { return false; }

namespace internal {

std::string CudaDeviceName() { return "none"; }
absl::StatusOr<std::string> CudaDeviceUuid() { return BuiltWithoutCuda("device uuid"); }
absl::StatusOr<ComputeCapability> CudaCapability() { return BuiltWithoutCuda("device capability"); }
const char* CudaArchitectures() { return "none"; }
absl::Status CudaCopy(void*, const void*, std::size_t) { return BuiltWithoutCuda("device copy"); }
absl::Status CudaZero(void*, std::size_t) { return BuiltWithoutCuda("device memset"); }
absl::StatusOr<DeviceMemoryUse> CudaDriverMemory() { return BuiltWithoutCuda("driver memory"); }
absl::Status CudaContextHealth() { return BuiltWithoutCuda("device context"); }
absl::Status CudaSynchronize() { return BuiltWithoutCuda("device fence"); }
absl::StatusOr<std::unique_ptr<Stream>> CreateCudaStream() { return BuiltWithoutCuda("stream"); }
absl::StatusOr<std::unique_ptr<StageClock>> CreateCudaStageClock() { return BuiltWithoutCuda("stage clock"); }
absl::StatusOr<std::unique_ptr<HostBuffer>> CreatePinnedBuffer(std::size_t) { return BuiltWithoutCuda("pinned memory"); }

}  // namespace internal
}  // namespace tandem
