// Bounds what one thread takes from the heap for as long as an object of this class lives: around code of others that has no
// bounds of its own. What would be beyond throws std::bad_alloc in that code.
//
// operator new asks (see allocation_budget.cc), so whatever comes by it counts, in whichever library; memory that is mapped or
// comes by malloc does not.
#pragma once

#include <cstddef>

namespace tandem {

class AllocationBudget {
 public:
  // `max_live_bytes`: at a time, less what is given back; `max_total_bytes`: in all, which bounds the time that goes into them.
  AllocationBudget(std::size_t max_live_bytes, std::size_t max_total_bytes);
  ~AllocationBudget();  // on the thread that made it
  AllocationBudget(const AllocationBudget&) = delete;
  AllocationBudget& operator=(const AllocationBudget&) = delete;

  // Something was refused.
  bool is_exceeded() const { return is_exceeded_; }
  std::size_t total_bytes() const { return total_bytes_; }
  std::size_t peak_bytes() const { return peak_bytes_; }        // the most at a time
  std::size_t largest_bytes() const { return largest_bytes_; }  // in one piece

  // Of operator new and delete.
  bool Take(std::size_t size_bytes);
  void GiveBack(std::size_t size_bytes);

 private:
  AllocationBudget* const outer_;  // of the same thread; counts no more while this one lives
  const std::size_t max_live_bytes_;
  const std::size_t max_total_bytes_;
  std::size_t live_bytes_ = 0;
  std::size_t total_bytes_ = 0;
  std::size_t peak_bytes_ = 0;
  std::size_t largest_bytes_ = 0;
  bool is_exceeded_ = false;
};

}  // namespace tandem
