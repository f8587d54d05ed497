#include "common/base/allocation_budget.h"

#include <malloc.h>

#include <algorithm>
#include <cstdlib>
#include <new>

namespace tandem {
namespace {

constinit thread_local AllocationBudget* current = nullptr;

void* Allocate(std::size_t size) noexcept {
  void* const memory = std::malloc(std::max<std::size_t>(size, 1));
  if (current == nullptr || memory == nullptr) return memory;
  if (current->Take(::malloc_usable_size(memory))) return memory;
  std::free(memory);
  return nullptr;
}

void Free(void* memory) noexcept {
  if (current != nullptr && memory != nullptr) current->GiveBack(::malloc_usable_size(memory));
  std::free(memory);
}

}  // namespace

AllocationBudget::AllocationBudget(std::size_t max_live_bytes, std::size_t max_total_bytes)
    : outer_(current), max_live_bytes_(max_live_bytes), max_total_bytes_(max_total_bytes) {
  current = this;
}

AllocationBudget::~AllocationBudget() { current = outer_; }

bool AllocationBudget::Take(std::size_t size_bytes) {
  if (size_bytes > max_live_bytes_ - live_bytes_ || size_bytes > max_total_bytes_ - total_bytes_) {
    is_exceeded_ = true;
    return false;
  }
  live_bytes_ += size_bytes;
  total_bytes_ += size_bytes;
  peak_bytes_ = std::max(peak_bytes_, live_bytes_);
  largest_bytes_ = std::max(largest_bytes_, size_bytes);
  return true;
}

// What was taken before the budget began may come back within it.
void AllocationBudget::GiveBack(std::size_t size_bytes) { live_bytes_ -= std::min(live_bytes_, size_bytes); }

}  // namespace tandem

// Standing in the executable they come before libstdc++'s and a sanitizer's, for every library. Arrays come to these, or to a
// sanitizer's own pair.
[[gnu::noinline]] void* operator new(std::size_t size) {
  void* const memory = tandem::Allocate(size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void* operator new(std::size_t size, const std::nothrow_t&) noexcept { return tandem::Allocate(size); }
[[gnu::noinline]] void operator delete(void* memory) noexcept { tandem::Free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { tandem::Free(memory); }
[[gnu::noinline]] void operator delete(void* memory, const std::nothrow_t&) noexcept { tandem::Free(memory); }
