// std::mutex with clang's thread-safety annotations. Not absl::Mutex: the thread sanitizer sees no order in Debian's build of it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"

namespace tandem {

class ABSL_LOCKABLE Mutex {
 public:
  void Lock() ABSL_EXCLUSIVE_LOCK_FUNCTION() { mutex_.lock(); }
  void Unlock() ABSL_UNLOCK_FUNCTION() { mutex_.unlock(); }

 private:
  friend class CondVar;
  std::mutex mutex_;
};

class ABSL_SCOPED_LOCKABLE MutexLock {
 public:
  explicit MutexLock(Mutex* mutex) ABSL_EXCLUSIVE_LOCK_FUNCTION(mutex) : mutex_(mutex) { mutex_->Lock(); }
  ~MutexLock() ABSL_UNLOCK_FUNCTION() { mutex_->Unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex* const mutex_;
};

class CondVar {
 public:
  void Signal() { condition_.notify_one(); }
  void SignalAll() { condition_.notify_all(); }
  // Requires: `mutex` is held. Returns false when `timeout` passed first; spurious returns happen, so wait in a loop.
  bool WaitFor(Mutex* mutex, absl::Duration timeout) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    std::unique_lock<std::mutex> lock(mutex->mutex_, std::adopt_lock);
    // A steady deadline: std::condition_variable::wait_for with a huge duration overflows.
    const auto limit = std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(std::min(timeout, absl::Hours(24)));
    const bool signalled = condition_.wait_until(lock, limit) == std::cv_status::no_timeout;
    lock.release();
    return signalled;
  }

 private:
  std::condition_variable condition_;
};

}  // namespace tandem
