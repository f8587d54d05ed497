#include <cmath>
#include <string_view>

#include "absl/strings/str_join.h"
#include "trainer_server/loss/loss.h"

namespace tandem {
namespace {

class Faults {
 public:
  void Expect(bool holds, std::string_view field, double value, std::string_view limit) {
    if (!holds) lines_.push_back(absl::StrCat(ToAbsl(field), ": ", value, ", must be ", ToAbsl(limit)));
  }
  void Positive(std::string_view field, double value) {
    Expect(std::isfinite(value) && value > 0, field, value, "finite and > 0");
  }
  void Positive(std::string_view field, std::optional<double> value) {
    if (value.has_value()) Positive(field, *value);
  }
  void NotNegative(std::string_view field, double value) {
    Expect(std::isfinite(value) && value >= 0, field, value, "finite and >= 0");
  }
  void Refuse(std::string line) { lines_.push_back(std::move(line)); }
  std::vector<std::string> Take() { return std::move(lines_); }

 private:
  std::vector<std::string> lines_;
};

void CheckSurrogate(const LossOptions& options, Faults* faults) {
  faults->NotNegative("epsilon_low", options.epsilon_low);
  faults->NotNegative("epsilon_high", options.epsilon_high);
  if (options.delta.has_value()) {
    if (options.surrogate != Surrogate::kClip) faults->Refuse("delta: set, but only the surrogate CLIP has an outer bound");
    faults->Expect(std::isfinite(*options.delta) && *options.delta > 1 + options.epsilon_high, "delta", *options.delta,
                   absl::StrCat("finite and > 1 + epsilon_high = ", 1 + options.epsilon_high));
  }
  if (options.log_ratio_clamp.has_value()) {
    const bool is_used = options.surrogate == Surrogate::kClip || options.surrogate == Surrogate::kCispo ||
                         options.surrogate == Surrogate::kSapo || (options.kl_bias_correction && options.beta != 0);
    if (!is_used) faults->Refuse("log_ratio_clamp: set, but neither this surrogate nor the KL uses the ratio");
    faults->Positive("log_ratio_clamp", options.log_ratio_clamp);
  }
  faults->Positive("cispo_max_ratio", options.cispo_max_ratio);
  if (options.cispo_min_ratio.has_value()) {
    faults->Expect(*options.cispo_min_ratio >= 0 && *options.cispo_min_ratio <= options.cispo_max_ratio, "cispo_min_ratio",
                   *options.cispo_min_ratio, absl::StrCat("in [0, cispo_max_ratio = ", options.cispo_max_ratio, "]"));
  }
  faults->Positive("sapo_temperature_positive", options.sapo_temperature_positive);
  faults->Positive("sapo_temperature_negative", options.sapo_temperature_negative);
  faults->NotNegative("vespo_k_positive", options.vespo_k_positive);
  faults->NotNegative("vespo_lambda_positive", options.vespo_lambda_positive);
  faults->NotNegative("vespo_k_negative", options.vespo_k_negative);
  faults->NotNegative("vespo_lambda_negative", options.vespo_lambda_negative);
}

void CheckRolloutCorrection(const LossOptions& options, Faults* faults) {
  using Mode = RolloutCorrectionMode;
  const Mode mode = options.rollout_correction;
  const auto low = options.correction_min, high = options.correction_max;
  if (mode == Mode::kNone) {
    if (low.has_value()) faults->Refuse("rollout_correction.min: set, but the mode is NONE");
    if (high.has_value()) faults->Refuse("rollout_correction.max: set, but the mode is NONE");
    return;
  }
  if (low.has_value()) faults->NotNegative("rollout_correction.min", *low);
  faults->Positive("rollout_correction.max", high);
  if (low.has_value() && high.has_value()) {
    faults->Expect(*low <= *high, "rollout_correction.min", *low, absl::StrCat("<= rollout_correction.max = ", *high));
  }
  if (!low.has_value() && !high.has_value()) faults->Refuse("rollout_correction: no bound, must have min or max");
  const bool is_token_level = mode == Mode::kTokenTruncate || mode == Mode::kTokenMask;
  if (options.surrogate == Surrogate::kVespo && !is_token_level) {
    faults->Refuse(
        "rollout_correction.mode: VESPO folds the weight of each token into phi, so TOKEN_TRUNCATE, TOKEN_MASK or NONE only");
  }
}

}  // namespace

std::vector<std::string> LossOptionFaults(const LossOptions& options) {
  Faults faults;
  CheckSurrogate(options, &faults);
  faults.NotNegative("beta", options.beta);
  faults.Positive("kl_log_ratio_clamp", options.kl_log_ratio_clamp);
  faults.Positive("kl_output_clamp", options.kl_output_clamp);
  if (options.aggregation == Aggregation::kConstant) faults.Positive("constant_divisor", options.max_completion_length);
  faults.Positive("denominator_override", options.denominator_override);
  CheckRolloutCorrection(options, &faults);
  if (options.off_policy_threshold.has_value()) faults.NotNegative("off_policy_threshold", *options.off_policy_threshold);
  faults.Expect(options.top_entropy_quantile >= 0 && options.top_entropy_quantile <= 1, "top_entropy_quantile",
                options.top_entropy_quantile, "in [0, 1]");
  faults.NotNegative("entropy_coefficient", options.entropy_coefficient);
  return faults.Take();
}

absl::Status ValidateLossOptions(const LossOptions& options) {
  const std::vector<std::string> faults = LossOptionFaults(options);
  return faults.empty() ? absl::OkStatus() : absl::InvalidArgumentError(absl::StrJoin(faults, "\n"));
}

}  // namespace tandem
