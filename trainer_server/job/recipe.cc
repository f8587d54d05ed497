#include "trainer_server/job/recipe.h"

#include <algorithm>
#include <span>
#include <string_view>

#include "absl/strings/str_join.h"
#include "common/base/check.h"
#include "common/base/status.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/message.h"
#include "google/protobuf/text_format.h"

namespace tandem {
namespace {

using Lines = std::vector<std::string>;

struct Recipe {
  std::string_view name;
  std::string_view text;  // a JobSpec
  std::string_view note;  // what else was published; empty: nothing
};

// What each states, and temperature 1 where a source says nothing: importance ratios are then those of the policy itself.
// Adapter, data and rewards are never the recipe's. Alphabetical.
constexpr Recipe kRecipes[] = {
    // TRL 1.16, loss_type bnpo.
    {"bnpo", "loss { preset: LOSS_PRESET_BNPO } rollout { sampling { temperature: 1 } }", ""},
    // MiniMax-M1, 2506.13585, with ScaleRL's constants, 2510.13786: largest ratio 5, spread of the batch, groups of 16.
    {"cispo",
     "loss { preset: LOSS_PRESET_CISPO cispo_max_ratio: 5 beta: 0 } advantage { scale: ADVANTAGE_SCALE_BATCH }"
     "rollout { group_size: 16 sampling { temperature: 1 } }",
     ""},
    // DAPO, 2503.14476, section 4.1: 512 prompts x 16 in 16 mini-batches; 16,384 tokens and 4,096 of soft punishment.
    {"dapo",
     "loss { preset: LOSS_PRESET_DAPO beta: 0 mini_batches_per_rollout: 16 } advantage { scale: ADVANTAGE_SCALE_GROUP }"
     "rollout { prompts_per_step: 512 group_size: 16 sampling { temperature: 1 max_tokens: 20480 }"
     "  dynamic_sampling { max_rounds: 10 } }"
     "optimizer { learning_rate: 1e-6 schedule: LEARNING_RATE_SCHEDULE_CONSTANT warmup_steps: 20 }",
     "recipe: dapo was published with a reward for length beside the one for the answer: rewards { weight: 1 length { "
     "max_tokens: "
     "20480 cache_tokens: 4096 } }, and rewards of +-1"},
    // DeepSeek-R1, 2501.12948, R1-Zero: 8,192 completions of 512 prompts in 16 updates; the reference is replaced every 400 of
    // them.
    {"deepseek_r1",
     "loss { preset: LOSS_PRESET_GRPO epsilon_low: 10 epsilon_high: 10 beta: 0.001 kl_estimator: KL_ESTIMATOR_K3"
     "  mini_batches_per_rollout: 16 reference_sync { interval_steps: 25 alpha: 1 } }"
     "advantage { scale: ADVANTAGE_SCALE_GROUP }"
     "rollout { prompts_per_step: 512 group_size: 16 sampling { temperature: 1 max_tokens: 32768 } }"
     "optimizer { learning_rate: 3e-6 }",
     ""},
    // Dr. GRPO, 2503.20783.
    {"dr_grpo",
     "loss { preset: LOSS_PRESET_DR_GRPO beta: 0 } advantage { scale: ADVANTAGE_SCALE_NONE }"
     "rollout { group_size: 8 sampling { temperature: 1 max_tokens: 3000 } }",
     ""},
    // GMPO, 2507.20673.
    {"gmpo", "loss { preset: LOSS_PRESET_GMPO } rollout { sampling { temperature: 1 } }", ""},
    // DeepSeekMath, 2402.03300, section 4.2: batches of 1,024 completions, one update each.
    {"grpo",
     "loss { preset: LOSS_PRESET_GRPO beta: 0.04 kl_estimator: KL_ESTIMATOR_K3 } advantage { scale: ADVANTAGE_SCALE_GROUP }"
     "rollout { prompts_per_step: 16 group_size: 64 sampling { temperature: 1 max_tokens: 1024 } }"
     "optimizer { learning_rate: 1e-6 }",
     ""},
    // GSPO, 2507.18071, section 5.1: four mini-batches a rollout batch.
    {"gspo", "loss { preset: LOSS_PRESET_GSPO beta: 0 mini_batches_per_rollout: 4 } rollout { sampling { temperature: 1 } }", ""},
    // LUSPO, 2602.05261.
    {"luspo", "loss { preset: LOSS_PRESET_LUSPO } rollout { sampling { temperature: 1 } }", ""},
    // REINFORCE++, 2501.03262.
    {"reinforce_plus_plus", "loss { preset: LOSS_PRESET_REINFORCE_PLUS_PLUS } rollout { sampling { temperature: 1 } }",
     "recipe: reinforce_plus_plus was published with the KL in the reward of each token: advantage { kl_in_reward: ... }"},
    // RLOO, 2402.14740, as TRL 1.16's RLOOTrainer has it.
    {"rloo",
     "loss { preset: LOSS_PRESET_RLOO beta: 0 } advantage { estimator: ADVANTAGE_ESTIMATOR_RLOO kl_in_reward: 0.05 }"
     "rollout { group_size: 2 sampling { temperature: 1 } } optimizer { learning_rate: 1e-6 }",
     ""},
    // SAPO, 2511.20347.
    {"sapo",
     "loss { preset: LOSS_PRESET_SAPO sapo_temperature_positive: 1 sapo_temperature_negative: 1.05 }"
     "rollout { sampling { temperature: 1 } }",
     ""},
    // The defaults of TRL 1.16's GRPOConfig.
    {"trl",
     "loss { preset: LOSS_PRESET_DAPO epsilon_low: 0.2 epsilon_high: 0.2 beta: 0 }"
     "advantage { estimator: ADVANTAGE_ESTIMATOR_GROUP scale: ADVANTAGE_SCALE_GROUP epsilon: 1e-4 }"
     "rollout { group_size: 8 sampling { temperature: 1 max_tokens: 512 } }"
     "optimizer { learning_rate: 1e-6 beta1: 0.9 beta2: 0.999 epsilon: 1e-8 weight_decay: 0 max_grad_norm: 1"
     "  schedule: LEARNING_RATE_SCHEDULE_LINEAR warmup_steps: 0 }",
     ""},
    // VESPO, 2602.10693.
    {"vespo",
     "loss { preset: LOSS_PRESET_VESPO vespo_k_positive: 2 vespo_lambda_positive: 3 vespo_k_negative: 3 vespo_lambda_negative: 2"
     "  rollout_correction { mode: ROLLOUT_CORRECTION_MODE_TOKEN_TRUNCATE max: 2 } } rollout { sampling { temperature: 1 } }",
     ""},
};

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

std::vector<const FieldDescriptor*> FieldsOf(const Message& message) {
  std::vector<const FieldDescriptor*> fields;
  message.GetReflection()->ListFields(message, &fields);
  return fields;
}

// Paths of the fields that `recipe` sets and `given` does not.
void CollectGiven(const Message& recipe, const Message& given, const std::string& prefix, std::set<std::string>* paths) {
  for (const FieldDescriptor* field : FieldsOf(recipe)) {
    const std::string path = prefix + field->name();
    if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      CollectGiven(recipe.GetReflection()->GetMessage(recipe, field), given.GetReflection()->GetMessage(given, field), path + ".",
                   paths);
    } else if (!given.GetReflection()->HasField(given, field)) {
      paths->insert(path);
    }
  }
}

constexpr double kFullFineTuningRate = 1e-5;  // recipes for all weights publish less
constexpr double kTokenClip = 0.01;           // a clip range of single tokens is wider, one of a sequence's mean narrower
constexpr std::uint32_t kLongCompletion = 1024;

bool IsSequenceCorrection(v1::RolloutCorrectionMode mode) {
  return mode == v1::ROLLOUT_CORRECTION_MODE_SEQUENCE_TRUNCATE || mode == v1::ROLLOUT_CORRECTION_MODE_SEQUENCE_MASK;
}

void WarnOfRatios(const v1::JobSpec& given, const v1::JobSpec& resolved, Lines* warnings) {
  const v1::LossConfig& loss = resolved.loss();
  const std::uint64_t updates = std::uint64_t{loss.updates_per_rollout()} * loss.mini_batches_per_rollout();
  const bool sets_clip = given.loss().has_epsilon_low() || given.loss().has_epsilon_high() || given.loss().has_delta();
  if (sets_clip && updates == 1) {
    warnings->push_back(
        "loss.epsilon_low, epsilon_high, delta: with one update a rollout batch every ratio is exactly 1, so nothing is clipped");
  }
  if (loss.surrogate() == v1::SURROGATE_REINFORCE && updates > 1) {
    warnings->push_back(absl::StrCat("loss.surrogate: REINFORCE has no ratio; the later of ", updates,
                                     " updates treat completions of an older policy as the policy's own"));
  }
  const bool is_clip = loss.surrogate() == v1::SURROGATE_CLIP;
  const bool is_mean = loss.ratio_level() == v1::RATIO_LEVEL_SEQUENCE || loss.ratio_level() == v1::RATIO_LEVEL_SEQUENCE_TOKEN;
  if (is_clip && is_mean && loss.epsilon_high() > kTokenClip * 5) {
    warnings->push_back(absl::StrCat("loss.epsilon_high: ", loss.epsilon_high(),
                                     " is a range for single tokens; a sequence's mean ratio moves a thousandth as far, GSPO "
                                     "clips at 4e-4"));
  }
  if (is_clip && loss.ratio_level() == v1::RATIO_LEVEL_TOKEN && loss.epsilon_high() < kTokenClip && updates > 1) {
    warnings->push_back(absl::StrCat("loss.epsilon_high: ", loss.epsilon_high(),
                                     " is a range for a sequence's mean ratio; of single tokens it clips nearly all that moved"));
  }
  if (IsSequenceCorrection(loss.rollout_correction().mode()) && resolved.rollout().sampling().max_tokens() > kLongCompletion) {
    warnings->push_back(
        absl::StrCat("loss.rollout_correction.mode: a product over up to ", resolved.rollout().sampling().max_tokens(),
                     " tokens keeps or drops long completions by chance; correct by TOKEN_TRUNCATE, TOKEN_MASK or "
                     "GEOMETRIC_MASK"));
  }
}

void WarnOfKl(const v1::LossConfig& loss, Lines* warnings) {
  if (loss.beta() == 0) return;
  const bool is_k3 = loss.kl_estimator() == v1::KL_ESTIMATOR_K3 || loss.kl_estimator() == v1::KL_ESTIMATOR_UNSPECIFIED;
  if (is_k3 && !loss.kl_bias_correction()) {
    warnings->push_back(
        "loss.kl_estimator: the gradient of K3 is that of KL(reference, policy); kl_bias_correction or K2 give KL(policy, "
        "reference)");
  }
  const v1::ReferenceSync& sync = loss.reference_sync();
  if (loss.has_reference_sync() && sync.interval_steps() == 1 && sync.alpha() == 1) {
    warnings->push_back("loss.reference_sync: every step begins at its own reference, so the KL holds back only later updates");
  }
}

void WarnOfAdvantages(const v1::JobSpec& resolved, Lines* warnings) {
  const bool scales_group = resolved.advantage().scale() == v1::ADVANTAGE_SCALE_GROUP;
  if (scales_group && resolved.rollout().group_size() == 2) {
    warnings->push_back(
        "advantage.scale: GROUP makes of any two rewards +0.71 and -0.71, however far they are apart; BATCH or NONE keep sizes");
  }
  if (scales_group && resolved.loss().preset() == v1::LOSS_PRESET_DR_GRPO) {
    warnings->push_back("advantage.scale: GROUP with the preset DR_GRPO, whose point is to divide by no spread");
  }
  const bool has_length_reward =
      std::ranges::any_of(resolved.rewards(), [](const v1::RewardConfig& reward) { return reward.has_length(); });
  if (resolved.loss().mask_truncated() && has_length_reward) {
    warnings->push_back(
        "loss.mask_truncated: leaves out the completions that a length reward punishes most; they only move their group's mean");
  }
  const double quantile = resolved.loss().has_top_entropy_quantile() ? resolved.loss().top_entropy_quantile() : 1;
  if (quantile < 0.01) {
    warnings->push_back(
        absl::StrCat("loss.top_entropy_quantile: ", quantile, " leaves hardly a token of a step; 0.2 was published"));
  }
}

void WarnOfSampling(const v1::JobSpec& resolved, Lines* warnings) {
  if (resolved.rollout().has_dynamic_sampling()) {
    warnings->push_back(
        "rollout.dynamic_sampling: `reward` of a step is that of the groups kept; dynamic_sampling/reward is that of all drawn");
    if (resolved.rollout().dynamic_sampling().reward().empty() && resolved.rewards_size() > 1) {
      warnings->push_back(
          "rollout.dynamic_sampling.reward: not set; the sum of several rewards is seldom equal throughout a group, so that name "
          "the "
          "one for the answer");
    }
  }
  const v1::EvaluationConfig& evaluation = resolved.evaluation();
  if (evaluation.greedy() && evaluation.samples_per_prompt() > 1) {
    warnings->push_back(
        absl::StrCat("evaluation.greedy: the ", evaluation.samples_per_prompt(), " samples of a prompt are all the same"));
  }
  if (!evaluation.content().empty() && evaluation.content() == resolved.data().content()) {
    warnings->push_back("evaluation: scores the rows that are trained on; held-out rows tell what was learned");
  }
}

}  // namespace

