// Keeps gRPC's timers going when the time of day is set back.
#pragma once

#include <atomic>
#include <functional>
#include <memory>

#include "absl/time/time.h"
#include "common/base/clock.h"
#include "common/base/status.h"
#include "common/base/unique_fd.h"
#include "grpcpp/alarm.h"

namespace tandem {

// Note [Time of day]
// Our own waits go by MonotonicTime. gRPC's timers (deadlines, keepalive, the pause before a connection is tried again) do too,
// but the two threads that run them sleep in a futex of Abseil's until a time of day: set back by an hour, they would sleep an
// hour longer. A timer that is due before all others wakes them. One that is due in the moment of the change cannot be overtaken;
// then timers stand still, and the daemon ends rather than hang: its next life attaches, and nothing is lost.

// Confined to one thread.
class ClockWatch {
 public:
  ClockWatch();
  ~ClockWatch();
  // Sleeps, shorter when the time of day is set; sees to gRPC's timers then.
  void Sleep(absl::Duration duration);
  // Errors: INTERNAL (gRPC's timers stand still).
  absl::Status health() const;

 private:
  using Pending = std::shared_ptr<std::atomic<bool>>;  // a timer that has not run yet; outlives what sets it
  void Arm();
  void Wake(const Pending& pending, const std::function<void(absl::Duration delay)>& set_timer);

  const UniqueFd timer_;   // readable when the time of day was set
  absl::Duration offset_;  // of the time of day from the monotonic clock, when last looked at
  grpc::Alarm alarm_;
  const Pending alarm_pending_ = std::make_shared<std::atomic<bool>>(false);
  const Pending task_pending_ = std::make_shared<std::atomic<bool>>(false);
  MonotonicTime set_back_;  // when it was, last
};

}  // namespace tandem
