#include "trainer_server/loss/loss.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/base/check.h"
#include "trainer_server/loss/sequence_terms.h"

namespace tandem {
namespace {

double NumTrained(const LossOptions& options, const LossSequence& sequence) {
  double count = 0;
  for (std::size_t t = 0; t < sequence.loss_mask.size(); ++t) count += IsTrainedToken(options, sequence, t) ? 1 : 0;
  return count;
}

// Quantile with linear interpolation. Requires: values not empty, q in [0, 1].
double Quantile(std::vector<double> values, double q) {
  std::ranges::sort(values);
  const double position = q * static_cast<double>(values.size() - 1);
  const auto low = static_cast<std::size_t>(position);
  const std::size_t high = std::min(low + 1, values.size() - 1);
  return values[low] + (position - static_cast<double>(low)) * (values[high] - values[low]);
}

// w_i, a function of step-wide counts only (micro_batch_token_mean apart, which is defined by its micro-batch).
double SequenceWeight(const LossOptions& options, const StepTotals& totals, double sequence_tokens, double micro_batch_tokens) {
  const double num_sequences = std::max(1.0, totals.num_sequences);
  switch (options.aggregation) {
    case Aggregation::kSequenceMean:
      return 1 / (num_sequences * std::max(1.0, sequence_tokens));
    case Aggregation::kTokenMean:
      return 1 / std::max(1.0, options.denominator_override.value_or(totals.num_tokens));
    case Aggregation::kMicroBatchTokenMean:
      return 1 / (std::max(1.0, totals.num_micro_batches) * std::max(1.0, micro_batch_tokens));
    case Aggregation::kConstant:
      return 1 / (num_sequences * options.max_completion_length);
    case Aggregation::kSequenceSum:
      return 1 / num_sequences;
  }
  TANDEM_CHECK(false, "unknown aggregation ", static_cast<int>(options.aggregation));
}

// 1 for tokens at or above the step's entropy threshold, else 0; all 1 when the mask is off.
std::vector<double> EntropyKeep(const LossOptions& options, const StepTotals& totals, const TrainedTokens& tokens) {
  std::vector<double> keep(tokens.size(), 1);
  if (options.top_entropy_quantile >= 1) return keep;
  for (std::size_t t = 0; t < keep.size(); ++t) keep[t] = tokens.entropies[t] >= totals.entropy_threshold ? 1 : 0;
  return keep;
}

// The side on which the surrogate's own clip binds a ratio; neither where it has none.
struct Bounds {
  double low = 0;
  double high = std::numeric_limits<double>::infinity();
};
Bounds ClipBounds(const LossOptions& options) {
  switch (options.surrogate) {
    case Surrogate::kClip:
      return {1 - options.epsilon_low, 1 + options.epsilon_high};
    case Surrogate::kCispo:
      return {options.cispo_min_ratio.value_or(0), options.cispo_max_ratio};
    case Surrogate::kGmpo:
      return {std::exp(-options.epsilon_low), std::exp(options.epsilon_high)};
    default:
      return {};
  }
}

void CountRatio(const LossOptions& options, double ratio, double advantage, LossMetrics* metrics) {
  const Bounds bounds = ClipBounds(options);
  metrics->ratio_count += 1;
  metrics->ratio_sum += ratio;
  metrics->ratio_max = std::max(metrics->ratio_max, ratio);
  metrics->clip_low += ratio < bounds.low && advantage < 0 ? 1 : 0;
  metrics->clip_high += ratio > bounds.high && advantage > 0 ? 1 : 0;
  if (options.surrogate == Surrogate::kClip && options.delta.has_value()) {
    metrics->delta_clip += ratio > *options.delta && advantage < 0 ? 1 : 0;
  }
}

void CountRatios(const LossOptions& options, const TrainedTokens& tokens, const Ratios& ratios, LossMetrics* metrics) {
  if (!IsRatioShared(options.ratio_level)) {
    for (std::size_t t = 0; t < tokens.size(); ++t) CountRatio(options, ratios.values[t], tokens.advantages[t], metrics);
  } else if (tokens.size() == 0) {
    CountRatio(options, 1, 0, metrics);
  } else {
    CountRatio(options, ratios.values[0], tokens.advantages[0], metrics);
  }
}

void CountRollout(const LossOptions& options, const TrainedTokens& tokens, const RolloutWeights& rollout, LossMetrics* metrics) {
  if (tokens.rollout.empty()) return;
  metrics->rollout_ratio_histogram.assign(std::size(kRolloutRatioBuckets) + 1, 0);
  for (const double raw : rollout.raw) {
    const auto bucket = std::ranges::lower_bound(kRolloutRatioBuckets, raw) - std::begin(kRolloutRatioBuckets);
    metrics->rollout_ratio_histogram[static_cast<std::size_t>(bucket)] += 1;
    metrics->rollout_ratio_max = std::max(metrics->rollout_ratio_max, raw);
  }
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    const double difference = std::abs(tokens.old[t] - tokens.rollout[t]);
    metrics->logprob_difference_sum += difference;
    metrics->logprob_difference_max = std::max(metrics->logprob_difference_max, difference);
    metrics->difference_count += 1;
  }
  if (options.rollout_correction == RolloutCorrectionMode::kNone || rollout.weights.empty()) return;
  for (const double weight : rollout.weights) metrics->rollout_weight_sum += weight;
  const auto [low, high] = std::ranges::minmax(rollout.weights);
  metrics->rollout_weight_min = low;
  metrics->rollout_weight_max = high;
  metrics->rollout_weight_count = static_cast<double>(rollout.weights.size());
  metrics->rollout_clipped = static_cast<double>(rollout.num_clipped);
  metrics->rollout_masked = static_cast<double>(rollout.num_masked);
}

struct SequenceResult {
  double loss = 0;
  std::vector<double> grad_logprobs;   // [num_trained]
  std::vector<double> grad_entropies;  // [num_trained]; empty without an entropy bonus
  LossMetrics metrics;
};

// `weight` is w_i.
SequenceResult EvaluateSequence(const LossOptions& options, const StepTotals& totals, const TrainedTokens& tokens,
                                double weight) {
  SequenceResult result;
  LossMetrics& metrics = result.metrics;
  const Ratios ratios = ComputeRatios(options, tokens);
  const RolloutWeights rollout = ComputeRolloutWeights(options, tokens);
  const std::vector<double> entropy_keep = EntropyKeep(options, totals, tokens);
  const std::vector<double> off_policy_keep = ComputeOffPolicyKeep(options, tokens);

  std::vector<double> scale(tokens.size());  // w_i c_it
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    // VESPO folds the rollout weight into phi.
    const double correction = options.surrogate == Surrogate::kVespo ? 1 : rollout.weights[t];
    scale[t] = weight * entropy_keep[t] * off_policy_keep[t] * correction;
    metrics.off_policy_masked += 1 - off_policy_keep[t];
    metrics.top_entropy_count += entropy_keep[t];
  }
  const Terms surrogate = EvaluateSurrogate(options, tokens, ratios, rollout.weights, scale);
  result.grad_logprobs = surrogate.gradient;
  for (std::size_t t = 0; t < tokens.size(); ++t) result.loss += scale[t] == 0 ? 0 : scale[t] * surrogate.values[t];

