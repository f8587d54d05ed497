#include "trainer_server/loss/loss_config.h"

#include <limits>

#include "gmock/gmock.h"
#include "google/protobuf/text_format.h"
#include "gtest/gtest.h"
#include "tests/trainer_server/loss/golden_cases.h"

namespace tandem {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

template <typename Message>
Message Parse(const std::string& text) {
  Message message;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &message)) << text;
  return message;
}

struct Recipe {
  LossOptions loss;
  AdvantageOptions advantage;
  std::vector<std::string> faults;
};
Recipe Convert(const v1::LossConfig& loss, const v1::AdvantageConfig& advantage = {}) {
  Recipe recipe;
  recipe.loss = LossOptionsFromConfig(loss, 16, &recipe.faults);
  recipe.advantage = AdvantageOptionsFromConfig(advantage, loss.preset(), &recipe.faults);
  CheckRecipe(recipe.loss, recipe.advantage, &recipe.faults);
  return recipe;
}
Recipe Convert(const std::string& loss, const std::string& advantage = "") {
  return Convert(Parse<v1::LossConfig>(loss), Parse<v1::AdvantageConfig>(advantage));
}

// All that a loss of these options would do, as text.
std::string Fingerprint(const Recipe& recipe) {
  const LossOptions& o = recipe.loss;
  const AdvantageOptions& a = recipe.advantage;
  std::string text =
      absl::StrCat(static_cast<int>(o.surrogate), " ", static_cast<int>(o.ratio_level), " ", static_cast<int>(o.aggregation), " ",
                   o.mask_truncated, o.count_empty_sequences, o.kl_bias_correction, " ", static_cast<int>(o.kl_estimator), " ",
                   static_cast<int>(o.rollout_correction), " ", static_cast<int>(a.estimator), static_cast<int>(a.scale),
                   static_cast<int>(a.aggregation));
  for (const std::optional<double>& value :
       {o.delta, o.log_ratio_clamp, o.cispo_min_ratio, o.kl_log_ratio_clamp, o.kl_output_clamp, o.denominator_override,
        o.correction_min, o.correction_max, o.off_policy_threshold}) {
    absl::StrAppend(&text, " ", value.has_value() ? absl::StrCat(*value) : "-");
  }
  for (const double value :
       {o.epsilon_low, o.epsilon_high, o.cispo_max_ratio, o.sapo_temperature_positive, o.sapo_temperature_negative,
        o.vespo_k_positive, o.vespo_lambda_positive, o.vespo_k_negative, o.vespo_lambda_negative, o.beta, o.max_completion_length,
        o.top_entropy_quantile, o.entropy_coefficient, a.epsilon, a.kl_in_reward}) {
    absl::StrAppend(&text, " ", value);
  }
  return text;
}

TEST(LossConfigTest, EmptyIsTheProjectsDefault) {
  const Recipe recipe = Convert("");
  EXPECT_THAT(recipe.faults, IsEmpty());
  EXPECT_EQ(recipe.loss.surrogate, Surrogate::kClip);
  EXPECT_EQ(recipe.loss.ratio_level, RatioLevel::kToken);
  EXPECT_EQ(recipe.loss.aggregation, Aggregation::kTokenMean);
  EXPECT_EQ(recipe.loss.epsilon_low, 0.2);
  EXPECT_EQ(recipe.loss.epsilon_high, 0.28);
  EXPECT_EQ(recipe.loss.beta, 0);
  EXPECT_EQ(recipe.loss.kl_log_ratio_clamp, 20);
  EXPECT_EQ(recipe.loss.kl_output_clamp, 10);
  EXPECT_EQ(recipe.loss.rollout_correction, RolloutCorrectionMode::kTokenTruncate);
  EXPECT_EQ(recipe.loss.correction_min, std::nullopt);
  EXPECT_EQ(recipe.loss.correction_max, 2);
  EXPECT_EQ(recipe.loss.delta, std::nullopt);
  EXPECT_TRUE(recipe.loss.count_empty_sequences);
  EXPECT_EQ(recipe.advantage.estimator, AdvantageEstimator::kGroup);
  EXPECT_EQ(recipe.advantage.scale, AdvantageScale::kGroup);
  EXPECT_EQ(recipe.advantage.epsilon, 1e-4);
}

