// Configurations as people write them for TRL, in JSON and YAML; what they become is compared with TRL itself in
// tests/agreement/trl_test.cc.
#include "client/trl_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "google/protobuf/text_format.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

ImportedJob Import(const std::string& text) {
  auto imported = ImportTrlConfig(text, "case");
  EXPECT_TRUE(imported.ok()) << imported.status();
  return imported.ok() ? *std::move(imported) : ImportedJob();
}
std::map<std::string, std::string> Reasons(const ImportedJob& imported) {
  std::map<std::string, std::string> reasons;
  for (const NotKept& option : imported.not_kept) reasons[option.option] += option.reason;
  return reasons;
}

TEST(TrlConfigTest, DefaultsAreThoseOfTrl) {
  const ImportedJob imported = Import("{}");
  const v1::JobSpec& job = imported.job;
  EXPECT_EQ(job.name(), "case");
  EXPECT_EQ(job.seed(), 42u);
  EXPECT_EQ(job.rollout().group_size(), 8u);
  EXPECT_EQ(job.rollout().prompts_per_step(), 1u);
  EXPECT_EQ(job.rollout().sampling().temperature(), 1);
  EXPECT_EQ(job.rollout().sampling().max_tokens(), 512u);
  EXPECT_EQ(job.loss().preset(), v1::LOSS_PRESET_DAPO);
  EXPECT_EQ(job.loss().epsilon_high(), 0.2);
  EXPECT_EQ(job.loss().rollout_correction().mode(), v1::ROLLOUT_CORRECTION_MODE_NONE);
  EXPECT_FALSE(job.loss().has_beta());
  EXPECT_EQ(job.advantage().scale(), v1::ADVANTAGE_SCALE_GROUP);
  EXPECT_EQ(job.optimizer().learning_rate(), 1e-6);
  EXPECT_EQ(job.optimizer().beta2(), 0.999);
  EXPECT_EQ(job.optimizer().schedule(), v1::LEARNING_RATE_SCHEDULE_LINEAR);
  EXPECT_TRUE(Reasons(imported).contains("num_train_epochs")) << "the number of steps is not known";
  EXPECT_TRUE(Reasons(imported).contains("use_peft")) << "all weights would be trained";
}

// The guides' first script, as its arguments are kept in a notebook.
TEST(TrlConfigTest, NotebookArgumentsBecomeAJob) {
  const ImportedJob imported = Import(R"({
    "output_dir": "outputs", "run_name": "gsm8k-lora", "learning_rate": 5e-06, "adam_beta1": 0.9, "adam_beta2": 0.99,
    "weight_decay": 0.1, "warmup_ratio": 0.1, "lr_scheduler_type": "cosine", "logging_steps": 1, "bf16": true,
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "num_generations": 8, "max_prompt_length": 256,
    "max_completion_length": 786, "max_steps": 250, "save_steps": 100, "max_grad_norm": 0.1, "report_to": "none", "use_vllm": true,
    "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3, "optim": "adamw_8bit", "num_train_epochs": 1, "seed": 3407})");
  const v1::JobSpec& job = imported.job;
  EXPECT_EQ(job.num_steps(), 250u);
  EXPECT_EQ(job.seed(), 3407u);
  EXPECT_EQ(job.rollout().prompts_per_step(), 2u) << "4 x 4 completions in groups of 8";
  EXPECT_EQ(job.loss().mini_batches_per_rollout(), 1u);
  EXPECT_EQ(job.loss().rollout_correction().mode(), v1::ROLLOUT_CORRECTION_MODE_SEQUENCE_MASK);
  EXPECT_EQ(job.loss().rollout_correction().max(), 3);
  EXPECT_FALSE(job.loss().rollout_correction().has_min());
  EXPECT_EQ(job.data().max_prompt_tokens(), 256u);
  EXPECT_EQ(job.optimizer().learning_rate(), 5e-6);
  EXPECT_EQ(job.optimizer().schedule(), v1::LEARNING_RATE_SCHEDULE_COSINE);
  EXPECT_EQ(job.optimizer().warmup_steps(), 25u);
  EXPECT_EQ(job.optimizer().max_grad_norm(), 0.1);
  EXPECT_EQ(job.checkpoint().interval_steps(), 100u);
  const auto reasons = Reasons(imported);
  for (const char* option : {"output_dir", "run_name", "bf16", "report_to", "vllm_mode", "vllm_gpu_memory_utilization", "optim",
                             "max_prompt_length", "per_device_train_batch_size", "logging_steps"}) {
    ASSERT_TRUE(reasons.contains(option)) << option;
    EXPECT_THAT(reasons.at(option), Not(HasSubstr("not an option"))) << option;
  }
  for (const char* kept :
       {"learning_rate", "num_generations", "max_steps", "seed", "use_vllm", "save_steps", "num_train_epochs"}) {
    EXPECT_FALSE(reasons.contains(kept)) << kept;
  }
}

