// The parts of one completion's loss, over its trained tokens only: ratio, multipliers, surrogate, KL, each with its derivative.
// Internal to this room; loss.cc weighs and adds them. Pure functions; thread-safe.
//
// Arrays are [num_trained]: masked rows are left out before any arithmetic, never multiplied by 0 (see Note [Masked rows]).
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "trainer_server/loss/loss.h"

namespace tandem {

bool IsTrainedToken(const LossOptions& options, const LossSequence& sequence, std::size_t t);

struct TrainedTokens {
  std::vector<std::size_t> positions;  // in the completion, ascending
  std::vector<double> policy, old;     // old is the policy's where the sequence has none
  std::vector<double> ref;             // empty: none
  std::vector<double> rollout;         // of the distribution before truncation: reported + log(kept_mass). Empty: none
  std::vector<double> entropies;       // empty: none
  std::vector<double> advantages;
  std::size_t size() const { return positions.size(); }
  double length() const;  // max(1, n_i)
};
// `sequence_index` is for messages. Errors: as EvaluateLoss, of inputs.
absl::StatusOr<TrainedTokens> SelectTrainedTokens(const LossOptions& options, const LossSequence& sequence,
                                                  std::size_t sequence_index);

// Importance ratios policy/old at the level of the options.
struct Ratios {
  RatioLevel level = RatioLevel::kToken;
  double length = 1;
  std::vector<double> values;
  std::vector<double> flows;  // 1 where the log-ratio is not clamped, else 0
  // d/d(log r) of each token -> d/d(policy log-prob), through the ratio's own definition.
  std::vector<double> ToPolicyGradient(std::vector<double> per_token) const;
};
Ratios ComputeRatios(const LossOptions& options, const TrainedTokens& tokens);
bool IsRatioShared(RatioLevel level);

// Stop-gradient weights old/rollout; all 1 without correction.
struct RolloutWeights {
  std::vector<double> weights;
  std::vector<double> raw;      // what the bounds were tested on: one a token, or one a sequence. Empty without rollout log-probs
  std::size_t num_clipped = 0;  // tokens whose weight was cut to a bound
  std::size_t num_masked = 0;   // tokens whose weight became 0
};
RolloutWeights ComputeRolloutWeights(const LossOptions& options, const TrainedTokens& tokens);

// 0 where a token with negative advantage sits in a sequence that drifted from its sampler by more than off_policy_threshold,
// else 1.
std::vector<double> ComputeOffPolicyKeep(const LossOptions& options, const TrainedTokens& tokens);

// VESPO's phi, one a sequence; log w is clamped to [ln 1e-8, 20].
double ComputeVespoPhi(const LossOptions& options, const TrainedTokens& tokens, std::span<const double> rollout_weights);

struct Terms {
  std::vector<double> values;    // of each token
  std::vector<double> gradient;  // d/d(policy log-prob) of sum_t scale_t values_t
};
Terms EvaluateSurrogate(const LossOptions& options, const TrainedTokens& tokens, const Ratios& ratios,
                        std::span<const double> rollout_weights, std::span<const double> scale);

struct KlTerms {
  Terms terms;
  std::size_t num_clamped = 0;  // tokens where either clamp acts
};
KlTerms EvaluateKl(const LossOptions& options, const TrainedTokens& tokens, const Ratios& ratios, double scale);

}  // namespace tandem
