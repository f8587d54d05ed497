// The rollout server as the trainer sees it: a channel, and patience while it is away. Thread-safe.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/time/time.h"
#include "common/base/mutex.h"
#include "common/base/status.h"
#include "proto/rollout.grpc.pb.h"

namespace tandem {

class RolloutPeer {
 public:
  struct Options {
    std::string address;
    std::function<bool()> is_attached;  // to the pool
    absl::Duration patience = absl::Hours(1);
    absl::Duration poll_interval = absl::Milliseconds(50);
  };
  explicit RolloutPeer(Options options);

  v1::RolloutService::Stub* stub() const { return stub_.get(); }
  const std::string& address() const { return options_.address; }
  absl::Duration patience() const { return options_.patience; }

  // Until the server is attached to the pool and answers. Errors: CANCELLED (Interrupt, SetImpatient),
  // DEADLINE_EXCEEDED (patience).
  absl::Status WaitUntilServing();
  // What the server says of itself, asked once. May be called on any thread; blocks for at most 2 s. Errors: those of the call.
  absl::StatusOr<v1::RolloutStatus> GetStatus() const;
  // Sleeps for `duration`, or less when interrupted. Errors: CANCELLED.
  absl::Status Pause(absl::Duration duration);
  // What is waited for now, for people; empty when nothing.
  std::string waiting_for() const;

  // A call whose context must end when the peer is interrupted.
  class ScopedCall {
   public:
    ScopedCall(RolloutPeer* peer, grpc::ClientContext* context);
    ~ScopedCall();
    ScopedCall(const ScopedCall&) = delete;
    ScopedCall& operator=(const ScopedCall&) = delete;

   private:
    RolloutPeer* const peer_;
  };

  // Ends the call and the wait under way and every later one: the daemon stops.
  void Interrupt();
  // While set, calls end at once: the job is cancelled. What waits without a call does not hear of it.
  void SetCancelled(bool is_cancelled);
  // By either: work for the job may end.
  bool is_interrupted() const;
  // While set, WaitUntilServing gives up where it would have to wait: the job is asked to pause or to end.
  void SetImpatient(bool is_impatient);

 private:
  void SetWaiting(std::string what);

  const Options options_;
  const std::unique_ptr<v1::RolloutService::Stub> stub_;
  mutable Mutex mutex_;
  CondVar interrupted_;
  bool is_interrupted_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_impatient_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::ClientContext* call_ ABSL_GUARDED_BY(mutex_) = nullptr;
  std::string waiting_for_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tandem
