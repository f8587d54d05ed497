#include "trainer_server/step/elastic_phase.h"

#include "common/base/clock.h"
#include "common/base/repeated_log.h"

namespace tandem {

absl::Status ElasticPhase::Enter() {
  // Kept after a release whose answer never came: the peer may have the region all the same, so it is given back before it is
  // used.
  if (options_.member->holds_elastic()) TANDEM_RETURN_IF_ERROR(Leave());
  const MonotonicTime limit = MonotonicTime::Now() + peer_->patience();
  RepeatedLog refusals("step");
  while (!options_.member->holds_elastic()) {
    const auto lease = options_.member->AcquireElastic(v1::STREAM_MODE_PAUSE, MonotonicTime::Now() + options_.call_deadline);
    if (lease.ok()) break;
    const absl::Status status = lease.status();
    if (!absl::IsUnavailable(status) && !absl::IsDeadlineExceeded(status) && !absl::IsAborted(status) &&
        !absl::IsCancelled(status)) {
      return Annotate(status, "acquiring the elastic region");
    }
    if (MonotonicTime::Now() > limit) return Annotate(status, "acquiring the elastic region");
    refusals.Warn(absl::StrCat("elastic region not acquired because=", status.message()));
    TANDEM_RETURN_IF_ERROR(peer_->Pause(absl::Milliseconds(50)));
    TANDEM_RETURN_IF_ERROR(peer_->WaitUntilServing());
  }
  if (options_.enter_arena) arena_ = options_.enter_arena(options_.member->region(v1::REGION_KIND_ELASTIC));
  return absl::OkStatus();
}

absl::Status ElasticPhase::Leave() {
  if (is_entered()) {
    TANDEM_RETURN_IF_ERROR(
        Annotate(SynchronizeDevice(options_.member->device()), "fence before the elastic region is given back"));
  }
  if (arena_ != nullptr) peak_bytes_ = arena_->peak_bytes();
  arena_.reset();
  const MonotonicTime limit = MonotonicTime::Now() + peer_->patience();
  RepeatedLog refusals("step");
  while (options_.member->holds_elastic()) {
    const absl::Status status = options_.member->ReleaseElastic(MonotonicTime::Now() + options_.call_deadline);
    if (status.ok()) break;
    if (MonotonicTime::Now() > limit) return Annotate(status, "giving the elastic region back");
    refusals.Warn(absl::StrCat("elastic region not given back because=", status.message()));
    TANDEM_RETURN_IF_ERROR(peer_->Pause(absl::Milliseconds(50)));
    TANDEM_RETURN_IF_ERROR(peer_->WaitUntilServing());
  }
  return absl::OkStatus();
}

}  // namespace tandem
