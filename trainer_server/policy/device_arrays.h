// Host arrays on their way to the GPU, for the files that launch work there. `stream` is a cudaStream_t. Host memory is pageable:
// it has been read when these return. Throws c10::Error (memory: c10::OutOfMemoryError).
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "common/gpu/cuda_status.h"
#include "common/torch/buffer.h"
#include "common/torch/check_status.h"

namespace tandem {

template <typename T>
Buffer<T, Device::kCuda> Upload(std::span<const T> values, void* stream) {
  Buffer<T, Device::kCuda> buffer(static_cast<std::int64_t>(values.size()));
  CheckStatus(CudaToStatus(cudaMemcpyAsync(buffer.data(), values.data(), values.size_bytes(), cudaMemcpyHostToDevice,
                                           static_cast<cudaStream_t>(stream)),
                           "upload"));
  return buffer;
}

// Arrays laid one after the other, so that they travel at once. Each begins at a multiple of four elements.
template <typename T>
class DeviceArrays {
 public:
  // *place points to the array on the device once it has been uploaded.
  template <typename Range>
  void Add(const T** place, const Range& array) {
    places_.emplace_back(place, values_.size());
    for (const auto value : array) values_.push_back(static_cast<T>(value));
    values_.resize((values_.size() + 3) / 4 * 4);
  }
  Buffer<T, Device::kCuda> Upload(void* stream) const {
    Buffer<T, Device::kCuda> buffer = tandem::Upload(std::span<const T>(values_), stream);
    for (const auto& [place, offset] : places_) *place = buffer.data() + offset;
    return buffer;
  }

 private:
  std::vector<T> values_;
  std::vector<std::pair<const T**, std::size_t>> places_;
};

}  // namespace tandem