// A configuration of `trl grpo --config`, several updates a generation, with an evaluation.
TEST(TrlConfigTest, YamlOfTheCommandBecomesAJob) {
  const ImportedJob imported = Import(R"(
# model
model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct
dtype: bfloat16
use_peft: true
lora_r: 32
lora_alpha: 64
lora_dropout: 0.0
lora_target_modules: [q_proj, v_proj, lm_head]
# data
dataset_name: openai/gsm8k
dataset_train_split: train
reward_funcs:
  - accuracy_reward
reward_weights: [1.0, 0.2]
chat_template_kwargs: {enable_thinking: false}
# training
loss_type: dr_grpo
scale_rewards: false
epsilon: 0.2
epsilon_high: 0.28
beta: 0.001
use_bias_correction_kl: False
num_iterations: 2
per_device_train_batch_size: 8
gradient_accumulation_steps: 2
steps_per_generation: 8
num_generations: 8
learning_rate: 1e-5
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.1}
max_steps: 1600
mask_truncated_completions: true
sync_ref_model: true
ref_model_sync_steps: 64
eval_strategy: steps
eval_steps: 80
num_generations_eval: 4
metric_for_best_model: eval_rewards/accuracy_reward/mean
load_best_model_at_end: true
save_steps: 80
save_total_limit: 3
generation_kwargs: {stop: ["</answer>"], presence_penalty: 0.5, num_beams: 4}
made_up_option: 3
)");
  const v1::JobSpec& job = imported.job;
  EXPECT_EQ(job.rollout().prompts_per_step(), 8u);
  EXPECT_EQ(job.loss().mini_batches_per_rollout(), 4u);
  EXPECT_EQ(job.loss().updates_per_rollout(), 2u);
  EXPECT_EQ(job.num_steps(), 200u) << "a step of the job makes eight optimizer steps";
  EXPECT_EQ(job.loss().preset(), v1::LOSS_PRESET_DR_GRPO);
  EXPECT_EQ(job.advantage().scale(), v1::ADVANTAGE_SCALE_NONE);
  EXPECT_EQ(job.loss().beta(), 0.001);
  EXPECT_TRUE(job.loss().has_kl_bias_correction());
  EXPECT_FALSE(job.loss().kl_bias_correction());
  EXPECT_EQ(job.loss().reference_sync().interval_steps(), 8u);
  EXPECT_EQ(job.loss().reference_sync().alpha(), 0.6);
  EXPECT_TRUE(job.loss().mask_truncated());
  EXPECT_EQ(job.adapter().rank(), 32u);
  EXPECT_EQ(job.adapter().targets_size(), 2);
  EXPECT_EQ(job.optimizer().learning_rate(), 1e-5);
  EXPECT_EQ(job.optimizer().final_learning_rate_ratio(), 0.1);
  EXPECT_EQ(job.data().template_arguments(), "{\"enable_thinking\":false}");
  EXPECT_EQ(job.rollout().sampling().stop_strings(0), "</answer>");
  EXPECT_EQ(job.rollout().sampling().presence_penalty(), 0.5);
  EXPECT_EQ(job.evaluation().interval_steps(), 10u);
  EXPECT_EQ(job.evaluation().samples_per_prompt(), 4u);
  EXPECT_EQ(job.evaluation().metric(), "rewards/accuracy_reward/mean");
  EXPECT_EQ(job.checkpoint().interval_steps(), 10u);
  EXPECT_EQ(job.checkpoint().keep(), 3u);
  const auto reasons = Reasons(imported);
  EXPECT_THAT(reasons.at("lora_target_modules"), HasSubstr("seven linears"));
  EXPECT_THAT(reasons.at("generation_kwargs.num_beams"), HasSubstr("no such setting"));
  EXPECT_THAT(reasons.at("made_up_option"), HasSubstr("not an option that this command knows"));
  EXPECT_THAT(reasons.at("reward_funcs"), HasSubstr("--rewards"));
  EXPECT_THAT(reasons.at("reward_weights"), HasSubstr("[1.0,0.2]"));
  EXPECT_THAT(reasons.at("max_steps"), HasSubstr("num_steps is 200"));
  EXPECT_FALSE(reasons.contains("use_peft"));

  const auto file = ToJobFile(imported);
  ASSERT_TRUE(file.ok());
  EXPECT_THAT(*file, HasSubstr("# made_up_option: 3: not an option"));
  v1::JobSpec read;
  ASSERT_TRUE(google::protobuf::TextFormat::ParseFromString(*file, &read)) << *file;
  EXPECT_EQ(read.SerializeAsString(), job.SerializeAsString());
}

