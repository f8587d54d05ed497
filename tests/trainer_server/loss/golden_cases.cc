#include "tests/trainer_server/loss/golden_cases.h"

#include <algorithm>
#include <fstream>
#include <map>

namespace tandem {
namespace {

using Json = nlohmann::json;

template <typename Enum>
Enum Named(const Json& value, const std::map<std::string, Enum>& names) {
  return names.at(value.get<std::string>());
}

std::optional<double> Optional(const Json& value) {
  return value.is_null() ? std::nullopt : std::optional<double>(value.get<double>());
}

LossOptions ReadLossOptions(const Json& config) {
  LossOptions options;
  options.surrogate = Named<Surrogate>(config["surrogate"], {{"clip", Surrogate::kClip},
                                                             {"cispo", Surrogate::kCispo},
                                                             {"sapo", Surrogate::kSapo},
                                                             {"vespo", Surrogate::kVespo},
                                                             {"gmpo", Surrogate::kGmpo},
                                                             {"reinforce", Surrogate::kReinforce}});
  options.ratio_level = Named<RatioLevel>(config["ratio_level"], {{"token", RatioLevel::kToken},
                                                                  {"sequence", RatioLevel::kSequence},
                                                                  {"sequence_token", RatioLevel::kSequenceToken},
                                                                  {"sequence_product", RatioLevel::kSequenceProduct}});
  options.aggregation = Named<Aggregation>(config["aggregation"], {{"sequence_mean", Aggregation::kSequenceMean},
                                                                   {"token_mean", Aggregation::kTokenMean},
                                                                   {"micro_batch_token_mean", Aggregation::kMicroBatchTokenMean},
                                                                   {"constant", Aggregation::kConstant},
                                                                   {"sequence_sum", Aggregation::kSequenceSum}});
  options.epsilon_low = config["epsilon_low"];
  options.epsilon_high = config["epsilon_high"];
  options.delta = Optional(config["delta"]);
  options.log_ratio_clamp = Optional(config["log_ratio_clamp"]);
  options.cispo_min_ratio = Optional(config["cispo_min_ratio"]);
  options.cispo_max_ratio = config["cispo_max_ratio"];
  options.sapo_temperature_positive = config["sapo_temperature_positive"];
  options.sapo_temperature_negative = config["sapo_temperature_negative"];
  options.vespo_k_positive = config["vespo_k_positive"];
  options.vespo_lambda_positive = config["vespo_lambda_positive"];
  options.vespo_k_negative = config["vespo_k_negative"];
  options.vespo_lambda_negative = config["vespo_lambda_negative"];
  options.beta = config["beta"];
  options.kl_estimator =
      Named<KlEstimator>(config["kl_estimator"], {{"k1", KlEstimator::kK1}, {"k2", KlEstimator::kK2}, {"k3", KlEstimator::kK3}});
  options.kl_bias_correction = config["kl_bias_correction"];
  options.kl_log_ratio_clamp = Optional(config["kl_log_ratio_clamp"]);
  options.kl_output_clamp = Optional(config["kl_output_clamp"]);
  options.max_completion_length = config["max_completion_length"];
  options.mask_truncated = config["mask_truncated"];
  options.count_empty_sequences = config["count_empty_sequences"];
  options.denominator_override = Optional(config["denominator_override"]);
  const Json& correction = config["rollout_correction"];
  using Mode = RolloutCorrectionMode;
  options.rollout_correction = Named<Mode>(correction["mode"], {{"none", Mode::kNone},
                                                                {"token_truncate", Mode::kTokenTruncate},
                                                                {"token_mask", Mode::kTokenMask},
                                                                {"sequence_truncate", Mode::kSequenceTruncate},
                                                                {"sequence_mask", Mode::kSequenceMask},
                                                                {"geometric_mask", Mode::kGeometricMask}});
  options.correction_min = Optional(correction["min"]);
  options.correction_max = Optional(correction["max"]);
  options.off_policy_threshold = Optional(config["off_policy_threshold"]);
  options.top_entropy_quantile = config["top_entropy_quantile"];
  options.entropy_coefficient = config["entropy_coefficient"];
  return options;
}

AdvantageOptions ReadAdvantageOptions(const Json& config) {
  AdvantageOptions options;
  if (config["estimator"] != "given") {
    options.estimator = Named<AdvantageEstimator>(
        config["estimator"], {{"group", AdvantageEstimator::kGroup},
                              {"rloo", AdvantageEstimator::kRloo},
                              {"reinforce_plus_plus", AdvantageEstimator::kReinforcePlusPlus},
                              {"reinforce_plus_plus_baseline", AdvantageEstimator::kReinforcePlusPlusBaseline},
                              {"opo", AdvantageEstimator::kOpo}});
  }
  options.scale = Named<AdvantageScale>(
      config["scale"], {{"group", AdvantageScale::kGroup}, {"batch", AdvantageScale::kBatch}, {"none", AdvantageScale::kNone}});
  options.aggregation =
      Named<RewardAggregation>(config["aggregation"], {{"sum_then_normalize", RewardAggregation::kSumThenNormalize},
                                                       {"normalize_then_sum", RewardAggregation::kNormalizeThenSum}});
  options.epsilon = config["epsilon"];
  options.kl_in_reward = config["kl_in_reward"];
  if (!config["weights"].is_null()) options.weights = config["weights"].get<std::vector<double>>();
  return options;
}

Rows ReadRows(const Json& value) { return value.is_null() ? Rows{} : value.get<Rows>(); }

LossStep ReadStep(const Json& config, const Json& inputs) {
  LossStep step;
  step.loss = ReadLossOptions(config);
  step.advantage = ReadAdvantageOptions(config["advantage"]);
  if (config["advantage"]["estimator"] == "given") {
    step.given_advantages.emplace();
    for (const double value : inputs["advantages"].get<std::vector<double>>()) step.given_advantages->push_back({value});
  }
  step.group_size = inputs["group_size"];
  for (const Json& row : inputs["rewards"]) {
    std::vector<std::optional<double>> rewards;
    for (const Json& value : row) rewards.push_back(Optional(value));
    step.rewards.push_back(rewards);
  }
  step.policy_logprobs = ReadRows(inputs["policy_logprobs"]);
  step.old_logprobs = ReadRows(inputs["old_logprobs"]);
  step.ref_logprobs = ReadRows(inputs["ref_logprobs"]);
  step.rollout_logprobs = ReadRows(inputs["rollout_logprobs"]);
  step.entropies = ReadRows(inputs["entropies"]);
  step.loss_mask = inputs["loss_mask"].get<std::vector<std::vector<std::uint8_t>>>();
  step.is_truncated = inputs["is_truncated"].get<std::vector<bool>>();
  step.micro_batches = inputs["micro_batches"].get<std::vector<std::vector<std::size_t>>>();
  return step;
}

std::span<const double> RowOrNone(const Rows& rows, std::size_t i) {
  return rows.empty() ? std::span<const double>{} : std::span<const double>(rows[i]);
}

}  // namespace

const Json& GoldenDocument() {
  static const Json* const document = [] {
    std::ifstream file(TANDEM_GOLDEN_DIR "/grpo_cases.json");
    return new Json(Json::parse(file));
  }();
  return *document;
}

const std::vector<GoldenCase>& GoldenCases() {
  static const std::vector<GoldenCase>* const cases = [] {
    auto* result = new std::vector<GoldenCase>;
    for (const Json& entry : GoldenDocument()["cases"]) {
      Json config = GoldenDocument()["default_config"];
      for (const auto& [key, value] : entry["config"].items()) {  // a case lists what differs, one level deep
        if (value.is_object()) {
          config[key].update(value);
        } else {
          config[key] = value;
        }
      }
      result->push_back({entry["name"], ReadStep(config, entry["inputs"]), entry["expected"]});
    }
    return result;
  }();
  return *cases;
}

absl::StatusOr<AdvantageResult> Advantages(const LossStep& step) {
  std::vector<std::vector<std::uint8_t>> masks = step.loss_mask;
  std::vector<AdvantageSequence> sequences;
  const Rows& old = step.old_logprobs.empty() ? step.policy_logprobs : step.old_logprobs;
  for (std::size_t i = 0; i < masks.size(); ++i) {
    if (step.loss.mask_truncated && step.is_truncated[i]) std::ranges::fill(masks[i], std::uint8_t{0});
    sequences.push_back({step.rewards[i], old[i], RowOrNone(step.ref_logprobs, i), masks[i]});
  }
  return ComputeAdvantages(step.advantage, sequences, step.group_size);
}

std::vector<LossSequence> Sequences(const LossStep& step, const Rows& advantages) {
  std::vector<LossSequence> sequences;
  for (std::size_t i = 0; i < step.policy_logprobs.size(); ++i) {
    sequences.push_back({.policy_logprobs = step.policy_logprobs[i],
                         .old_logprobs = RowOrNone(step.old_logprobs, i),
                         .ref_logprobs = RowOrNone(step.ref_logprobs, i),
                         .rollout_logprobs = RowOrNone(step.rollout_logprobs, i),
                         .entropies = RowOrNone(step.entropies, i),
                         .loss_mask = step.loss_mask[i],
                         .kept_mass = RowOrNone(step.kept_mass, i),
                         .advantages = advantages[i],
                         .is_truncated = step.is_truncated[i]});
  }
  return sequences;
}

absl::StatusOr<StepResult> EvaluateStep(const LossStep& step, const Rows& advantages) {
  const std::vector<LossSequence> sequences = Sequences(step, advantages);
  const StepTotals totals = ComputeStepTotals(step.loss, sequences, static_cast<int>(step.micro_batches.size()));
  StepResult result;
  result.grad_logprobs.resize(sequences.size());
  result.grad_entropies.resize(sequences.size());
  for (const std::vector<std::size_t>& indices : step.micro_batches) {
    std::vector<LossSequence> micro_batch;
    for (const std::size_t i : indices) micro_batch.push_back(sequences[i]);
    TANDEM_ASSIGN_OR_RETURN(const LossResult part, EvaluateLoss(step.loss, totals, micro_batch));
    result.micro_batch_losses.push_back(part.loss);
    result.loss += part.loss;
    result.metrics.Add(part.metrics);
    for (std::size_t k = 0; k < indices.size(); ++k) {
      result.grad_logprobs[indices[k]] = part.grad_logprobs[k];
      if (!part.grad_entropies.empty()) result.grad_entropies[indices[k]] = part.grad_entropies[k];
    }
  }
  return result;
}

}  // namespace tandem
