// Device memory of a test's own, as the pool gives it to a room.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>

#include "common/gpu/device.h"

namespace tandem::testing {

class DeviceBytes {
 public:
  explicit DeviceBytes(std::uint64_t size) : size_(size) {
    if (const cudaError_t error = cudaMalloc(&data_, size == 0 ? 1 : size); error != cudaSuccess) {
      throw std::runtime_error("cudaMalloc of " + std::to_string(size) + " bytes: " + cudaGetErrorString(error));
    }
  }
  ~DeviceBytes() { cudaFree(data_); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  std::span<std::byte> span() const { return {static_cast<std::byte*>(data_), size_}; }
  std::byte* data() const { return static_cast<std::byte*>(data_); }
  // Each byte set to `value`: 0xff makes bf16 and fp32 NaN.
  void Fill(int value) {
    cudaMemset(data_, value, size_);
    cudaDeviceSynchronize();
  }
  absl::Status Upload(const void* host, std::uint64_t size) { return CopyFromHost(Device::kCuda, data_, host, size); }

 private:
  std::uint64_t size_;
  void* data_ = nullptr;
};

}  // namespace tandem::testing
