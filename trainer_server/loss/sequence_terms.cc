#include "trainer_server/loss/sequence_terms.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string_view>
#include <utility>

#include "common/base/check.h"

namespace tandem {
namespace {

double Bound(double x, std::optional<double> low, std::optional<double> high) {
  if (low.has_value() && x < *low) return *low;
  if (high.has_value() && x > *high) return *high;
  return x;
}

// Inclusive bounds.
bool IsInside(double x, std::optional<double> low, std::optional<double> high) {
  return (!low.has_value() || x >= *low) && (!high.has_value() || x <= *high);
}

double Sigmoid(double x) { return x >= 0 ? 1 / (1 + std::exp(-x)) : std::exp(x) / (1 + std::exp(x)); }

double Sum(std::span<const double> values) { return std::accumulate(values.begin(), values.end(), 0.0); }

struct Input {
  std::string_view name;
  std::span<const double> values;
  bool is_needed = false;
};

absl::Status CheckLengths(const LossOptions& options, const LossSequence& sequence, std::size_t sequence_index) {
  const std::size_t length = sequence.policy_logprobs.size();
  const auto error = [&](std::string_view name, std::size_t size, std::string_view limit) {
    return absl::InvalidArgumentError(absl::StrCat("loss: sequence ", sequence_index, ": ", ToAbsl(name), " has ", size,
                                                   " values for ", length, " tokens, ", ToAbsl(limit)));
  };
  if (sequence.loss_mask.size() != length) return error("loss_mask", sequence.loss_mask.size(), "must have one a token");
  if (const std::size_t size = sequence.advantages.size(); size != length && size != 1) {
    return error("advantages", size, "must have one, or one a token");
  }
  const Input inputs[] = {
      {"old_logprobs", sequence.old_logprobs, false},
      {"ref_logprobs", sequence.ref_logprobs, options.beta != 0},
      {"rollout_logprobs", sequence.rollout_logprobs, options.rollout_correction != RolloutCorrectionMode::kNone},
      {"entropies", sequence.entropies, options.entropy_coefficient != 0 || options.top_entropy_quantile < 1},
      {"kept_mass", sequence.kept_mass, false},
  };
  for (const Input& input : inputs) {
    if (input.values.size() == length || (input.values.empty() && !input.is_needed)) continue;
    return error(input.name, input.values.size(), input.is_needed ? "must have one a token" : "must have one a token or none");
  }
  return absl::OkStatus();
}

// Appends the value of token t; names it when it is not finite.
absl::Status Take(std::string_view name, double value, std::size_t sequence_index, std::size_t t, std::vector<double>* out) {
  if (!std::isfinite(value)) {
    return absl::FailedPreconditionError(
        absl::StrCat("loss: sequence ", sequence_index, " token ", t, ": ", ToAbsl(name), " is ", value, ", must be finite"));
  }
  out->push_back(value);
  return absl::OkStatus();
}

struct KlPoint {
  double value = 0;
  double slope = 0;  // d value / d policy
  bool is_clamped = false;
};

// Schulman's k1, k2, k3 (joschu.net/blog/kl-approx.html, 2020) at d = ref - policy; a clamp stops the gradient.
KlPoint EvaluateKlPoint(const LossOptions& options, double d) {
  KlPoint point;
  if (const auto limit = options.kl_log_ratio_clamp; limit.has_value() && std::abs(d) > *limit) {
    d = std::copysign(*limit, d);
    point.is_clamped = true;
  }
  switch (options.kl_estimator) {
    case KlEstimator::kK1:
      point.value = -d;
      point.slope = 1;
      break;
    case KlEstimator::kK2:
      point.value = d * d / 2;
      point.slope = -d;
      break;
    case KlEstimator::kK3:
      point.value = std::expm1(d) - d;  // exp(d) - d - 1 loses its digits near 0
      point.slope = -std::expm1(d);
      break;
  }
  if (const auto cap = options.kl_output_clamp; cap.has_value() && std::abs(point.value) > *cap) {
    point.value = std::copysign(*cap, point.value);
    point.is_clamped = true;
  }
  if (point.is_clamped) point.slope = 0;
  return point;
}

Terms EvaluateClip(const LossOptions& options, const TrainedTokens& tokens, const Ratios& ratios, std::span<const double> scale) {
  const double low = 1 - options.epsilon_low, high = 1 + options.epsilon_high;
  Terms terms;
  std::vector<double> slopes;
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    const double r = ratios.values[t], a = tokens.advantages[t];
    if (a == 0) {  // an infinite ratio times 0 is no number
      terms.values.push_back(0);
      slopes.push_back(0);
      continue;
    }
    const double outer = Bound(r, std::nullopt, options.delta) * a, inner = Bound(r, low, high) * a;
    const bool flows = outer <= inner ? IsInside(r, std::nullopt, options.delta) : IsInside(r, low, high);
    terms.values.push_back(-std::min(outer, inner));
    slopes.push_back(flows && scale[t] != 0 ? -scale[t] * a * r : 0);
  }
  terms.gradient = ratios.ToPolicyGradient(std::move(slopes));
  return terms;
}

// -weight_t A p with a weight that no gradient flows through: CISPO, VESPO and REINFORCE.
Terms EvaluateWeightedLogprob(const TrainedTokens& tokens, std::span<const double> weights, std::span<const double> scale) {
  Terms terms;
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    const double factor = -weights[t] * tokens.advantages[t];
    terms.values.push_back(factor * tokens.policy[t]);
    terms.gradient.push_back(scale[t] * factor);
  }
  return terms;
}