  if (options.beta != 0) {
    const KlTerms kl = EvaluateKl(options, tokens, ratios, weight * options.beta);
    for (std::size_t t = 0; t < tokens.size(); ++t) {
      result.loss += weight * options.beta * kl.terms.values[t];
      result.grad_logprobs[t] += kl.terms.gradient[t];
      metrics.kl_sum += kl.terms.values[t];
    }
    metrics.kl_clamped = static_cast<double>(kl.num_clamped);
  }
  if (options.entropy_coefficient != 0) {
    const double share = options.entropy_coefficient / std::max(1.0, totals.num_entropy_tokens);
    for (std::size_t t = 0; t < tokens.size(); ++t) {
      result.loss -= share * entropy_keep[t] * tokens.entropies[t];
      result.grad_entropies.push_back(-share * entropy_keep[t]);
    }
  }

  metrics.sequence_count = 1;
  metrics.token_count = static_cast<double>(tokens.size());
  for (std::size_t t = 0; t < tokens.size(); ++t) metrics.approx_kl_old_sum += tokens.old[t] - tokens.policy[t];
  for (const double entropy : tokens.entropies) metrics.entropy_sum += entropy;
  if (options.surrogate == Surrogate::kVespo) metrics.phi_sum = ComputeVespoPhi(options, tokens, rollout.weights);
  CountRatios(options, tokens, ratios, &metrics);
  CountRollout(options, tokens, rollout, &metrics);
  return result;
}

