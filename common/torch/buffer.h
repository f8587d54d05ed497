// An uninitialised array of training memory. On the CPU from LibTorch's allocator: the leased arena where the thread has an
// ArenaScope open (arena_allocator.h), else the heap. On the GPU from the arena of the thread's scope alone; the host never
// dereferences it. On a 64-byte boundary. Movable; may be freed on any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "common/gpu/device.h"

namespace tandem {

struct TorchBytes {
  void* data = nullptr;
  std::unique_ptr<void, void (*)(void*)> context{nullptr, +[](void*) {}};
};
// Throws c10::Error; c10::OutOfMemoryError where the arena has no room.
TorchBytes AllocateTorchBytes(std::size_t size_bytes, Device device);

template <typename T, Device kDevice = Device::kCpu>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::int64_t size)
      : bytes_(AllocateTorchBytes(static_cast<std::size_t>(size) * sizeof(T), kDevice)), size_(size) {}
  // Makes room for `size` elements; what was there is lost when it grows.
  void Reserve(std::int64_t size) {
    if (size <= size_) return;
    *this = Buffer();  // the old memory first: a peak of one, not two
    *this = Buffer(size);
  }
  T* data() const { return static_cast<T*>(bytes_.data); }
  std::int64_t size() const { return size_; }

 private:
  TorchBytes bytes_;
  std::int64_t size_ = 0;
};

}  // namespace tandem
