// Stands in for cuda_allocator.cc where the build has no device code: LibTorch then has no CUDA allocator.
#include "common/torch/cuda_allocator.h"

namespace tandem::internal {

void ReplaceCudaAllocator(void* (*)(std::size_t), void (*)(void*)) {}

}  // namespace tandem::internal
