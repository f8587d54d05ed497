#include "common/rpc/clock_watch.h"

#include <poll.h>
#include <sys/timerfd.h>

#include <chrono>

#include "absl/time/clock.h"
#include "common/base/log.h"
#include "common/rpc/channel.h"
#include "grpc/event_engine/event_engine.h"

namespace grpc_event_engine::experimental {
// In this header of gRPC from 1.53 on; the library of 1.51 has it.
std::shared_ptr<EventEngine> GetDefaultEventEngine();
}  // namespace grpc_event_engine::experimental

namespace tandem {
namespace {

constexpr absl::Duration kNoticed = absl::Milliseconds(100);  // from one look to the next: smaller steps back are waited for
constexpr absl::Duration kPatience = absl::Seconds(10);       // with timers that stand still

// Since 1970. Not absl::Now(), which extrapolates for two seconds.
absl::Duration TimeOfDay() { return absl::FromChrono(std::chrono::system_clock::now().time_since_epoch()); }

// Of the time of day from the monotonic clock, read in one go.
absl::Duration Offset() {
  while (true) {
    const MonotonicTime before = MonotonicTime::Now();
    const absl::Duration time_of_day = TimeOfDay();
    if (MonotonicTime::Now() - before < absl::Milliseconds(10)) return time_of_day - (before - MonotonicTime());
  }
}

}  // namespace

ClockWatch::ClockWatch() : timer_(::timerfd_create(CLOCK_REALTIME, TFD_CLOEXEC | TFD_NONBLOCK)), offset_(Offset()) { Arm(); }

ClockWatch::~ClockWatch() { alarm_.Cancel(); }

void ClockWatch::Arm() {
  itimerspec far{};
  far.it_value = absl::ToTimespec(TimeOfDay() + absl::Hours(24 * 365));
  ::timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME | TFD_TIMER_CANCEL_ON_SET, &far, nullptr);
}

void ClockWatch::Sleep(absl::Duration duration) {
  pollfd entry{.fd = timer_.get(), .events = POLLIN, .revents = 0};
  ::poll(&entry, 1, static_cast<int>(absl::ToInt64Milliseconds(duration)));
  if ((entry.revents & POLLIN) != 0) Arm();
  const absl::Duration offset = Offset(), jump = offset - offset_;
  offset_ = offset;
  if (absl::AbsDuration(jump) < kNoticed) return;
  if (jump < absl::ZeroDuration()) {
    set_back_ = MonotonicTime::Now();
    Wake(alarm_pending_, [this](absl::Duration delay) {
      alarm_.Set(GrpcDeadline(MonotonicTime::Now() + delay), [pending = alarm_pending_](bool) { *pending = false; });
    });
    Wake(task_pending_, [this](absl::Duration delay) {
      grpc_event_engine::experimental::GetDefaultEventEngine()->RunAfter(absl::ToChronoNanoseconds(delay),
                                                                         [pending = task_pending_] { *pending = false; });
    });
  }
  TANDEM_LOG(kWarning, "daemon", "the time of day jumped by ", absl::FormatDuration(jump), "; no wait goes by it");
}

// A timer that is due when it is set is run at once and wakes nobody: then again, with more time.
void ClockWatch::Wake(const Pending& pending, const std::function<void(absl::Duration delay)>& set_timer) {
  for (absl::Duration delay = absl::Milliseconds(2); delay < absl::Milliseconds(100) && !pending->exchange(true); delay *= 2) {
    const MonotonicTime begin = MonotonicTime::Now();
    set_timer(delay);
    if (MonotonicTime::Now() - begin < delay) return;
    while (pending->load() && MonotonicTime::Now() - set_back_ < kPatience) absl::SleepFor(absl::Milliseconds(1));
  }
}

absl::Status ClockWatch::health() const {
  if (!alarm_pending_->load() && !task_pending_->load()) return absl::OkStatus();
  if (MonotonicTime::Now() - set_back_ < kPatience) return absl::OkStatus();
  return absl::InternalError(
      "gRPC's timers stand still since the time of day was set back: this process ends, to be started again; nothing is lost");
}

}  // namespace tandem
