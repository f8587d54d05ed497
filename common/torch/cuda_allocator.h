// The hook behind arena_allocator.cc: cuda_allocator.cc, or cuda_allocator_no_cuda.cc where the build has no device code.
#pragma once

#include <cstddef>

namespace tandem::internal {

// Replaces LibTorch's CUDA allocator for the process's life. Both functions may be called on any thread; `allocate` throws
// c10::Error. Throws c10::Error where LibTorch has used its own already.
void ReplaceCudaAllocator(void* (*allocate)(std::size_t size_bytes), void (*free)(void* piece));

}  // namespace tandem::internal
