#include <cuda_runtime_api.h>

#include "kernels/base/cuda_status.h"
#include "kernels/base/device.h"

namespace tandem {

bool HasCudaDevice() {
  static const bool has_device = [] {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
  }();
  return has_device;
}

std::string DeviceName(Device device) {
  if (device == Device::kCpu) return "cpu";
  cudaDeviceProp properties{};
  if (cudaGetDeviceProperties(&properties, 0) != cudaSuccess) return "none";
  return properties.name;
}

absl::Status CudaToStatus(int error, const char* what) {
  const auto code = static_cast<cudaError_t>(error);
  if (code == cudaSuccess) return absl::OkStatus();
  const std::string message = absl::StrCat(what, ": ", cudaGetErrorName(code), ": ", cudaGetErrorString(code));
  if (code == cudaErrorMemoryAllocation) return absl::ResourceExhaustedError(message);
  if (code == cudaErrorInvalidValue || code == cudaErrorInvalidConfiguration) return absl::InvalidArgumentError(message);
  return absl::InternalError(message);
}

}  // namespace tandem
