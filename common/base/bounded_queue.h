// A FIFO between threads that never grows past its bound. Thread-safe.
#pragma once

#include <cstddef>
#include <deque>
#include <optional>
#include <utility>

#include "common/base/clock.h"
#include "common/base/mutex.h"

namespace tandem {

template <typename T>
class BoundedQueue {
 public:
  explicit BoundedQueue(std::size_t capacity) : capacity_(capacity) {}

  // False when the queue is full or closed; the item is then untouched.
  bool TryPush(T&& item) {
    MutexLock lock(&mutex_);
    if (closed_ || items_.size() >= capacity_) return false;
    items_.push_back(std::move(item));
    not_empty_.Signal();
    return true;
  }

  // The oldest item; nullopt after `timeout`, or when the queue is closed and empty.
  std::optional<T> Pop(absl::Duration timeout) {
    const MonotonicTime deadline = MonotonicTime::Now() + timeout;
    MutexLock lock(&mutex_);
    while (items_.empty()) {
      const absl::Duration left = deadline - MonotonicTime::Now();
      if (closed_ || left <= absl::ZeroDuration()) return std::nullopt;
      not_empty_.WaitFor(&mutex_, left);
    }
    T item = std::move(items_.front());
    items_.pop_front();
    return item;
  }

  // Pushes fail from now on; what is queued can still be popped.
  void Close() {
    MutexLock lock(&mutex_);
    closed_ = true;
    not_empty_.SignalAll();
  }

  std::size_t size() const {
    MutexLock lock(&mutex_);
    return items_.size();
  }

 private:
  const std::size_t capacity_;
  mutable Mutex mutex_;
  CondVar not_empty_;
  std::deque<T> items_ ABSL_GUARDED_BY(mutex_);
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace tandem
