// LibTorch's CPU memory from the leased elastic range: training memory cannot grow past the lease. On a thread inside an
// ArenaScope, allocations are pieces of the range; elsewhere they come from the allocator that was there before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace tandem {

class ArenaMemory;

// The calling thread's allocations come from `range` until the scope ends. An allocation that does not fit throws
// c10::OutOfMemoryError naming owner, size and what is free, which RunTorch turns into RESOURCE_EXHAUSTED.
//
// A piece remembers its arena and may be freed on any thread, also after the scope; but its bytes belong to the next holder of
// the range once the lease is given back. Scopes of one thread nest. The first scope of a process replaces LibTorch's allocator:
// open it before other threads use LibTorch.
class ArenaScope {
 public:
  // Requires: `range` begins on a 64-byte boundary and outlives the scope.
  ArenaScope(std::span<std::byte> range, std::string owner);
  // Logs what was not freed.
  ~ArenaScope();
  ArenaScope(const ArenaScope&) = delete;
  ArenaScope& operator=(const ArenaScope&) = delete;

  std::uint64_t used_bytes() const;
  std::uint64_t peak_bytes() const;  // since the scope began

 private:
  std::shared_ptr<ArenaMemory> memory_;
  std::shared_ptr<ArenaMemory> outer_;  // of the enclosing scope
};

}  // namespace tandem