absl::Status CheckFinite(const SequenceResult& result, const TrainedTokens& tokens, std::size_t sequence_index) {
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    if (std::isfinite(result.grad_logprobs[t])) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "loss: sequence ", sequence_index, " token ", tokens.positions[t], ": gradient ", result.grad_logprobs[t],
        " is not finite; policy log-prob ", tokens.policy[t], ", old ", tokens.old[t], ", advantage ", tokens.advantages[t]));
  }
  if (std::isfinite(result.loss)) return absl::OkStatus();
  std::size_t worst = 0;
  for (std::size_t t = 1; t < tokens.size(); ++t) {
    if (std::abs(tokens.policy[t] - tokens.old[t]) > std::abs(tokens.policy[worst] - tokens.old[worst])) worst = t;
  }
  return absl::FailedPreconditionError(absl::StrCat("loss: sequence ", sequence_index, ": loss ", result.loss,
                                                    " is not finite; the largest log-ratio is at token ", tokens.positions[worst],
                                                    ": policy log-prob ", tokens.policy[worst], ", old ", tokens.old[worst]));
}

std::vector<double> Scatter(const TrainedTokens& tokens, std::span<const double> values, std::size_t length) {
  std::vector<double> result(length, 0);
  for (std::size_t t = 0; t < values.size(); ++t) result[tokens.positions[t]] = values[t];
  return result;
}

}  // namespace

std::vector<std::uint8_t> LossMaskFromLength(const LossOptions& options, std::size_t num_completion_tokens, bool is_truncated) {
  return std::vector<std::uint8_t>(num_completion_tokens, options.mask_truncated && is_truncated ? 0 : 1);
}

void StepTotals::Add(const StepTotals& other) {
  TANDEM_CHECK(entropy_threshold == other.entropy_threshold, "entropy thresholds ", entropy_threshold, " and ",
               other.entropy_threshold, " differ");
  num_sequences += other.num_sequences;
  num_tokens += other.num_tokens;
  num_micro_batches += other.num_micro_batches;
  num_entropy_tokens += other.num_entropy_tokens;
}

StepTotals ComputeStepTotals(const LossOptions& options, std::span<const LossSequence> all_sequences, int num_micro_batches) {
  StepTotals totals;
  totals.num_micro_batches = num_micro_batches;
  totals.entropy_threshold = -std::numeric_limits<double>::infinity();
  std::vector<double> entropies;
  for (const LossSequence& sequence : all_sequences) {
    const double num_trained = NumTrained(options, sequence);
    totals.num_tokens += num_trained;
    if (options.count_empty_sequences || num_trained > 0) totals.num_sequences += 1;
    // EvaluateLoss refuses a sequence whose entropies do not fit.
    for (std::size_t t = 0; t < std::min(sequence.entropies.size(), sequence.loss_mask.size()); ++t) {
      if (IsTrainedToken(options, sequence, t)) entropies.push_back(sequence.entropies[t]);
    }
  }
  totals.num_entropy_tokens = totals.num_tokens;
  if (options.top_entropy_quantile < 1 && !entropies.empty()) {
    totals.entropy_threshold = Quantile(entropies, 1 - options.top_entropy_quantile);
    totals.num_entropy_tokens =
        static_cast<double>(std::ranges::count_if(entropies, [&](double h) { return h >= totals.entropy_threshold; }));
  }
  return totals;
}