Terms EvaluateSapo(const LossOptions& options, const TrainedTokens& tokens, const Ratios& ratios, std::span<const double> scale) {
  Terms terms;
  std::vector<double> slopes;
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    const double r = ratios.values[t], a = tokens.advantages[t];
    const double temperature = a > 0 ? options.sapo_temperature_positive : options.sapo_temperature_negative;
    const double gate = Sigmoid(temperature * (r - 1));
    const double slope = 4 * gate * (1 - gate);
    terms.values.push_back(-4 / temperature * gate * a);
    slopes.push_back(slope == 0 ? 0 : -scale[t] * a * slope * r);  // the gate saturates before the ratio overflows
  }
  terms.gradient = ratios.ToPolicyGradient(std::move(slopes));
  return terms;
}

// Clips each log-ratio on one side, then takes the geometric mean (Zhao et al. 2025, 2507.20673).
Terms EvaluateGmpo(const LossOptions& options, const TrainedTokens& tokens, std::span<const double> scale) {
  double log_sum = 0;
  std::vector<double> flows;
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    const double x = tokens.policy[t] - tokens.old[t];
    const double bounded = Bound(x, -options.epsilon_low, options.epsilon_high);
    const double chosen = tokens.advantages[t] > 0 ? std::min(x, bounded) : std::max(x, bounded);
    log_sum += chosen;
    flows.push_back(chosen == x ? 1 : 0);
  }
  const double factor = std::exp(log_sum / tokens.length());
  Terms terms;
  double total = 0;
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    terms.values.push_back(-factor * tokens.advantages[t]);
    total += scale[t] == 0 ? 0 : scale[t] * terms.values.back();
  }
  for (const double flow : flows) terms.gradient.push_back(total / tokens.length() * flow);
  return terms;
}

}  // namespace

bool IsTrainedToken(const LossOptions& options, const LossSequence& sequence, std::size_t t) {
  if (sequence.loss_mask[t] == 0 || (options.mask_truncated && sequence.is_truncated)) return false;
  return t >= sequence.rollout_logprobs.size() || sequence.rollout_logprobs[t] != -std::numeric_limits<double>::infinity();
}

double TrainedTokens::length() const { return static_cast<double>(std::max<std::size_t>(1, size())); }

