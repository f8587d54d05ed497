// Rewards to advantages, per group of completions of one prompt. Pure functions; thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "common/base/status.h"

namespace tandem {

enum class AdvantageEstimator { kGroup, kRloo, kReinforcePlusPlus, kReinforcePlusPlusBaseline, kOpo };
enum class AdvantageScale { kGroup, kBatch, kNone };
enum class RewardAggregation { kSumThenNormalize, kNormalizeThenSum };

struct AdvantageOptions {
  AdvantageEstimator estimator = AdvantageEstimator::kGroup;
  AdvantageScale scale = AdvantageScale::kGroup;
  RewardAggregation aggregation = RewardAggregation::kSumThenNormalize;
  double epsilon = 1e-4;
  double kl_in_reward = 0;
  std::vector<double> weights;                 // one a reward function; empty: all 1
};

struct AdvantageSequence {
  std::vector<std::optional<double>> rewards;  // one a function; nullopt: it did not apply
  std::span<const double> old_logprobs;        // for kl_in_reward
  std::span<const double> ref_logprobs;
  std::span<const std::uint8_t> loss_mask;
};

struct AdvantageResult {
  std::vector<std::vector<double>> advantages; // [sequence]: one value, or one a token for REINFORCE++
  std::vector<std::optional<double>> rewards;  // weighted sum; nullopt: no function applied
  double reward_mean = 0, reward_std = 0, zero_std_fraction = 0;
  int groups_dropped = 0;                      // no member with a reward
};
// Sequence i belongs to group i / group_size. Errors: INVALID_ARGUMENT naming the function and row of a reward that is not finite,
// or a number of rewards that differs.
absl::StatusOr<AdvantageResult> ComputeAdvantages(const AdvantageOptions& options, std::span<const AdvantageSequence> sequences,
                                                  int group_size);

}  // namespace tandem
