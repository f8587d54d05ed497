#include "common/torch/cuda_allocator.h"

#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include "common/gpu/device.h"

namespace tandem::internal {

void ReplaceCudaAllocator(void* (*allocate)(std::size_t size_bytes), void (*free)(void* piece)) {
  if (!HasCudaDevice()) return;
  namespace pluggable = torch::cuda::CUDAPluggableAllocator;
  const auto allocator = std::make_shared<pluggable::CUDAPluggableAllocator>(
      [allocate](std::size_t size_bytes, int, cudaStream_t) { return allocate(size_bytes); },
      [free](void* piece, std::size_t, int, cudaStream_t) { free(piece); });
  allocator->set_record_stream_fn([](void*, cudaStream_t) {});  // one stream: nothing to wait for
  pluggable::changeCurrentAllocator(allocator);
}

}  // namespace tandem::internal
