#include "trainer_server/rollout/rollout_peer.h"

#include <utility>

#include "common/base/check.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/rpc/channel.h"

namespace tandem {
namespace {

constexpr absl::Duration kStatusTimeout = absl::Seconds(2);

}  // namespace

RolloutPeer::RolloutPeer(Options options)
    : options_(std::move(options)), stub_(v1::RolloutService::NewStub(MakeChannel(options_.address))) {}

absl::Status RolloutPeer::WaitUntilServing() {
  const MonotonicTime begin = MonotonicTime::Now();
  const MonotonicTime deadline = begin + options_.patience;
  bool is_reported = false;
  absl::Status result;
  while (true) {
    if (options_.is_attached()) {
      grpc::ClientContext context;
      context.set_deadline(GrpcDeadline(MonotonicTime::Now() + kStatusTimeout));
      ScopedCall call(this, &context);
      v1::RolloutStatus status;
      if (stub_->GetStatus(&context, v1::RolloutStatusRequest(), &status).ok()) break;
    }
    if (MonotonicTime::Now() >= deadline) {
      result = absl::DeadlineExceededError(absl::StrCat("rollout_server at ", options_.address, " has not come back within ",
                                                        absl::FormatDuration(options_.patience)));
      break;
    }
    if (!is_reported) {
      SetWaiting(absl::StrCat("rollout_server at ", options_.address));
      TANDEM_LOG(kWarning, "rollout", "waiting for rollout_server at ", options_.address);
      is_reported = true;
    }
    {
      MutexLock lock(&mutex_);
      if (is_impatient_) result = absl::CancelledError("given up waiting: the job is asked to stop");
    }
    if (result.ok()) result = Pause(options_.poll_interval);
    if (!result.ok()) break;
  }
  if (is_reported) {
    SetWaiting("");
    TANDEM_LOG(kInfo, "rollout", "waited for rollout_server seconds=", absl::ToDoubleSeconds(MonotonicTime::Now() - begin),
               " result=", result.ok() ? "back" : std::string(result.message()));
  }
  return result;
}

absl::StatusOr<v1::RolloutStatus> RolloutPeer::GetStatus() const {
  grpc::ClientContext context;
  context.set_deadline(GrpcDeadline(MonotonicTime::Now() + kStatusTimeout));
  v1::RolloutStatus status;
  TANDEM_RETURN_IF_ERROR(FromGrpc(stub_->GetStatus(&context, v1::RolloutStatusRequest(), &status)));
  return status;
}

absl::Status RolloutPeer::Pause(absl::Duration duration) {
  const MonotonicTime until = MonotonicTime::Now() + duration;
  MutexLock lock(&mutex_);
  while (!is_interrupted_) {
    const absl::Duration left = until - MonotonicTime::Now();
    if (left <= absl::ZeroDuration()) return absl::OkStatus();
    interrupted_.WaitFor(&mutex_, left);
  }
  return absl::CancelledError("interrupted");
}

std::string RolloutPeer::waiting_for() const {
  MutexLock lock(&mutex_);
  return waiting_for_;
}

void RolloutPeer::SetWaiting(std::string what) {
  MutexLock lock(&mutex_);
  waiting_for_ = std::move(what);
}

void RolloutPeer::Interrupt() {
  MutexLock lock(&mutex_);
  is_interrupted_ = true;
  if (call_ != nullptr) call_->TryCancel();
  interrupted_.SignalAll();
}

void RolloutPeer::SetCancelled(bool is_cancelled) {
  MutexLock lock(&mutex_);
  is_cancelled_ = is_cancelled;
  if (is_cancelled_ && call_ != nullptr) call_->TryCancel();
}

bool RolloutPeer::is_interrupted() const {
  MutexLock lock(&mutex_);
  return is_interrupted_ || is_cancelled_;
}

void RolloutPeer::SetImpatient(bool is_impatient) {
  MutexLock lock(&mutex_);
  is_impatient_ = is_impatient;
  interrupted_.SignalAll();
}

RolloutPeer::ScopedCall::ScopedCall(RolloutPeer* peer, grpc::ClientContext* context) : peer_(peer) {
  MutexLock lock(&peer_->mutex_);
  TANDEM_CHECK(peer_->call_ == nullptr, "one call at a time");
  peer_->call_ = context;
  // gRPC keeps a cancellation that comes before the call starts.
  if (peer_->is_interrupted_ || peer_->is_cancelled_) context->TryCancel();
}

RolloutPeer::ScopedCall::~ScopedCall() {
  MutexLock lock(&peer_->mutex_);
  peer_->call_ = nullptr;
}

}  // namespace tandem