absl::StatusOr<TrainedTokens> SelectTrainedTokens(const LossOptions& options, const LossSequence& sequence,
                                                  std::size_t sequence_index) {
  TANDEM_RETURN_IF_ERROR(CheckLengths(options, sequence, sequence_index));
  TrainedTokens tokens;
  for (std::size_t t = 0; t < sequence.policy_logprobs.size(); ++t) {
    if (!IsTrainedToken(options, sequence, t)) continue;
    const auto take = [&](std::string_view name, std::span<const double> from, std::vector<double>* to) {
      return from.empty() ? absl::OkStatus() : Take(name, from[t], sequence_index, t, to);
    };
    tokens.positions.push_back(t);
    TANDEM_RETURN_IF_ERROR(take("policy_logprobs", sequence.policy_logprobs, &tokens.policy));
    TANDEM_RETURN_IF_ERROR(
        take("old_logprobs", sequence.old_logprobs.empty() ? sequence.policy_logprobs : sequence.old_logprobs, &tokens.old));
    TANDEM_RETURN_IF_ERROR(take("ref_logprobs", sequence.ref_logprobs, &tokens.ref));
    TANDEM_RETURN_IF_ERROR(take("rollout_logprobs", sequence.rollout_logprobs, &tokens.rollout));
    TANDEM_RETURN_IF_ERROR(take("entropies", sequence.entropies, &tokens.entropies));
    const double advantage = sequence.advantages[sequence.advantages.size() == 1 ? 0 : t];
    TANDEM_RETURN_IF_ERROR(Take("advantages", advantage, sequence_index, t, &tokens.advantages));
    if (sequence.kept_mass.empty()) continue;
    if (const double mass = sequence.kept_mass[t]; !(mass > 0 && mass <= 1 + 1e-6)) {
      return absl::FailedPreconditionError(absl::StrCat("loss: sequence ", sequence_index, " token ", t, ": kept_mass is ",
                                                        sequence.kept_mass[t], ", must be in (0, 1]"));
    }
    if (!tokens.rollout.empty()) tokens.rollout.back() += std::log(sequence.kept_mass[t]);
  }
  return tokens;
}

bool IsRatioShared(RatioLevel level) { return level == RatioLevel::kSequence || level == RatioLevel::kSequenceProduct; }

std::vector<double> Ratios::ToPolicyGradient(std::vector<double> per_token) const {
  if (level == RatioLevel::kSequenceToken) return per_token;
  if (IsRatioShared(level)) {
    const double share = Sum(per_token) / (level == RatioLevel::kSequence ? length : 1);
    std::ranges::fill(per_token, share);
  }
  for (std::size_t t = 0; t < per_token.size(); ++t) per_token[t] = flows[t] == 0 ? 0 : per_token[t];
  return per_token;
}

Ratios ComputeRatios(const LossOptions& options, const TrainedTokens& tokens) {
  Ratios ratios{.level = options.ratio_level, .length = tokens.length(), .values = {}, .flows = {}};
  const std::optional<double> limit = options.log_ratio_clamp;
  const std::optional<double> negative_limit = limit.has_value() ? std::optional<double>(-*limit) : std::nullopt;
  std::vector<double> logs;
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    const double raw = tokens.policy[t] - tokens.old[t];
    logs.push_back(Bound(raw, negative_limit, limit));
    ratios.flows.push_back(IsInside(raw, negative_limit, limit) ? 1 : 0);
  }
  if (options.ratio_level != RatioLevel::kToken) {
    const double divisor = options.ratio_level == RatioLevel::kSequenceProduct ? 1 : tokens.length();
    std::ranges::fill(logs, Sum(logs) / divisor);
  }
  for (const double log : logs) ratios.values.push_back(std::exp(log));
  return ratios;
}

RolloutWeights ComputeRolloutWeights(const LossOptions& options, const TrainedTokens& tokens) {
  using Mode = RolloutCorrectionMode;
  const Mode mode = options.rollout_correction;
  const auto low = options.correction_min, high = options.correction_max;
  RolloutWeights result;
  result.weights.assign(tokens.size(), 1);
  if (tokens.rollout.empty()) return result;
  std::vector<double> token_ratios;
  double log_sum = 0;
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    const double log = tokens.old[t] - tokens.rollout[t];
    log_sum += log;
    token_ratios.push_back(std::exp(log));
  }
  const bool is_per_token = mode == Mode::kNone || mode == Mode::kTokenTruncate || mode == Mode::kTokenMask;
  if (is_per_token) {
    result.raw = token_ratios;
  } else {
    result.raw = {std::exp(mode == Mode::kGeometricMask ? log_sum / tokens.length() : log_sum)};
  }
  if (mode == Mode::kNone) return result;
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    const double tested = result.raw[is_per_token ? t : 0];
    const double weight = mode == Mode::kGeometricMask ? token_ratios[t] : tested;
    if (mode == Mode::kTokenTruncate || mode == Mode::kSequenceTruncate) {
      result.weights[t] = Bound(tested, low, high);
      result.num_clipped += IsInside(tested, low, high) ? 0 : 1;
    } else {
      result.weights[t] = IsInside(tested, low, high) ? weight : 0;
    }
    result.num_masked += result.weights[t] == 0 ? 1 : 0;
  }
  return result;
}

