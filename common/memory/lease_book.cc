#include "common/memory/lease_book.h"

#include "common/base/check.h"

namespace tandem {
namespace {

absl::Status CheckBorrower(v1::Role role) {
  if (role == v1::ROLE_TRAINER) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("lease: role ", static_cast<int>(role), " is not ROLE_TRAINER, who alone borrows the elastic range"));
}

absl::Status WrongEpoch(const char* what, std::uint64_t asked, const v1::LeaseState& state) {
  return absl::AbortedError(absl::StrCat("lease: ", what, " names epoch ", asked, ", the current one is ", state.epoch(),
                                         ", held by ", RoleName(state.holder())));
}

}  // namespace

const char* RoleName(v1::Role role) {
  if (role == v1::ROLE_ROLLOUT) return "rollout_server";
  if (role == v1::ROLE_TRAINER) return "trainer_server";
  return "nobody";
}

LeaseBook::LeaseBook(const v1::ByteRange& range, v1::Role holder) {
  state_.set_epoch(1);
  state_.set_holder(holder);
  *state_.mutable_range() = range;
}

absl::StatusOr<LeaseBook::Verdict> LeaseBook::CheckAcquire(v1::Role role, std::uint64_t request_epoch) const {
  TANDEM_RETURN_IF_ERROR(CheckBorrower(role));
  if (holder() == role && (request_epoch == epoch() || request_epoch + 1 == epoch())) return Verdict::kAlreadyHeld;
  if (request_epoch != epoch()) return WrongEpoch("an acquisition", request_epoch, state_);
  if (holder() != v1::ROLE_ROLLOUT)
    return absl::FailedPreconditionError(
        absl::StrCat("lease: held by ", RoleName(holder()), ", not by rollout_server, who alone gives it; epoch ", epoch()));
  return Verdict::kMustYield;
}

void LeaseBook::Grant(v1::Role role) {
  TANDEM_CHECK(holder() == v1::ROLE_ROLLOUT && role == v1::ROLE_TRAINER, RoleName(holder()), " gives to ", RoleName(role));
  Transfer(role);
}

absl::StatusOr<bool> LeaseBook::Release(v1::Role role, std::uint64_t epoch_released) {
  TANDEM_RETURN_IF_ERROR(CheckBorrower(role));
  if (holder() != role) {
    if (last_holder_ == role && epoch_released + 1 == epoch()) return false;
    if (epoch_released != epoch()) return WrongEpoch("a release", epoch_released, state_);
    return absl::FailedPreconditionError(
        absl::StrCat("lease: ", RoleName(role), " releases what ", RoleName(holder()), " holds; epoch ", epoch()));
  }
  if (epoch_released != epoch()) return WrongEpoch("a release", epoch_released, state_);
  Transfer(v1::ROLE_ROLLOUT);
  return true;
}

bool LeaseBook::EndLeaseOf(v1::Role role, v1::Role successor) {
  if (role == v1::ROLE_UNSPECIFIED || holder() != role) return false;
  Transfer(successor);
  return true;
}

bool LeaseBook::TakeIfFree(v1::Role role) {
  if (holder() != v1::ROLE_UNSPECIFIED) return false;
  Transfer(role);
  return true;
}

absl::Status LeaseBook::Adopt(const v1::LeaseState& state) {
  if (state.epoch() < epoch()) return WrongEpoch("a state", state.epoch(), state_);
  if (state.range().begin_bytes() != state_.range().begin_bytes() || state.range().end_bytes() != state_.range().end_bytes())
    return absl::InvalidArgumentError(absl::StrCat("lease: range [", state.range().begin_bytes(), ", ", state.range().end_bytes(),
                                                   ") is not the elastic range [", state_.range().begin_bytes(), ", ",
                                                   state_.range().end_bytes(), ")"));
  if (state.epoch() != epoch()) last_holder_ = holder();
  state_ = state;
  return absl::OkStatus();
}

void LeaseBook::Transfer(v1::Role holder) {
  last_holder_ = state_.holder();
  state_.set_holder(holder);
  state_.set_epoch(state_.epoch() + 1);
}

}  // namespace tandem
