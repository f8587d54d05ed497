// Training memory on the GPU, as LibTorch's owner of bytes. Only files that know LibTorch include this.
#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>

namespace tandem::internal {

// A piece of the thread's ArenaScope on the GPU. Throws c10::OutOfMemoryError (no room), c10::Error (no scope).
c10::DataPtr AllocateDeviceMemory(std::size_t size_bytes);

}  // namespace tandem::internal