TEST(TrlConfigTest, RecipesOfTrlsPaperIndexKeepTheirConstants) {
  const v1::JobSpec gspo = Import(R"({"importance_sampling_level": "sequence", "loss_type": "grpo", "beta": 0.0, "epsilon": 3e-4,
    "epsilon_high": 4e-4, "gradient_accumulation_steps": 1, "steps_per_generation": 4})")
                               .job;
  EXPECT_EQ(gspo.loss().ratio_level(), v1::RATIO_LEVEL_SEQUENCE);
  EXPECT_EQ(gspo.loss().epsilon_low(), 3e-4);
  EXPECT_EQ(gspo.loss().mini_batches_per_rollout(), 4u);
  const v1::JobSpec cispo = Import(R"({"loss_type": "cispo", "epsilon_high": 5.0, "num_generations": 16,
    "per_device_train_batch_size": 16, "scale_rewards": "batch", "cast_lm_head_to_fp32": true})")
                                .job;
  EXPECT_EQ(cispo.loss().cispo_max_ratio(), 5);
  EXPECT_FALSE(cispo.loss().has_epsilon_high());
  EXPECT_EQ(cispo.advantage().scale(), v1::ADVANTAGE_SCALE_BATCH);
  const v1::JobSpec gdpo = Import(R"({"multi_objective_aggregation": "normalize_then_sum"})").job;
  EXPECT_EQ(gdpo.advantage().aggregation(), v1::REWARD_AGGREGATION_NORMALIZE_THEN_SUM);
  EXPECT_EQ(gdpo.advantage().scale(), v1::ADVANTAGE_SCALE_UNSPECIFIED);
  const v1::JobSpec delta = Import(R"({"delta": 4.0, "top_entropy_quantile": 0.2, "off_policy_mask_threshold": 0.5,
    "entropy_coef": 0.01})")
                                .job;
  EXPECT_EQ(delta.loss().delta(), 4);
  EXPECT_EQ(delta.loss().top_entropy_quantile(), 0.2);
  EXPECT_EQ(delta.loss().off_policy_threshold(), 0.5);
  EXPECT_EQ(delta.loss().entropy_coefficient(), 0.01);
}