TEST(LossConfigTest, EveryPresetEqualsTheRecipeOfItsGoldenCase) {
  for (const auto& [preset, golden_name] : {std::pair{v1::LOSS_PRESET_GRPO, "grpo_random"},
                                            {v1::LOSS_PRESET_BNPO, "bnpo_random"},
                                            {v1::LOSS_PRESET_DR_GRPO, "dr_grpo_random"},
                                            {v1::LOSS_PRESET_DAPO, "dapo_random"},
                                            {v1::LOSS_PRESET_GSPO, "gspo_random"},
                                            {v1::LOSS_PRESET_CISPO, "cispo_random"},
                                            {v1::LOSS_PRESET_SAPO, "sapo_random"},
                                            {v1::LOSS_PRESET_LUSPO, "luspo_random"},
                                            {v1::LOSS_PRESET_VESPO, "vespo_random"},
                                            {v1::LOSS_PRESET_GMPO, "gmpo_random"},
                                            {v1::LOSS_PRESET_RLOO, "rloo_random"},
                                            {v1::LOSS_PRESET_REINFORCE, "reinforce_random"},
                                            {v1::LOSS_PRESET_REINFORCE_PLUS_PLUS, "reinforce_plus_plus_random"}}) {
    v1::LossConfig config;
    config.set_preset(preset);
    Recipe recipe = Convert(config);
    EXPECT_THAT(recipe.faults, IsEmpty()) << golden_name;
    const auto golden = std::ranges::find_if(
        GoldenCases(), [golden = std::string(golden_name)](const GoldenCase& c) { return c.name == golden; });
    ASSERT_NE(golden, GoldenCases().end());
    Recipe expected{golden->step.loss, golden->step.advantage, {}};
    // What the project adds to every preset.
    expected.loss.kl_log_ratio_clamp = 20;
    expected.loss.kl_output_clamp = 10;
    expected.loss.rollout_correction = RolloutCorrectionMode::kTokenTruncate;
    expected.loss.correction_max = 2;
    EXPECT_EQ(Fingerprint(recipe), Fingerprint(expected)) << golden_name;
  }
}

// Sets `field` of `config` to something other than what the defaults give.
void SetField(google::protobuf::Message* config, const google::protobuf::FieldDescriptor* field) {
  const google::protobuf::Reflection* reflection = config->GetReflection();
  switch (field->cpp_type()) {
    case google::protobuf::FieldDescriptor::CPPTYPE_DOUBLE:
      reflection->SetDouble(config, field, 1.5);
      return;
    case google::protobuf::FieldDescriptor::CPPTYPE_BOOL:
      reflection->SetBool(config, field, field->name() != "count_empty_sequences");
      return;
    case google::protobuf::FieldDescriptor::CPPTYPE_ENUM:
      reflection->SetEnumValue(config, field, field->full_name() == "tandem.v1.LossConfig.aggregation" ? 1 : 2);
      return;
    case google::protobuf::FieldDescriptor::CPPTYPE_MESSAGE: {
      auto* message = reflection->MutableMessage(config, field);
      SetField(message, message->GetDescriptor()->FindFieldByName("max"));
      return;
    }
    default:
      FAIL() << field->full_name();
  }
}

// CASES C21
TEST(LossConfigTest, NoFieldVanishes) {
  const std::string unset = Fingerprint(Convert(""));
  const auto* loss = v1::LossConfig::descriptor();
  for (int i = 0; i < loss->field_count(); ++i) {
    // The loop's, not the loss's.
    const std::string& name = loss->field(i)->name();
    if (name == "updates_per_rollout" || name == "mini_batches_per_rollout" || name == "reference_sync") continue;
    v1::LossConfig config;
    SetField(&config, loss->field(i));
    const Recipe recipe = Convert(config);
    EXPECT_TRUE(!recipe.faults.empty() || Fingerprint(recipe) != unset) << loss->field(i)->name();
  }
  const auto* advantage = v1::AdvantageConfig::descriptor();
  for (int i = 0; i < advantage->field_count(); ++i) {
    v1::AdvantageConfig config;
    SetField(&config, advantage->field(i));
    const Recipe recipe = Convert(v1::LossConfig(), config);
    EXPECT_TRUE(!recipe.faults.empty() || Fingerprint(recipe) != unset) << advantage->field(i)->name();
  }
}

