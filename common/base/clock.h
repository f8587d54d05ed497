// The clock of waits, deadlines and intervals: it goes on evenly whatever is done to the time of day. absl::Now() is for what
// people read: log lines, time stamps.
#pragma once

#include <chrono>
#include <compare>

#include "absl/time/time.h"

namespace tandem {

// A moment on CLOCK_MONOTONIC of this machine; means nothing on another, or after a restart of the machine.
class MonotonicTime {
 public:
  constexpr MonotonicTime() = default;  // the start of the machine
  static MonotonicTime Now() {
    return MonotonicTime(absl::FromChrono(std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch())));
  }
  static MonotonicTime InfinitePast() { return MonotonicTime(-absl::InfiniteDuration()); }
  static MonotonicTime InfiniteFuture() { return MonotonicTime(absl::InfiniteDuration()); }

  friend MonotonicTime operator+(MonotonicTime time, absl::Duration wait) { return MonotonicTime(time.since_start_ + wait); }
  friend MonotonicTime operator-(MonotonicTime time, absl::Duration wait) { return MonotonicTime(time.since_start_ - wait); }
  friend absl::Duration operator-(MonotonicTime end, MonotonicTime begin) { return end.since_start_ - begin.since_start_; }
  friend bool operator==(MonotonicTime a, MonotonicTime b) { return a.since_start_ == b.since_start_; }
  friend std::weak_ordering operator<=>(MonotonicTime a, MonotonicTime b) {
    if (a.since_start_ == b.since_start_) return std::weak_ordering::equivalent;
    return a.since_start_ < b.since_start_ ? std::weak_ordering::less : std::weak_ordering::greater;
  }

 private:
  explicit constexpr MonotonicTime(absl::Duration since_start) : since_start_(since_start) {}
  absl::Duration since_start_;
};

}  // namespace tandem
