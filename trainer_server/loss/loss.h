// The policy loss: surrogate x ratio level x aggregation, KL, corrections; closed-form gradients with respect to each token's
// log-prob and entropy. Everything of size vocabulary lives in the head operator, not here. Pure functions; thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/base/status.h"

namespace tandem {

enum class Surrogate { kClip, kCispo, kSapo, kVespo, kGmpo, kReinforce };
enum class RatioLevel { kToken, kSequence, kSequenceToken, kSequenceProduct };
enum class Aggregation { kSequenceMean, kTokenMean, kMicroBatchTokenMean, kConstant, kSequenceSum };
enum class KlEstimator { kK1, kK2, kK3 };
enum class RolloutCorrectionMode { kNone, kTokenTruncate, kTokenMask, kSequenceTruncate, kSequenceMask, kGeometricMask };

struct LossOptions {
  Surrogate surrogate = Surrogate::kClip;
  RatioLevel ratio_level = RatioLevel::kToken;
  Aggregation aggregation = Aggregation::kTokenMean;
  double epsilon_low = 0.2;
  double epsilon_high = 0.2;
  std::optional<double> delta;
  std::optional<double> log_ratio_clamp;
  std::optional<double> cispo_min_ratio;
  double cispo_max_ratio = 5;
  double sapo_temperature_positive = 1.0;
  double sapo_temperature_negative = 1.05;
  double vespo_k_positive = 2, vespo_lambda_positive = 3, vespo_k_negative = 3, vespo_lambda_negative = 2;
  double beta = 0;
  KlEstimator kl_estimator = KlEstimator::kK3;
  bool kl_bias_correction = false;
  std::optional<double> kl_log_ratio_clamp;
  std::optional<double> kl_output_clamp;
  double max_completion_length = 16;  // the divisor of kConstant
  bool mask_truncated = false;
  bool count_empty_sequences = true;
  std::optional<double> denominator_override;
  RolloutCorrectionMode rollout_correction = RolloutCorrectionMode::kNone;
  std::optional<double> correction_min, correction_max;
  std::optional<double> off_policy_threshold;
  double top_entropy_quantile = 1;
  double entropy_coefficient = 0;
};
// One line a fault: field (as job.proto names it), value, limit.
std::vector<std::string> LossOptionFaults(const LossOptions& options);
// Errors: INVALID_ARGUMENT listing every field, value and limit, one a line.
absl::Status ValidateLossOptions(const LossOptions& options);

// The loss mask of a completion: 1 for each of its tokens, by its length alone (never by comparing ids with an end or pad id); 0
// for all when options.mask_truncated and it ended by the token limit.
std::vector<std::uint8_t> LossMaskFromLength(const LossOptions& options, std::size_t num_completion_tokens, bool is_truncated);

// One completion's per-token inputs, all of one length. Empty spans: absent (old: equal to the policy's, ratio 1).
//
// Note [Masked rows]
// A token is trained when its loss_mask is 1, the completion is not masked as truncated, and its rollout log-prob is not -inf (a
// token that the sampler's truncation made impossible). Other tokens' values are never read: they may be NaN. They leave n_i and
// n.
struct LossSequence {
  std::span<const double> policy_logprobs;
  std::span<const double> old_logprobs;
  std::span<const double> ref_logprobs;
  std::span<const double> rollout_logprobs;
  std::span<const double> entropies;
  std::span<const std::uint8_t> loss_mask;  // 1: trained
  std::span<const double> kept_mass;        // of top-k/top-p/min-p; empty: all 1. old - log(kept_mass) is compared with rollout
  std::span<const double> advantages;       // one value, or one a token
  bool is_truncated = false;
};

// The denominators of one optimizer step, over all micro-batches of all ranks: known before the first backward.
struct StepTotals {
  double num_sequences = 0;
  double num_tokens = 0;
  double num_micro_batches = 0;
  double entropy_threshold = 0;  // of the top-entropy mask; -inf when off
  double num_entropy_tokens = 0;

  // The counts of another rank. Requires: one entropy threshold, so with a top-entropy mask the entropies of all ranks are
  // gathered and ComputeStepTotals sees all sequences instead.
  void Add(const StepTotals& other);
};
StepTotals ComputeStepTotals(const LossOptions& options, std::span<const LossSequence> all_sequences, int num_micro_batches);

struct LossMetrics {  // sums and counts: add over micro-batches, divide once
  double kl_sum = 0, approx_kl_old_sum = 0, ratio_sum = 0, ratio_max = 0, entropy_sum = 0;
  double clip_low = 0, clip_high = 0, delta_clip = 0, ratio_count = 0, token_count = 0;
  double logprob_difference_sum = 0, logprob_difference_max = 0, difference_count = 0;  // |old - rollout|
  double rollout_weight_sum = 0, rollout_weight_min = 0, rollout_weight_max = 0,
         rollout_ratio_max = 0;  // raw ratio before clipping
  double rollout_clipped = 0, rollout_masked = 0, rollout_weight_count = 0;
  double kl_clamped = 0, off_policy_masked = 0;
  std::vector<double> rollout_ratio_histogram;  // counts by bucket; see kRolloutRatioBuckets; empty without rollout log-probs
  double sequence_count = 0, phi_sum = 0, top_entropy_count = 0;
  void Add(const LossMetrics& other);
};
// Denominators: token_count (kl, approx_kl_old, entropy, top_entropy), ratio_count (ratio, clip, delta_clip: tokens, or sequences
// where the ratio is one a sequence), difference_count, rollout_weight_count (tokens: weight, clipped, masked), sequence_count
// (phi). Histogram and rollout_ratio_max hold what the correction tests: old/rollout of a token, or its product or geometric mean
// over a sequence.

// Inclusive upper bounds; one more bucket beyond.
inline constexpr double kRolloutRatioBuckets[] = {0.1, 0.5, 0.8, 0.9, 0.99, 1.01, 1.1, 1.25, 2, 5, 10, 100};
// A share of tokens masked by the rollout correction above which the two sides disagree too much to train on.
inline constexpr double kRolloutMaskedWarningShare = 0.1;
// A sentence for the log when more than kRolloutMaskedWarningShare of the tokens was masked.
std::optional<std::string> RolloutMaskWarning(const LossMetrics& metrics);

struct LossResult {
  double loss = 0;                                  // this micro-batch's share
  std::vector<std::vector<double>> grad_logprobs;   // [sequence][token]; 0 outside the mask
  std::vector<std::vector<double>> grad_entropies;  // empty without an entropy bonus
  LossMetrics metrics;
};
// Requires: options that pass ValidateLossOptions; totals of the whole step. Gradients are summed over micro-batches and ranks.
// Errors: INVALID_ARGUMENT when an input that the options need is absent or arrays differ in length; FAILED_PRECONDITION when an
// input, the loss or a gradient is not finite, naming sequence (its index in micro_batch) and token.
absl::StatusOr<LossResult> EvaluateLoss(const LossOptions& options, const StepTotals& totals,
                                        std::span<const LossSequence> micro_batch);

}  // namespace tandem
