// LibTorch's memory from the leased elastic range: training memory cannot grow past the lease. On a thread inside an ArenaScope,
// allocations are pieces of the range. Elsewhere CPU allocations come from the allocator that was there before, and a CUDA
// allocation is an error: device memory comes from the pool only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "common/gpu/device.h"

namespace tandem {

class ArenaMemory;

// The calling thread's allocations on `device` come from `range` until the scope ends. An allocation that does not fit throws
// c10::OutOfMemoryError naming owner, size, what is free and the lease's size, which RunTorch turns into RESOURCE_EXHAUSTED.
//
// A piece remembers its arena and may be freed on any thread, also after the scope; but its bytes belong to the next holder of
// the range once the lease is given back. On the GPU a freed piece is used again at once, in stream order: all work of one scope
// runs on one stream. Scopes of one thread nest. The first scope of a process and device replaces LibTorch's allocator: open it
// before other threads use LibTorch, and before LibTorch first uses the GPU.
class ArenaScope {
 public:
  // Requires: `range` begins on a 64-byte boundary, lies on `device` and outlives the scope.
  ArenaScope(std::span<std::byte> range, std::string owner, Device device = Device::kCpu);
  // Logs what was not freed.
  ~ArenaScope();
  ArenaScope(const ArenaScope&) = delete;
  ArenaScope& operator=(const ArenaScope&) = delete;

  std::uint64_t used_bytes() const;
  std::uint64_t peak_bytes() const;  // since the scope began
  // The largest piece that could be allocated now: with used_bytes it tells how far the range is fragmented.
  std::uint64_t largest_free_bytes() const;

 private:
  const Device device_;
  std::shared_ptr<ArenaMemory> memory_;
  std::shared_ptr<ArenaMemory> outer_;  // of the enclosing scope
};

// Of the calling thread's scope on `device`; without a scope all 0.
struct ArenaUse {
  std::uint64_t used_bytes = 0;
  std::uint64_t largest_free_bytes = 0;  // the largest piece that it could give now
};
ArenaUse CurrentArenaUse(Device device);

}  // namespace tandem
