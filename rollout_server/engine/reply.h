// One answer from the engine thread to a caller that waits with a deadline. A caller that gave up has not had its wish done: the
// engine claims the reply before it acts, and a claimed reply is waited for. Thread-safe.
#pragma once

#include "common/base/clock.h"
#include "common/base/mutex.h"
#include "common/base/status.h"

namespace tandem {

class Reply {
 public:
  // Engine: false when the caller gave up; then nothing may be done. After true, Set must follow soon.
  bool Claim() {
    MutexLock lock(&mutex_);
    if (state_ == State::kAbandoned) return false;
    state_ = State::kClaimed;
    return true;
  }
  bool is_abandoned() const {
    MutexLock lock(&mutex_);
    return state_ == State::kAbandoned;
  }
  void Set(absl::Status status) {
    MutexLock lock(&mutex_);
    if (state_ == State::kAbandoned) return;
    status_ = std::move(status);
    state_ = State::kSet;
    changed_.SignalAll();
  }
  // Caller. Errors: DEADLINE_EXCEEDED (nothing was done), or what the engine set.
  absl::Status Wait(MonotonicTime deadline, std::string_view what) {
    MutexLock lock(&mutex_);
    while (state_ != State::kSet) {
      const absl::Duration left = deadline - MonotonicTime::Now();
      if (left <= absl::ZeroDuration() && state_ == State::kOpen) {
        state_ = State::kAbandoned;
        return absl::DeadlineExceededError(absl::StrCat(ToAbsl(what), ": not done by its deadline"));
      }
      changed_.WaitFor(&mutex_, state_ == State::kOpen ? left : absl::Milliseconds(100));
    }
    return status_;
  }

 private:
  enum class State { kOpen, kClaimed, kSet, kAbandoned };
  mutable Mutex mutex_;
  CondVar changed_;
  State state_ ABSL_GUARDED_BY(mutex_) = State::kOpen;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tandem
