// Rewards to advantages, per group of completions of one prompt. Pure functions; thread-safe.
//
//   kGroup                    R - mean of the group, divided by (std + epsilon) of the group or of the batch, or not at all
//   kRloo                     R - mean of the group's other rewards (Ahmadian et al. 2024, 2402.14740)
//   kReinforcePlusPlus        reward at the last token less k1 at each, returns whitened over the step's tokens (Hu 2025,
//   2501.03262) kReinforcePlusPlusBaseline  R - mean of the group, whitened over the step's tokens kOpo                      R -
//   mean of the group weighted by length (Hao et al. 2025, 2505.23585)
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/base/status.h"
#include "trainer_server/reward/spread.h"

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
  std::vector<double> weights;              // one a reward function; empty: all 1
  std::vector<std::string> function_names;  // for messages; empty: numbered
};

struct AdvantageSequence {
  std::vector<std::optional<double>> rewards;  // one a function; nullopt: it did not apply
  std::span<const double> old_logprobs;        // for kl_in_reward
  std::span<const double> ref_logprobs;
  std::span<const std::uint8_t> loss_mask;  // for the estimators that weigh tokens: all but kGroup and kRloo without KL
};

struct AdvantageResult {
  std::vector<std::vector<double>> advantages;  // [sequence]: one value, or one a token for REINFORCE++
  std::vector<std::optional<double>> rewards;   // weighted sum; nullopt: no function applied
  double reward_mean = 0, reward_std = 0, zero_std_fraction = 0;
  int groups_dropped = 0;  // no member with a reward
};
// The weighted sum of the functions that applied; nullopt when none did. Empty weights: all 1.
std::optional<double> WeightedReward(std::span<const std::optional<double>> rewards, std::span<const double> weights);

// Sequence i belongs to group i / group_size. A sequence without reward gets advantage 0 and leaves every mean. Errors:
// INVALID_ARGUMENT naming the function and row of a reward that is not finite, or a number of rewards that differs.
absl::StatusOr<AdvantageResult> ComputeAdvantages(const AdvantageOptions& options, std::span<const AdvantageSequence> sequences,
                                                  int group_size);

}  // namespace tandem