void LossMetrics::Add(const LossMetrics& other) {
  for (double LossMetrics::*sum :
       {&LossMetrics::kl_sum, &LossMetrics::approx_kl_old_sum, &LossMetrics::ratio_sum, &LossMetrics::entropy_sum,
        &LossMetrics::clip_low, &LossMetrics::clip_high, &LossMetrics::delta_clip, &LossMetrics::ratio_count,
        &LossMetrics::token_count, &LossMetrics::logprob_difference_sum, &LossMetrics::difference_count,
        &LossMetrics::rollout_weight_sum, &LossMetrics::rollout_clipped, &LossMetrics::rollout_masked, &LossMetrics::kl_clamped,
        &LossMetrics::off_policy_masked, &LossMetrics::sequence_count, &LossMetrics::phi_sum, &LossMetrics::top_entropy_count}) {
    this->*sum += other.*sum;
  }
  for (double LossMetrics::*largest : {&LossMetrics::ratio_max, &LossMetrics::logprob_difference_max,
                                       &LossMetrics::rollout_weight_max, &LossMetrics::rollout_ratio_max}) {
    this->*largest = std::max(this->*largest, other.*largest);
  }
  if (other.rollout_weight_count > 0) {
    rollout_weight_min =
        rollout_weight_count > 0 ? std::min(rollout_weight_min, other.rollout_weight_min) : other.rollout_weight_min;
  }
  rollout_weight_count += other.rollout_weight_count;
  if (rollout_ratio_histogram.size() < other.rollout_ratio_histogram.size()) {
    rollout_ratio_histogram.resize(other.rollout_ratio_histogram.size(), 0);
  }
  for (std::size_t i = 0; i < other.rollout_ratio_histogram.size(); ++i) {
    rollout_ratio_histogram[i] += other.rollout_ratio_histogram[i];
  }
}

std::optional<std::string> RolloutMaskWarning(const LossMetrics& metrics) {
  if (metrics.rollout_masked <= kRolloutMaskedWarningShare * metrics.rollout_weight_count) return std::nullopt;
  return absl::StrFormat("rollout correction masked %.1f %% of %.0f tokens, more than %.0f %%: rollout and trainer disagree",
                         100 * metrics.rollout_masked / metrics.rollout_weight_count, metrics.rollout_weight_count,
                         100 * kRolloutMaskedWarningShare);
}

absl::StatusOr<LossResult> EvaluateLoss(const LossOptions& options, const StepTotals& totals,
                                        std::span<const LossSequence> micro_batch) {
  std::vector<TrainedTokens> selected;
  double micro_batch_tokens = 0;
  for (std::size_t i = 0; i < micro_batch.size(); ++i) {
    TANDEM_ASSIGN_OR_RETURN(TrainedTokens tokens, SelectTrainedTokens(options, micro_batch[i], i));
    micro_batch_tokens += static_cast<double>(tokens.size());
    selected.push_back(std::move(tokens));
  }
  LossResult result;
  for (std::size_t i = 0; i < micro_batch.size(); ++i) {
    const TrainedTokens& tokens = selected[i];
    const double weight = SequenceWeight(options, totals, static_cast<double>(tokens.size()), micro_batch_tokens);
    const SequenceResult sequence = EvaluateSequence(options, totals, tokens, weight);
    TANDEM_RETURN_IF_ERROR(CheckFinite(sequence, tokens, i));
    const std::size_t length = micro_batch[i].policy_logprobs.size();
    result.loss += sequence.loss;
    result.grad_logprobs.push_back(Scatter(tokens, sequence.grad_logprobs, length));
    if (options.entropy_coefficient != 0) result.grad_entropies.push_back(Scatter(tokens, sequence.grad_entropies, length));
    result.metrics.Add(sequence.metrics);
  }
  return result;
}

}  // namespace tandem