std::vector<std::string> RecipeNames() {
  Lines names;
  for (const Recipe& recipe : kRecipes) names.emplace_back(recipe.name);
  return names;
}

std::set<std::string> ApplyRecipe(v1::JobSpec* spec, Lines* notes, Lines* faults) {
  std::set<std::string> given;
  if (spec->recipe().empty()) return given;
  const auto recipe = std::ranges::find(kRecipes, spec->recipe(), &Recipe::name);
  if (recipe == std::end(kRecipes)) {
    faults->push_back(absl::StrCat("recipe: '", spec->recipe().substr(0, 64), "' is not known; must be one of ",
                                   absl::StrJoin(RecipeNames(), ", ")));
    return given;
  }
  v1::JobSpec merged;
  TANDEM_CHECK(google::protobuf::TextFormat::ParseFromString(std::string(recipe->text), &merged), "recipe ", spec->recipe());
  if (spec->loss().has_rollout_correction()) merged.mutable_loss()->clear_rollout_correction();
  if (spec->loss().has_reference_sync()) merged.mutable_loss()->clear_reference_sync();
  if (spec->rollout().has_dynamic_sampling()) merged.mutable_rollout()->clear_dynamic_sampling();
  CollectGiven(merged, *spec, "", &given);
  merged.MergeFrom(*spec);
  *spec = std::move(merged);
  if (!recipe->note.empty()) notes->emplace_back(recipe->note);
  if (given.contains("optimizer.learning_rate") && spec->optimizer().learning_rate() < kFullFineTuningRate) {
    notes->push_back(absl::StrCat("optimizer.learning_rate: ", spec->optimizer().learning_rate(),
                                  " was published for training all weights; an adapter wants ten to a hundred times that"));
  }
  return given;
}

Lines MisleadingSettings(const v1::JobSpec& given, const v1::JobSpec& resolved) {
  Lines warnings;
  WarnOfRatios(given, resolved, &warnings);
  WarnOfKl(resolved.loss(), &warnings);
  WarnOfAdvantages(resolved, &warnings);
  WarnOfSampling(resolved, &warnings);
  return warnings;
}

}  // namespace tandem