// CASES C21
TEST(LossConfigTest, FieldsWithoutEffectAreRefusedByName) {
  const std::pair<std::string, std::string> refused[] = {
      {"surrogate: SURROGATE_CISPO epsilon_low: 0.1", "loss.epsilon_low: "},
      {"surrogate: SURROGATE_SAPO epsilon_high: 0.1", "loss.epsilon_high: "},
      {"preset: LOSS_PRESET_CISPO delta: 4", "loss.delta: "},
      {"preset: LOSS_PRESET_REINFORCE log_ratio_clamp: 4", "loss.log_ratio_clamp: "},
      {"cispo_min_ratio: 0.5", "loss.cispo_min_ratio: "},
      {"cispo_max_ratio: 4", "loss.cispo_max_ratio: "},
      {"sapo_temperature_positive: 2", "loss.sapo_temperature_positive: "},
      {"sapo_temperature_negative: 2", "loss.sapo_temperature_negative: "},
      {"vespo_k_positive: 1", "loss.vespo_k_positive: "},
      {"preset: LOSS_PRESET_SAPO vespo_lambda_positive: 1", "loss.vespo_lambda_positive: "},
      {"vespo_k_negative: 1", "loss.vespo_k_negative: "},
      {"vespo_lambda_negative: 1", "loss.vespo_lambda_negative: "},
      {"kl_estimator: KL_ESTIMATOR_K2", "loss.kl_estimator: "},
      {"kl_bias_correction: true", "loss.kl_bias_correction: "},
      {"kl_log_ratio_clamp: 5", "loss.kl_log_ratio_clamp: "},
      {"kl_output_clamp: 5", "loss.kl_output_clamp: "},
      {"constant_divisor: 512", "loss.constant_divisor: "},
      {"count_empty_sequences: false", "loss.count_empty_sequences: "},
      {"rollout_correction { mode: ROLLOUT_CORRECTION_MODE_NONE max: 2 }", "loss.rollout_correction.max: "},
      {"rollout_correction { mode: ROLLOUT_CORRECTION_MODE_NONE min: 0.5 }", "loss.rollout_correction.min: "},
      {"preset: LOSS_PRESET_VESPO rollout_correction { mode: ROLLOUT_CORRECTION_MODE_SEQUENCE_MASK }",
       "loss.rollout_correction.mode: "},
      {"beta: 0.1 kl_estimator: KL_ESTIMATOR_K1", "loss.kl_estimator: "},
  };
  for (const auto& [text, field] : refused) EXPECT_THAT(Convert(text).faults, ElementsAre(StartsWith(field))) << text;
}

TEST(LossConfigTest, AdvantageFieldsWithoutEffectAreRefusedByName) {
  struct Refused {
    std::string loss, advantage, field;
  };
  const Refused refused[] = {
      {"preset: LOSS_PRESET_RLOO", "scale: ADVANTAGE_SCALE_BATCH", "advantage.scale: "},
      {"", "estimator: ADVANTAGE_ESTIMATOR_OPO scale: ADVANTAGE_SCALE_GROUP", "advantage.scale: "},
      {"", "aggregation: REWARD_AGGREGATION_NORMALIZE_THEN_SUM scale: ADVANTAGE_SCALE_GROUP", "advantage.scale: "},
      {"preset: LOSS_PRESET_DR_GRPO", "aggregation: REWARD_AGGREGATION_NORMALIZE_THEN_SUM", "advantage.scale: "},
      {"preset: LOSS_PRESET_RLOO", "aggregation: REWARD_AGGREGATION_NORMALIZE_THEN_SUM", "advantage.aggregation: "},
      {"preset: LOSS_PRESET_DR_GRPO", "epsilon: 1e-6", "advantage.epsilon: "},
      {"preset: LOSS_PRESET_RLOO", "epsilon: 1e-6", "advantage.epsilon: "},
      {"", "epsilon: -1", "advantage.epsilon: -1"},
      {"", "kl_in_reward: 0.1", "advantage.kl_in_reward: "},
      {"preset: LOSS_PRESET_RLOO", "kl_in_reward: -0.1", "advantage.kl_in_reward: -0.1"},
      {"preset: LOSS_PRESET_VESPO", "estimator: ADVANTAGE_ESTIMATOR_REINFORCE_PLUS_PLUS", "advantage.estimator: "},
  };
  for (const Refused& row : refused) {
    EXPECT_THAT(Convert(row.loss, row.advantage).faults, ElementsAre(StartsWith(row.field)))
        << row.loss << " / " << row.advantage;
  }
}

TEST(LossConfigTest, ValuesOutOfRangeAreAllListedAtOnce) {
  const Recipe recipe = Convert(
      "epsilon_low: -0.1 delta: 1.1 beta: -1 entropy_coefficient: -2 top_entropy_quantile: 1.5 off_policy_threshold: -1 "
      "rollout_correction { min: 3 max: 2 }");
  EXPECT_THAT(
      recipe.faults,
      ElementsAre(StartsWith("loss.epsilon_low: -0.1, must be "), StartsWith("loss.delta: 1.1, must be "),
                  StartsWith("loss.beta: -1, must be "), StartsWith("loss.rollout_correction.min: 3, must be "),
                  StartsWith("loss.off_policy_threshold: -1, must be "), StartsWith("loss.top_entropy_quantile: 1.5, must be "),
                  StartsWith("loss.entropy_coefficient: -2, must be ")));
}

TEST(LossConfigTest, NumbersThatAreNotFiniteAreRefused) {
  for (const double value : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    v1::LossConfig config;
    config.set_epsilon_low(value);
    config.set_beta(value);
    config.set_delta(value);
    config.set_top_entropy_quantile(value);
    config.mutable_rollout_correction()->set_max(value);
    EXPECT_EQ(Convert(config).faults.size(), 5u);
    v1::AdvantageConfig advantage;
    advantage.set_epsilon(value);
    EXPECT_EQ(Convert(v1::LossConfig(), advantage).faults.size(), 1u);
  }
}

