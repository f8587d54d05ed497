// What device.cc dispatches to for Device::kCuda: device_cuda.cc, or device_no_cuda.cc where the build has no device code.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "common/gpu/device_code.h"
#include "common/gpu/stream.h"

namespace tandem::internal {

std::string CudaDeviceName();
absl::StatusOr<std::string> CudaDeviceUuid();
absl::StatusOr<ComputeCapability> CudaCapability();
const char* CudaArchitectures();  // that the build has code for: CMake's names with commas, or "none"
absl::Status CudaCopy(void* destination, const void* source, std::size_t size_bytes);
absl::Status CudaZero(void* destination, std::size_t size_bytes);
absl::StatusOr<DeviceMemoryUse> CudaDriverMemory();
absl::Status CudaContextHealth();
absl::Status CudaSynchronize();
absl::StatusOr<std::unique_ptr<Stream>> CreateCudaStream();
absl::StatusOr<std::unique_ptr<HostBuffer>> CreatePinnedBuffer(std::size_t size_bytes);

}  // namespace tandem::internal
