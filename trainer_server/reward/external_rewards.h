// Rewards that this process does not compute itself: a Python function, a program under test, a remote service. Internal to this
// room: MakeRewardFunction is the entry.
#pragma once

#include <memory>

#include "trainer_server/reward/reward.h"
#include "trainer_server/reward/reward_functions.h"

namespace tandem {

// How a function's failures are taken.
class FailurePolicy {
 public:
  FailurePolicy(RewardIdentity identity, v1::RewardFailurePolicy policy)
      : identity_(std::move(identity)), counts_as_none_(policy == v1::REWARD_FAILURE_POLICY_COUNT_AS_NONE) {}

  // A call of which nothing came: as many None, or an error. CANCELLED and FAILED_PRECONDITION (of the node) are always errors.
  absl::StatusOr<RewardColumn> OnFailure(const absl::Status& failure, std::size_t num_completions, const RewardCall& call) const;
  // A completion without a value: None (OK), or an error.
  absl::Status OnFault(std::size_t completion, const std::string& fault, const RewardCall& call) const;
  const RewardIdentity& identity() const { return identity_; }

 private:
  const RewardIdentity identity_;
  const bool counts_as_none_;
};

// Each takes its message, defaults filled in, and adds its faults; null when there are any.
std::unique_ptr<RewardFunction> MakePythonReward(const v1::PythonFunction& config, FailurePolicy policy,
                                                 const RewardSurroundings& surroundings, RewardFaults* faults);
std::unique_ptr<RewardFunction> MakeRemoteReward(const v1::RemoteReward& config, FailurePolicy policy, RewardFaults* faults);
std::unique_ptr<RewardFunction> MakeCodeTests(const v1::CodeTests& config, FailurePolicy policy,
                                              const RewardSurroundings& surroundings, RewardFaults* faults);

// Adds a fault and gives 0 s where the value is none.
absl::Duration CheckTimeLimit(double seconds, double most, RewardFaults* faults);

}  // namespace tandem
