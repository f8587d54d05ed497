#include "trainer_server/loss/loss_config.h"

#include <cmath>
#include <string_view>

namespace tandem {
namespace {

void Fault(std::vector<std::string>* faults, std::string_view field, std::string_view text) {
  faults->push_back(absl::StrCat(ToAbsl(field), ": ", ToAbsl(text)));
}

// Proto enums number the C++ ones from 1: 0 is unspecified and leaves what the preset gave.
template <typename Enum>
void ReadEnum(int number, int largest, std::string_view field, Enum* out, std::vector<std::string>* faults) {
  if (number < 0 || number > largest) {
    Fault(faults, field, absl::StrCat(number, " is not a known value, must be 1 to ", largest));
  } else if (number != 0) {
    *out = static_cast<Enum>(number - 1);
  }
}

static_assert(v1::SURROGATE_CLIP == static_cast<int>(Surrogate::kClip) + 1 &&
              v1::SURROGATE_REINFORCE == static_cast<int>(Surrogate::kReinforce) + 1);
static_assert(v1::RATIO_LEVEL_TOKEN == static_cast<int>(RatioLevel::kToken) + 1 &&
              v1::RATIO_LEVEL_SEQUENCE_PRODUCT == static_cast<int>(RatioLevel::kSequenceProduct) + 1);
static_assert(v1::AGGREGATION_SEQUENCE_MEAN == static_cast<int>(Aggregation::kSequenceMean) + 1 &&
              v1::AGGREGATION_SEQUENCE_SUM == static_cast<int>(Aggregation::kSequenceSum) + 1);
static_assert(v1::KL_ESTIMATOR_K1 == static_cast<int>(KlEstimator::kK1) + 1 &&
              v1::KL_ESTIMATOR_K3 == static_cast<int>(KlEstimator::kK3) + 1);
static_assert(v1::ROLLOUT_CORRECTION_MODE_NONE == static_cast<int>(RolloutCorrectionMode::kNone) + 1 &&
              v1::ROLLOUT_CORRECTION_MODE_GEOMETRIC_MASK == static_cast<int>(RolloutCorrectionMode::kGeometricMask) + 1);
static_assert(v1::ADVANTAGE_ESTIMATOR_GROUP == static_cast<int>(AdvantageEstimator::kGroup) + 1 &&
              v1::ADVANTAGE_ESTIMATOR_OPO == static_cast<int>(AdvantageEstimator::kOpo) + 1);
static_assert(v1::ADVANTAGE_SCALE_GROUP == static_cast<int>(AdvantageScale::kGroup) + 1 &&
              v1::ADVANTAGE_SCALE_NONE == static_cast<int>(AdvantageScale::kNone) + 1);
static_assert(v1::REWARD_AGGREGATION_SUM_THEN_NORMALIZE == static_cast<int>(RewardAggregation::kSumThenNormalize) + 1 &&
              v1::REWARD_AGGREGATION_NORMALIZE_THEN_SUM == static_cast<int>(RewardAggregation::kNormalizeThenSum) + 1);

// The loss half of a preset; see the header's table.
void ApplyPreset(v1::LossPreset preset, LossOptions* options) {
  switch (preset) {
    case v1::LOSS_PRESET_UNSPECIFIED:
    case v1::LOSS_PRESET_DAPO:
      options->epsilon_high = 0.28;
      return;
    case v1::LOSS_PRESET_GRPO:
      options->aggregation = Aggregation::kSequenceMean;
      return;
    case v1::LOSS_PRESET_BNPO:
      options->aggregation = Aggregation::kMicroBatchTokenMean;
      return;
    case v1::LOSS_PRESET_DR_GRPO:
      options->aggregation = Aggregation::kConstant;
      return;
    case v1::LOSS_PRESET_GSPO:
      options->ratio_level = RatioLevel::kSequence;
      options->aggregation = Aggregation::kSequenceMean;
      options->epsilon_low = 3e-4;
      options->epsilon_high = 4e-4;
      return;
    case v1::LOSS_PRESET_CISPO:
      options->surrogate = Surrogate::kCispo;
      return;
    case v1::LOSS_PRESET_SAPO:
      options->surrogate = Surrogate::kSapo;
      options->aggregation = Aggregation::kSequenceMean;
      return;
    case v1::LOSS_PRESET_LUSPO:
      options->ratio_level = RatioLevel::kSequence;
      options->aggregation = Aggregation::kSequenceSum;
      options->epsilon_low = 2e-3;
      options->epsilon_high = 2.5e-3;
      return;
    case v1::LOSS_PRESET_VESPO:
      options->surrogate = Surrogate::kVespo;
      return;
    case v1::LOSS_PRESET_GMPO:
      options->surrogate = Surrogate::kGmpo;
      options->aggregation = Aggregation::kSequenceMean;
      options->epsilon_low = 0.4;
      options->epsilon_high = 0.4;
      return;
    case v1::LOSS_PRESET_RLOO:
      options->ratio_level = RatioLevel::kSequenceProduct;
      options->aggregation = Aggregation::kSequenceMean;
      return;
    case v1::LOSS_PRESET_REINFORCE:
      options->surrogate = Surrogate::kReinforce;
      return;
    case v1::LOSS_PRESET_REINFORCE_PLUS_PLUS:
    default:  // a number that is not a preset is a fault already
      return;
  }
}

void DefaultCorrectionBounds(LossOptions* options) {
  if (options->correction_min.has_value() || options->correction_max.has_value()) return;
  switch (options->rollout_correction) {
    case RolloutCorrectionMode::kNone:
      return;
    case RolloutCorrectionMode::kTokenTruncate:
    case RolloutCorrectionMode::kSequenceTruncate:
      options->correction_max = 2;
      return;
    case RolloutCorrectionMode::kTokenMask:
      options->correction_min = 0.5;
      options->correction_max = 5;
      return;
    case RolloutCorrectionMode::kSequenceMask:
      options->correction_max = 3;
      return;
    case RolloutCorrectionMode::kGeometricMask:
      options->correction_min = 0.999;
      options->correction_max = 1.002;
      return;
  }
}

// Fields that are set and would change nothing.
void RefuseFieldsWithoutEffect(const v1::LossConfig& config, const LossOptions& options, std::vector<std::string>* faults) {
  struct Field {
    bool is_set = false;
    bool has_effect = false;
    std::string_view name;
    std::string_view reason;
  };
  const bool clips = options.surrogate == Surrogate::kClip || options.surrogate == Surrogate::kGmpo;
  const bool is_cispo = options.surrogate == Surrogate::kCispo, is_sapo = options.surrogate == Surrogate::kSapo;
  const bool is_vespo = options.surrogate == Surrogate::kVespo;
  const bool counts_sequences = options.aggregation == Aggregation::kSequenceMean ||
                                options.aggregation == Aggregation::kConstant || options.aggregation == Aggregation::kSequenceSum;
  const Field fields[] = {
      {config.has_epsilon_low(), clips, "epsilon_low", "only the surrogates CLIP and GMPO clip by it"},
      {config.has_epsilon_high(), clips, "epsilon_high", "only the surrogates CLIP and GMPO clip by it"},
      {config.has_cispo_min_ratio(), is_cispo, "cispo_min_ratio", "the surrogate is not CISPO"},
      {config.has_cispo_max_ratio(), is_cispo, "cispo_max_ratio", "the surrogate is not CISPO"},
      {config.has_sapo_temperature_positive(), is_sapo, "sapo_temperature_positive", "the surrogate is not SAPO"},
      {config.has_sapo_temperature_negative(), is_sapo, "sapo_temperature_negative", "the surrogate is not SAPO"},
      {config.has_vespo_k_positive(), is_vespo, "vespo_k_positive", "the surrogate is not VESPO"},
      {config.has_vespo_lambda_positive(), is_vespo, "vespo_lambda_positive", "the surrogate is not VESPO"},
      {config.has_vespo_k_negative(), is_vespo, "vespo_k_negative", "the surrogate is not VESPO"},
      {config.has_vespo_lambda_negative(), is_vespo, "vespo_lambda_negative", "the surrogate is not VESPO"},
      {config.kl_estimator() != 0, config.has_beta(), "kl_estimator", "beta is not set"},
      {config.has_kl_bias_correction(), config.has_beta(), "kl_bias_correction", "beta is not set"},
      {config.has_kl_log_ratio_clamp(), config.has_beta(), "kl_log_ratio_clamp", "beta is not set"},
      {config.has_kl_output_clamp(), config.has_beta(), "kl_output_clamp", "beta is not set"},
      {config.has_count_empty_sequences() && !config.count_empty_sequences(), counts_sequences, "count_empty_sequences",
       "this aggregation does not count sequences"},
      {config.has_constant_divisor(), options.aggregation == Aggregation::kConstant, "constant_divisor",
       "the aggregation is not CONSTANT"},
  };
  for (const Field& field : fields) {
    if (field.is_set && !field.has_effect) {
      Fault(faults, absl::StrCat("loss.", ToAbsl(field.name)), absl::StrCat("set, but ", ToAbsl(field.reason)));
    }
  }
}

}  // namespace

LossOptions LossOptionsFromConfig(const v1::LossConfig& config, double default_constant_divisor,
                                  std::vector<std::string>* faults) {
  LossOptions options;
  if (!v1::LossPreset_IsValid(config.preset())) {
    Fault(faults, "loss.preset",
          absl::StrCat(static_cast<int>(config.preset()), " is not a known value, must be 0 to ",
                       static_cast<int>(v1::LossPreset_MAX)));
  }
  ApplyPreset(config.preset(), &options);
  ReadEnum(config.surrogate(), v1::Surrogate_MAX, "loss.surrogate", &options.surrogate, faults);
  ReadEnum(config.ratio_level(), v1::RatioLevel_MAX, "loss.ratio_level", &options.ratio_level, faults);
  ReadEnum(config.aggregation(), v1::Aggregation_MAX, "loss.aggregation", &options.aggregation, faults);
  if (config.has_epsilon_low()) options.epsilon_low = config.epsilon_low();
  if (config.has_epsilon_high()) options.epsilon_high = config.epsilon_high();
  if (config.has_delta()) options.delta = config.delta();
  if (config.has_log_ratio_clamp()) options.log_ratio_clamp = config.log_ratio_clamp();
  if (config.has_cispo_min_ratio()) options.cispo_min_ratio = config.cispo_min_ratio();
  if (config.has_cispo_max_ratio()) options.cispo_max_ratio = config.cispo_max_ratio();
  if (config.has_sapo_temperature_positive()) options.sapo_temperature_positive = config.sapo_temperature_positive();
  if (config.has_sapo_temperature_negative()) options.sapo_temperature_negative = config.sapo_temperature_negative();
  if (config.has_vespo_k_positive()) options.vespo_k_positive = config.vespo_k_positive();
  if (config.has_vespo_lambda_positive()) options.vespo_lambda_positive = config.vespo_lambda_positive();
  if (config.has_vespo_k_negative()) options.vespo_k_negative = config.vespo_k_negative();
  if (config.has_vespo_lambda_negative()) options.vespo_lambda_negative = config.vespo_lambda_negative();

  options.beta = config.beta();
  ReadEnum(config.kl_estimator(), v1::KlEstimator_MAX, "loss.kl_estimator", &options.kl_estimator, faults);
  options.kl_bias_correction = config.kl_bias_correction();
  options.kl_log_ratio_clamp = config.has_kl_log_ratio_clamp() ? config.kl_log_ratio_clamp() : 20;
  options.kl_output_clamp = config.has_kl_output_clamp() ? config.kl_output_clamp() : 10;
  if (options.beta != 0 && options.kl_estimator == KlEstimator::kK1 && !options.kl_bias_correction) {
    Fault(faults, "loss.kl_estimator",
          "K1 in the loss has an expected gradient of 0; use K2 or K3, set kl_bias_correction, or advantage.kl_in_reward");
  }

  options.mask_truncated = config.mask_truncated();
  if (config.has_count_empty_sequences()) options.count_empty_sequences = config.count_empty_sequences();
  options.max_completion_length = config.has_constant_divisor() ? config.constant_divisor() : default_constant_divisor;
  options.rollout_correction = RolloutCorrectionMode::kTokenTruncate;
  const v1::RolloutCorrection& correction = config.rollout_correction();
  ReadEnum(correction.mode(), v1::RolloutCorrectionMode_MAX, "loss.rollout_correction.mode", &options.rollout_correction, faults);
  if (correction.has_min()) options.correction_min = correction.min();
  if (correction.has_max()) options.correction_max = correction.max();
  DefaultCorrectionBounds(&options);
  if (config.has_off_policy_threshold()) options.off_policy_threshold = config.off_policy_threshold();
  if (config.has_top_entropy_quantile()) options.top_entropy_quantile = config.top_entropy_quantile();
  options.entropy_coefficient = config.entropy_coefficient();

  RefuseFieldsWithoutEffect(config, options, faults);
  for (const std::string& fault : LossOptionFaults(options)) faults->push_back(absl::StrCat("loss.", fault));
  return options;
}

AdvantageOptions AdvantageOptionsFromConfig(const v1::AdvantageConfig& config, v1::LossPreset preset,
                                            std::vector<std::string>* faults) {
  AdvantageOptions options;
  if (preset == v1::LOSS_PRESET_DR_GRPO) options.scale = AdvantageScale::kNone;
  if (preset == v1::LOSS_PRESET_RLOO) options.estimator = AdvantageEstimator::kRloo;
  if (preset == v1::LOSS_PRESET_REINFORCE_PLUS_PLUS) options.estimator = AdvantageEstimator::kReinforcePlusPlus;
  ReadEnum(config.estimator(), v1::AdvantageEstimator_MAX, "advantage.estimator", &options.estimator, faults);
  ReadEnum(config.scale(), v1::AdvantageScale_MAX, "advantage.scale", &options.scale, faults);
  ReadEnum(config.aggregation(), v1::RewardAggregation_MAX, "advantage.aggregation", &options.aggregation, faults);
  if (config.has_epsilon()) options.epsilon = config.epsilon();
  options.kl_in_reward = config.kl_in_reward();

  const bool is_group = options.estimator == AdvantageEstimator::kGroup;
  const bool normalizes_first = options.aggregation == RewardAggregation::kNormalizeThenSum;
  if (!is_group) {
    if (config.scale() == v1::ADVANTAGE_SCALE_GROUP || config.scale() == v1::ADVANTAGE_SCALE_BATCH) {
      Fault(faults, "advantage.scale", "set, but only the estimator GROUP divides by a spread");
    }
    if (normalizes_first) Fault(faults, "advantage.aggregation", "NORMALIZE_THEN_SUM, but only the estimator GROUP normalises");
  } else if (normalizes_first && (config.scale() != v1::ADVANTAGE_SCALE_UNSPECIFIED || options.scale == AdvantageScale::kNone)) {
    Fault(faults, "advantage.scale",
          "set here or by the preset, but NORMALIZE_THEN_SUM divides by the group's and then by the batch's spread");
  }
  if (config.has_epsilon()) {
    if (!is_group || (options.scale == AdvantageScale::kNone && !normalizes_first)) {
      Fault(faults, "advantage.epsilon", "set, but nothing is divided by a spread");
    }
    if (!std::isfinite(options.epsilon) || options.epsilon < 0) {
      Fault(faults, "advantage.epsilon", absl::StrCat(options.epsilon, ", must be finite and >= 0"));
    }
  }
  if (options.kl_in_reward != 0) {
    if (options.estimator != AdvantageEstimator::kRloo && options.estimator != AdvantageEstimator::kReinforcePlusPlus) {
      Fault(faults, "advantage.kl_in_reward",
            "set, but only the estimators RLOO and REINFORCE_PLUS_PLUS put the KL into the reward");
    }
    if (!std::isfinite(options.kl_in_reward) || options.kl_in_reward < 0) {
      Fault(faults, "advantage.kl_in_reward", absl::StrCat(options.kl_in_reward, ", must be finite and >= 0"));
    }
  }
  return options;
}

void CheckRecipe(const LossOptions& loss, const AdvantageOptions& advantage, std::vector<std::string>* faults) {
  if (loss.surrogate == Surrogate::kVespo && advantage.estimator == AdvantageEstimator::kReinforcePlusPlus) {
    Fault(faults, "advantage.estimator",
          "REINFORCE_PLUS_PLUS gives each token its own advantage, but VESPO's phi takes one sign a sequence");
  }
}

}  // namespace tandem