std::vector<double> ComputeOffPolicyKeep(const LossOptions& options, const TrainedTokens& tokens) {
  std::vector<double> keep(tokens.size(), 1);
  if (!options.off_policy_threshold.has_value()) return keep;
  const std::vector<double>& sampler = tokens.rollout.empty() ? tokens.old : tokens.rollout;
  double drift = 0;
  for (std::size_t t = 0; t < tokens.size(); ++t) drift += sampler[t] - tokens.policy[t];
  if (drift / tokens.length() <= *options.off_policy_threshold) return keep;
  for (std::size_t t = 0; t < tokens.size(); ++t) keep[t] = tokens.advantages[t] < 0 ? 0 : 1;
  return keep;
}

double ComputeVespoPhi(const LossOptions& options, const TrainedTokens& tokens, std::span<const double> rollout_weights) {
  const double low = std::log(1e-8), high = 20;
  double log_weight = 0;
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    log_weight += std::clamp(tokens.policy[t] - tokens.old[t], -high, high);
    if (options.rollout_correction != RolloutCorrectionMode::kNone) {
      log_weight += std::clamp(std::log(rollout_weights[t]), low, high);  // log 0 is -inf: the lower bound
    }
  }
  log_weight = std::clamp(log_weight, low, high);
  const bool is_positive = tokens.size() == 0 || tokens.advantages[0] >= 0;
  const double k = is_positive ? options.vespo_k_positive : options.vespo_k_negative;
  const double lambda = is_positive ? options.vespo_lambda_positive : options.vespo_lambda_negative;
  return std::exp(lambda + k * log_weight - lambda * std::exp(log_weight));
}

Terms EvaluateSurrogate(const LossOptions& options, const TrainedTokens& tokens, const Ratios& ratios,
                        std::span<const double> rollout_weights, std::span<const double> scale) {
  switch (options.surrogate) {
    case Surrogate::kClip:
      return EvaluateClip(options, tokens, ratios, scale);
    case Surrogate::kSapo:
      return EvaluateSapo(options, tokens, ratios, scale);
    case Surrogate::kGmpo:
      return EvaluateGmpo(options, tokens, scale);
    case Surrogate::kCispo: {
      std::vector<double> weights = ratios.values;
      for (double& weight : weights) weight = Bound(weight, options.cispo_min_ratio, options.cispo_max_ratio);
      return EvaluateWeightedLogprob(tokens, weights, scale);
    }
    case Surrogate::kVespo: {
      const std::vector<double> weights(tokens.size(), ComputeVespoPhi(options, tokens, rollout_weights));
      return EvaluateWeightedLogprob(tokens, weights, scale);
    }
    case Surrogate::kReinforce: {
      const std::vector<double> weights(tokens.size(), 1);
      return EvaluateWeightedLogprob(tokens, weights, scale);
    }
  }
  TANDEM_CHECK(false, "unknown surrogate ", static_cast<int>(options.surrogate));
}

KlTerms EvaluateKl(const LossOptions& options, const TrainedTokens& tokens, const Ratios& ratios, double scale) {
  KlTerms result;
  std::vector<double> through_ratio;
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    const KlPoint point = EvaluateKlPoint(options, tokens.ref[t] - tokens.policy[t]);
    const double r = options.kl_bias_correction ? ratios.values[t] : 1;
    result.terms.values.push_back(point.value * r);
    result.terms.gradient.push_back(scale * point.slope * r);
    result.num_clamped += point.is_clamped ? 1 : 0;
    through_ratio.push_back(scale * point.value * r);
  }
  if (!options.kl_bias_correction) return result;
  through_ratio = ratios.ToPolicyGradient(std::move(through_ratio));
  for (std::size_t t = 0; t < tokens.size(); ++t) result.terms.gradient[t] += through_ratio[t];
  return result;
}

}  // namespace tandem
