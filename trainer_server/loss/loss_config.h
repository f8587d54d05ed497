// From the job file's loss and advantage to their options. A preset fills what is not set; every fault is collected, one a line:
// field path, value, limit. Pure functions; thread-safe.
//
// Presets (surrogate, ratio level, aggregation, clip bounds; what else was published, such as learning rates and KL
// coefficients, is in job/recipe.cc):
//   unspecified, dapo      clip, token, token_mean, 0.2 / 0.28
//   grpo                   clip, token, sequence_mean, 0.2 / 0.2
//   bnpo                   clip, token, micro_batch_token_mean, 0.2 / 0.2
//   dr_grpo                clip, token, constant, 0.2 / 0.2; advantages without division by the spread
//   gspo                   clip, sequence, sequence_mean, 3e-4 / 4e-4
//   cispo                  cispo, token, token_mean, largest ratio 5
//   sapo                   sapo, token, sequence_mean, temperatures 1.0 / 1.05
//   luspo                  clip, sequence, sequence_sum, 2e-3 / 2.5e-3
//   vespo                  vespo, token, token_mean
//   gmpo                   gmpo, token, sequence_mean, 0.4 / 0.4 in log space
//   rloo                   clip, sequence_product, sequence_mean, 0.2 / 0.2; leave-one-out advantages
//   reinforce              reinforce, token, token_mean
//   reinforce_plus_plus    clip, token, token_mean, 0.2 / 0.2; returns whitened over tokens
// All: beta 0, KL clamps 20 and 10, rollout weights truncated at 2 by token. A correction mode without bounds takes its published
// ones: token_truncate and sequence_truncate max 2, token_mask [0.5, 5], sequence_mask max 3, geometric_mask [0.999, 1.002].
//
// Refused, for they would have no effect or no meaning:
//   - a field of another surrogate: epsilon_* (clip, gmpo), delta (clip), cispo_* (cispo), sapo_* (sapo), vespo_* (vespo),
//   log_ratio_clamp where no ratio enters
//   - kl_* fields where beta is not set; k1 in the loss without bias correction (the expected gradient is 0)
//   - constant_divisor without the aggregation constant; count_empty_sequences: false where sequences are not counted (token
//   means)
//   - correction bounds with mode none; vespo with a correction that is not by token; a constant divisor, delta or bound out of
//   range
//   - advantage.scale, .epsilon and .aggregation with an estimator that does not divide by a spread; kl_in_reward with one that
//   has no place
//     for it; scale with normalize_then_sum, which brings its own
//   - vespo with reinforce_plus_plus advantages: phi takes one sign a sequence
#pragma once

#include <string>
#include <vector>

#include "proto/job.pb.h"
#include "trainer_server/advantage/advantage.h"
#include "trainer_server/loss/loss.h"

namespace tandem {

// An unspecified preset is the project's default. `default_constant_divisor` is the job's max_tokens. With faults the result is
// unspecified.
LossOptions LossOptionsFromConfig(const v1::LossConfig& config, double default_constant_divisor,
                                  std::vector<std::string>* faults);

// Reward weights and names are left to the caller.
AdvantageOptions AdvantageOptionsFromConfig(const v1::AdvantageConfig& config, v1::LossPreset preset,
                                            std::vector<std::string>* faults);

// What the two must agree on.
void CheckRecipe(const LossOptions& loss, const AdvantageOptions& advantage, std::vector<std::string>* faults);

}  // namespace tandem