TEST(LossConfigTest, UnknownEnumNumbersAreRefused) {
  const auto* descriptor = v1::LossConfig::descriptor();
  for (const std::string name : {"preset", "surrogate", "ratio_level", "aggregation", "kl_estimator"}) {
    for (const int number : {77, -3}) {
      v1::LossConfig config;
      config.set_beta(0.1);
      config.GetReflection()->SetEnumValue(&config, descriptor->FindFieldByName(name), number);
      EXPECT_THAT(Convert(config).faults,
                  ElementsAre(StartsWith(absl::StrCat("loss.", name, ": ", number, " is not a known value"))));
    }
  }
  v1::LossConfig config;
  config.mutable_rollout_correction()->set_mode(static_cast<v1::RolloutCorrectionMode>(77));
  EXPECT_THAT(Convert(config).faults, Contains(HasSubstr("loss.rollout_correction.mode: 77")));
  v1::AdvantageConfig advantage;
  advantage.set_estimator(static_cast<v1::AdvantageEstimator>(77));
  advantage.set_scale(static_cast<v1::AdvantageScale>(78));
  advantage.set_aggregation(static_cast<v1::RewardAggregation>(79));
  EXPECT_THAT(Convert(v1::LossConfig(), advantage).faults,
              ElementsAre(HasSubstr("estimator: 77"), HasSubstr("scale: 78"), HasSubstr("aggregation: 79")));
}

TEST(LossConfigTest, AnyTripleOfAxesIsARecipe) {
  for (int surrogate = 1; surrogate <= v1::Surrogate_MAX; ++surrogate) {
    for (int level = 1; level <= v1::RatioLevel_MAX; ++level) {
      for (int aggregation = 1; aggregation <= v1::Aggregation_MAX; ++aggregation) {
        v1::LossConfig config;
        config.set_surrogate(static_cast<v1::Surrogate>(surrogate));
        config.set_ratio_level(static_cast<v1::RatioLevel>(level));
        config.set_aggregation(static_cast<v1::Aggregation>(aggregation));
        const Recipe recipe = Convert(config);
        EXPECT_THAT(recipe.faults, IsEmpty());
        EXPECT_EQ(static_cast<int>(recipe.loss.surrogate), surrogate - 1);
        EXPECT_EQ(static_cast<int>(recipe.loss.ratio_level), level - 1);
        EXPECT_EQ(static_cast<int>(recipe.loss.aggregation), aggregation - 1);
      }
    }
  }
}

TEST(LossConfigTest, SetFieldsWinOverThePreset) {
  const Recipe recipe = Convert(
      "preset: LOSS_PRESET_GSPO ratio_level: RATIO_LEVEL_SEQUENCE_TOKEN epsilon_high: 0.01 beta: 0.04 "
      "rollout_correction { mode: ROLLOUT_CORRECTION_MODE_GEOMETRIC_MASK }",
      "scale: ADVANTAGE_SCALE_NONE");
  EXPECT_THAT(recipe.faults, IsEmpty());
  EXPECT_EQ(recipe.loss.ratio_level, RatioLevel::kSequenceToken);
  EXPECT_EQ(recipe.loss.epsilon_low, 3e-4);
  EXPECT_EQ(recipe.loss.epsilon_high, 0.01);
  EXPECT_EQ(recipe.loss.correction_min, 0.999);
  EXPECT_EQ(recipe.loss.correction_max, 1.002);
  EXPECT_EQ(recipe.advantage.scale, AdvantageScale::kNone);
}

TEST(LossConfigTest, TheConstantDivisorDefaultsToTheLongestCompletion) {
  EXPECT_EQ(Convert("preset: LOSS_PRESET_DR_GRPO").loss.max_completion_length, 16);
  EXPECT_EQ(Convert("preset: LOSS_PRESET_DR_GRPO constant_divisor: 3000").loss.max_completion_length, 3000);
  std::vector<std::string> faults;
  LossOptionsFromConfig(Parse<v1::LossConfig>("preset: LOSS_PRESET_DR_GRPO"), 0, &faults);
  EXPECT_THAT(faults, ElementsAre(StartsWith("loss.constant_divisor: 0, must be ")));
}

TEST(LossOptionsTest, ValidationListsEveryFaultOnItsOwnLine) {
  LossOptions options;
  options.epsilon_low = -1;
  options.beta = -1;
  const absl::Status status = ValidateLossOptions(options);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("epsilon_low: -1, must be finite and >= 0\nbeta: -1"));
}

}  // namespace
}  // namespace tandem