TEST(TrlConfigTest, GroupsThatMiniBatchesWouldSplitStayTogether) {
  const ImportedJob imported = Import(R"({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1,
    "steps_per_generation": 2, "num_generations": 8, "max_steps": 10})");
  EXPECT_EQ(imported.job.rollout().prompts_per_step(), 1u);
  EXPECT_EQ(imported.job.loss().mini_batches_per_rollout(), 0u);
  EXPECT_THAT(Reasons(imported).at("steps_per_generation"), HasSubstr("whole groups"));
  // Four generations of one policy make one optimizer step: one batch.
  const ImportedJob joined = Import(R"({"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4,
    "generation_batch_size": 8})");
  EXPECT_EQ(joined.job.rollout().prompts_per_step(), 4u);
  EXPECT_EQ(joined.job.loss().mini_batches_per_rollout(), 1u);
}

TEST(TrlConfigTest, EveryFaultIsListedAtOnce) {
  const auto imported = ImportTrlConfig(R"({"learning_rate": "fast", "loss_type": "ppo", "use_vllm": 1, "num_generations": 8,
    "per_device_train_batch_size": 3, "max_completion_length": -5, "importance_sampling_level": "word"})",
                                        "case");
  ASSERT_TRUE(absl::IsInvalidArgument(imported.status()));
  const std::string faults(imported.status().message());
  for (const char* words : {"learning_rate: \"fast\"; must be a number", "loss_type: \"ppo\"; must be one of grpo, bnpo, dr_grpo",
                            "use_vllm: 1; must be true or false", "num_generations: 8; must divide the batch of 3 completions",
                            "max_completion_length: -5; must be a whole number >= 0",
                            "importance_sampling_level: \"word\"; must be one of token, sequence"}) {
    EXPECT_THAT(faults, HasSubstr(words));
  }
}

TEST(TrlConfigTest, EveryTextIsUtf8) {
  const auto text = ToJobFile(Import("\"a\\N\": \"b\\_c\"\n"));
  ASSERT_TRUE(text.ok()) << text.status();
  EXPECT_THAT(*text, HasSubstr("# a\xef\xbf\xbd: \"b\xef\xbf\xbd"
                               "c\": "));
}

// What was not kept stands in comments, whatever it is called.
TEST(TrlConfigTest, AnOptionsNameEndsNoComment) {
  const auto text = ToJobFile(Import("{\"a\\nseed: 99\": 1, \"learning_rate\": 0.5}"));
  ASSERT_TRUE(text.ok()) << text.status();
  v1::JobSpec job;
  ASSERT_TRUE(google::protobuf::TextFormat::ParseFromString(*text, &job)) << *text;
  EXPECT_EQ(job.seed(), 42u) << *text;
  EXPECT_THAT(*text, HasSubstr("# a\\nseed: 99: 1: not an option that this command knows\n"));
}

TEST(TrlConfigTest, TextThatIsNoConfigurationIsRefused) {
  for (const auto& [text, words] : {std::pair<std::string, std::string>{"[1, 2]", "not a mapping"},
                                    {"a: [1", "neither JSON nor YAML"},
                                    {"just words", "not a mapping"},
                                    {"a: M\xfcller", "not UTF-8, from byte 4 on"},
                                    {"a: &x {b: [*x]}", "nests deeper than 64"},
                                    {std::string((1 << 20) + 1, ' '), "the limit is 1048576"}}) {
    const auto imported = ImportTrlConfig(text, "case");
    ASSERT_TRUE(absl::IsInvalidArgument(imported.status())) << text.substr(0, 20);
    EXPECT_THAT(std::string(imported.status().message()), HasSubstr(words));
  }
  // Aliases that would unfold to a million values.
  std::string bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n";
  for (int i = 1; i < 6; ++i) {
    bomb += absl::StrCat("a", i, ": &a", i, " [");
    for (int k = 0; k < 10; ++k) bomb += absl::StrCat(k == 0 ? "" : ", ", "*a", i - 1);
    bomb += "]\n";
  }
  EXPECT_THAT(std::string(ImportTrlConfig(bomb, "case").status().message()), HasSubstr("more than 10000 values"));
}

}  // namespace
}  // namespace tandem
