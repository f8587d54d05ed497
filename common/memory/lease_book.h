// Who may touch the elastic range, as one daemon knows it: the rules of proto/pool.proto LeaseState, without clocks, calls or
// memory.
//
// Every transfer raises the epoch by one, so of two messages the one with the older epoch is late and is refused. The rollout
// server gives and takes the lease while it lives; the trainer keeps the book alone while no rollout server is attached.
// Thread-compatible.
#pragma once

#include "common/base/status.h"
#include "proto/pool.pb.h"

namespace tandem {

// "rollout_server", "trainer_server", "nobody".
const char* RoleName(v1::Role role);

class LeaseBook {
 public:
  // A fresh pool's: epoch 1.
  LeaseBook(const v1::ByteRange& range, v1::Role holder);

  enum class Verdict {
    kAlreadyHeld,  // an answer that was lost, or asked for twice: answer state()
    kMustYield,    // the rollout server must fence; then Grant
  };
  // May the trainer have the lease? Changes nothing. Errors: INVALID_ARGUMENT (role), ABORTED (epoch), FAILED_PRECONDITION (held
  // by nobody: the rollout server has to take it first).
  absl::StatusOr<Verdict> CheckAcquire(v1::Role role, std::uint64_t request_epoch) const;
  // Requires: CheckAcquire said kMustYield, and nothing changed since.
  void Grant(v1::Role role);
  // The trainer gives it back to the rollout server; true when that changed something, false for a repeated message.
  // Errors: INVALID_ARGUMENT (role), ABORTED (epoch), FAILED_PRECONDITION (the caller does not hold it).
  absl::StatusOr<bool> Release(v1::Role role, std::uint64_t epoch);

  // `role` died, or left its peer alone: what it held goes to `successor` (UNSPECIFIED: nobody). True when it held the lease.
  bool EndLeaseOf(v1::Role role, v1::Role successor);
  // A rollout server attaches: what nobody holds is its. True when that changed something.
  bool TakeIfFree(v1::Role role);
  // The state that the authority told. Errors: ABORTED when it is older than this book, INVALID_ARGUMENT when its range differs.
  absl::Status Adopt(const v1::LeaseState& state);

  const v1::LeaseState& state() const { return state_; }
  v1::Role holder() const { return state_.holder(); }
  std::uint64_t epoch() const { return state_.epoch(); }

 private:
  void Transfer(v1::Role holder);

  v1::LeaseState state_;
  v1::Role last_holder_ = v1::ROLE_UNSPECIFIED;  // before the last transfer
};

}  // namespace tandem
