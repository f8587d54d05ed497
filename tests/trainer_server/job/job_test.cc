// What the job room keeps and checks: job files, content, the store, the history.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/base/hash.h"
#include "google/protobuf/text_format.h"
#include "tests/trainer_server/support/fake_model.h"
#include "trainer_server/job/content_store.h"
#include "trainer_server/job/evaluation.h"
#include "trainer_server/job/history.h"
#include "trainer_server/job/job_metrics.h"
#include "trainer_server/job/job_plan.h"
#include "trainer_server/job/job_store.h"
#include "trainer_server/job/recipe.h"

namespace tandem {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kRows[] = "{\"prompt\": \"1 + 1\", \"answer\": 2}\n{\"prompt\": \"2 + 3\", \"answer\": 5}\n";

class JobPlanTest : public ::testing::Test {
 protected:
  JobPlanTest() : content_(*ContentStore::Open(FreshDirectory("content"), 1 << 20)) {
    surroundings_ = {SmallModel(), std::make_shared<ByteEncoder>(), content_.get(), [this] { return node_; }};
    rows_ = Store(kRows);
  }
  std::string Store(const std::string& bytes) {
    const std::string sha256 = Sha256Hex(bytes);
    auto upload = content_->BeginUpload(sha256, bytes.size());
    EXPECT_TRUE(upload.ok()) << upload.status();
    EXPECT_TRUE((*upload)->Append(bytes).ok());
    EXPECT_TRUE((*upload)->Commit().ok());
    return sha256;
  }
  // One job file of several, each laid over those before.
  static std::string Merge(const std::vector<std::string>& texts) {
    v1::JobSpec spec;
    google::protobuf::TextFormat::Parser parser;
    for (const std::string& text : texts) EXPECT_TRUE(parser.MergeFromString(text, &spec)) << text;
    std::string merged;
    EXPECT_TRUE(google::protobuf::TextFormat::PrintToString(spec, &merged));
    return merged;
  }
  std::string Data() const { return "data { content: '" + rows_ + "' }"; }
  // A job that is right; later fields of the text override.
  std::string Job(const std::string& more = "") {
    return Merge({R"(name: "addition" num_steps: 4 rollout { prompts_per_step: 2 group_size: 4 sampling { temperature: 1
      max_tokens: 8 } } rewards { name: "correct" weight: 1 numeric_answer { answer_field: "answer" } }
      adapter { rank: 2 alpha: 4 } optimizer { learning_rate: 0.1 })",
                  Data(), more});
  }
  absl::StatusOr<JobPlan> Plan(const std::string& text) {
    TANDEM_ASSIGN_OR_RETURN(JobPlan plan, PlanJob(text, surroundings_, JobOrigin::kSubmitted));
    TANDEM_RETURN_IF_ERROR(MeasureMemory(surroundings_, node_, &plan));
    return plan;
  }
  std::string Faults(const std::string& text) {
    const auto plan = Plan(text);
    EXPECT_TRUE(absl::IsInvalidArgument(plan.status())) << plan.status();
    return std::string(plan.status().message());
  }

  std::unique_ptr<ContentStore> content_;
  NodeMemory node_ = SmallNode();
  JobSurroundings surroundings_;
  std::string rows_;
};

TEST_F(JobPlanTest, DefaultsAreFilledAndTheEchoIsAJobThatPlansToItself) {
  const auto plan = Plan(Job());
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->spec.optimizer().beta2(), 0.99);
  EXPECT_EQ(plan->spec.adapter().targets_size(), 7);
  EXPECT_EQ(plan->spec.checkpoint().interval_steps(), 10u);
  EXPECT_EQ(plan->spec.loss().preset(), v1::LOSS_PRESET_DAPO);
  EXPECT_EQ(plan->spec.loss().epsilon_high(), 0.28);
  EXPECT_EQ(plan->policy.scale, 2);
  EXPECT_EQ(plan->steps_per_epoch, 1u);
  EXPECT_TRUE(plan->warnings.empty());
  std::string echo;
  ASSERT_TRUE(google::protobuf::TextFormat::PrintToString(plan->spec, &echo));
  for (const std::string preset : {"GRPO", "BNPO", "DR_GRPO", "DAPO", "GSPO", "CISPO", "SAPO", "LUSPO", "VESPO", "GMPO", "RLOO",
                                   "REINFORCE", "REINFORCE_PLUS_PLUS"}) {
    const auto first = Plan(Job("loss { preset: LOSS_PRESET_" + preset + " }"));
    ASSERT_TRUE(first.ok()) << preset << first.status();
    ASSERT_TRUE(google::protobuf::TextFormat::PrintToString(first->spec, &echo));
    const auto again = Plan(echo);
    ASSERT_TRUE(again.ok()) << preset << " " << again.status();
    EXPECT_EQ(again->spec.SerializeAsString(), first->spec.SerializeAsString()) << preset;
  }
}

TEST_F(JobPlanTest, EveryFaultIsListedAtOnceWithFieldValueAndLimit) {
  const std::string faults = Faults(R"(
    name: "No Spaces" num_steps: 0 seed: 1
    rollout { prompts_per_step: 0 group_size: 5000
      sampling { temperature: 0 top_p: 1.5 min_p: nan max_tokens: 1000 presence_penalty: 3 stop_token_ids: 999 stop_strings: "" } }
    rewards { weight: 0 ended_by_itself {} }
    rewards { weight: 1 }
    loss { epsilon_low: -1 updates_per_rollout: 65 }
    adapter { rank: 9999 alpha: -1 dropout: 1 targets: LINEAR_KIND_Q_PROJ targets: LINEAR_KIND_Q_PROJ start_path: "/x" }
    optimizer { learning_rate: inf beta1: 1 epsilon: 0 weight_decay: -1 max_grad_norm: -2 warmup_steps: 9 final_learning_rate_ratio: 2 }
    batch { micro_batch_tokens: 5 }
    data { path: "rows.jsonl" content: "xyz" }
    evaluation { content: "abc" })");
  for (const char* words : {"name: 'No Spaces'; must be [a-z0-9_-]{1,64}",
                            "num_steps: 0; must be 1 to 1000000",
                            "rollout.prompts_per_step: 0; must be 1",
                            "rollout.group_size: 5000; must be 1 to 1024",
                            "rollout.sampling.temperature: 0",
                            "rollout.sampling.top_p: 1.5",
                            "rollout.sampling.min_p: nan",
                            "rollout.sampling.max_tokens: 1000; must be 1 to 63",
                            "presence_penalty: 3",
                            "stop_token_ids: 999; must be below the vocabulary's 257",
                            "stop_strings: 0 bytes",
                            "rewards[0].weight",
                            "rewards[1].",
                            "loss.epsilon_low",
                            "loss.updates_per_rollout: 65; must be 1 to 64",
                            "adapter.rank: 9999; must be 1 to 1024",
                            "adapter.alpha: -1; must be > 0",
                            "adapter.dropout: 1",
                            "adapter.targets: LINEAR_KIND_Q_PROJ; must be given once",
                            "adapter.start_path",
                            "optimizer.learning_rate: inf",
                            "optimizer.beta1: 1",
                            "optimizer.epsilon: 0",
                            "weight_decay: -1",
                            "max_grad_norm: -2",
                            "warmup_steps: 9",
                            "final_learning_rate_ratio: 2",
                            "batch.micro_batch_tokens: 5",
                            "data.path: rows.jsonl",
                            "data.content: content address 'xyz'",
                            "evaluation.content: content address 'abc'"}) {
    EXPECT_THAT(faults, HasSubstr(words));
  }
}

TEST_F(JobPlanTest, TextThatDoesNotParseIsNamedByLineAndTooLongTextRefused) {
  EXPECT_THAT(Faults("name: \"a\"\nnum_stepz: 3"), HasSubstr("line 2"));
  EXPECT_TRUE(absl::IsResourceExhausted(Plan(std::string(kMaxJobTextBytes + 1, ' ')).status()));
}

TEST_F(JobPlanTest, RowsAreCheckedByLineBeforeTheJobIsTaken) {
  rows_ = Store(
      "{\"prompt\": \"a\", \"answer\": 1}\nnot json\n{\"prompt\": \"b\"}\n{\"answer\": 1}\n"
      "{\"answer\": 2, \"prompt\": \"" +
      std::string(60, 'x') + "\"}\n{\"prompt\": \"c\", \"answer\": null}\n");
  const std::string faults = Faults(Job());
  EXPECT_THAT(faults, HasSubstr("line 2 is not a JSON object"));
  EXPECT_THAT(faults, HasSubstr("line 3 has no field 'answer'"));
  EXPECT_THAT(faults, HasSubstr("line 4 field 'prompt' is absent"));
  EXPECT_THAT(faults, HasSubstr("line 5: the prompt has 60 tokens; the limit is 56"));
  EXPECT_THAT(faults, Not(HasSubstr("line 6")));
  rows_ = Store("{\"prompt\": 3}\n");
  EXPECT_THAT(Faults(Job("evaluation { content: \"" + rows_ + "\" num_prompts: 9 }")), HasSubstr("evaluation.num_prompts: 9"));
}

// CASES C03: a job that truncates the distribution says so in its plan.
TEST_F(JobPlanTest, SplitFiltersAndTemplateArgumentsAreCheckedAndCounted) {
  std::string rows;
  for (int i = 0; i < 20; ++i) absl::StrAppend(&rows, "{\"prompt\": \"", std::string(3 + i % 10, 'p'), "\", \"answer\": 1}\n");
  rows_ = Store(rows);
  const auto plan = Plan(Job("data { held_out_share: 0.25 split_seed: 3 max_prompt_tokens: 10 } evaluation {}"));
  ASSERT_TRUE(plan.ok()) << plan.status();
  const v1::DataCounts& counts = plan->rows.counts;
  EXPECT_EQ(counts.rows(), 20u);
  EXPECT_EQ(counts.too_long(), 4u);
  EXPECT_EQ(counts.trained() + counts.held_out(), 16u);
  EXPECT_EQ(counts.evaluated(), counts.held_out());
  EXPECT_EQ(plan->spec.evaluation().num_prompts(), counts.held_out());
  EXPECT_EQ(plan->steps_per_epoch, (counts.trained() + 1) / 2);
  EXPECT_EQ(plan->prompts->longest, 10u);
  EXPECT_EQ(plan->evaluation, plan->data);
  // A stored job has the same rows without being checked again.
  const auto stored = PlanJob(Job("data { held_out_share: 0.25 split_seed: 3 max_prompt_tokens: 10 } evaluation {}"),
                              surroundings_, JobOrigin::kStored);
  ASSERT_TRUE(stored.ok()) << stored.status();
  EXPECT_EQ(*stored->rows.trained, *plan->rows.trained);

  const auto unused = Plan(Job("data { held_out_share: 0.25 }"));
  ASSERT_TRUE(unused.ok()) << unused.status();
  EXPECT_THAT(unused->warnings,
              ::testing::Contains(HasSubstr("data.held_out_share: 5 rows are held out and nothing scores them")));
  EXPECT_THAT(Faults(Job("evaluation {}")), HasSubstr("evaluation.path: ''; must be a file, or data.held_out_share above 0"));
  EXPECT_THAT(Faults(Job("data { held_out_share: 0.01 }")), HasSubstr("data.held_out_share: 0.01 of 20 rows is 0"));
  const std::string faults =
      Faults(Job("data { held_out_share: 1 min_prompt_tokens: 5 max_prompt_tokens: 4 template_arguments: '{\"messages\": 1}' }"));
  for (const char* words :
       {"data.held_out_share: 1; must be 0 to less than 1",
        "data.max_prompt_tokens: 4; must be 0, or at least min_prompt_tokens, 5", "data.template_arguments: sets 'messages'"}) {
    EXPECT_THAT(faults, HasSubstr(words));
  }
}

// A conversation is planned for with all of its turns.
TEST_F(JobPlanTest, ConversationsCountWithAllTheirTurns) {
  const auto row = [](int num_turns) {
    std::string messages = R"({"role": "user", "content": "hi"})";
    for (int i = 1; i < num_turns; ++i) { messages += R"(, {"role": "assistant"}, {"role": "user", "content": "b"})"; }
    return "{\"prompt\": [" + messages + "], \"answer\": 1}\n";
  };
  rows_ = Store(row(1) + row(3));
  const auto plan = Plan(Job());
  ASSERT_TRUE(plan.ok()) << plan.status();
  // What is said before each further turn is ";user:b;", 8 tokens; the turn has at most 8.
  EXPECT_EQ(plan->prompts->most_further, 2u * (8 + 8));
  EXPECT_EQ(plan->needs.max_completion_tokens, 8u + 2u * (8 + 8));
  rows_ = Store(row(1) + row(5));
  EXPECT_THAT(Faults(Job()), HasSubstr("data set line 2: the prompt and its further turns have 72 tokens; the limit is 56"));
}

TEST_F(JobPlanTest, CostsAndSideEffectsAreWarnedOf) {
  const auto plan =
      Plan(Job(R"(rollout { group_size: 1 prompts_per_step: 3 sampling { top_p: 0.9 seed: 3 repetition_penalty: 1.1 } }
    loss { beta: 0.1 updates_per_rollout: 2 top_entropy_quantile: 0.5 })"));
  ASSERT_TRUE(plan.ok()) << plan.status();
  const std::string warnings = absl::StrCat(::testing::PrintToString(plan->warnings));
  for (const char* words :
       {"kept mass", "group_size: 1", "beta: 0.1 costs", "several updates cost", "top_entropy_quantile: costs",
        "seed: has no effect", "penalties", "more than the data set's 2 rows"}) {
    EXPECT_THAT(warnings, HasSubstr(words));
  }
}

// Job() without what recipes give.
constexpr char kBareJob[] =
    R"(name: "bare" num_steps: 40 rewards { name: "correct" weight: 1 numeric_answer { answer_field: "answer" } }
  adapter { rank: 2 alpha: 4 } rollout { sampling { max_tokens: 8 } } )";

TEST_F(JobPlanTest, EveryRecipeIsAJobThatPlansToItself) {
  ASSERT_GE(RecipeNames().size(), 14u);
  for (const std::string& name : RecipeNames()) {
    SCOPED_TRACE(name);
    std::vector<std::string> texts = {kBareJob, "recipe: '" + name + "'", Data()};
    // What a recipe leaves open.
    if (name != "dapo" && name != "grpo" && name != "deepseek_r1") texts.emplace_back("rollout { prompts_per_step: 4 }");
    if (name == "bnpo" || name == "gmpo" || name == "gspo" || name == "luspo" || name == "sapo" || name == "vespo" ||
        name == "reinforce_plus_plus") {
      texts.emplace_back("rollout { group_size: 4 }");
    }
    if (name != "dapo" && name != "grpo" && name != "deepseek_r1" && name != "rloo" && name != "trl") {
      texts.emplace_back("optimizer { learning_rate: 0.1 }");
    }
    const auto plan = PlanJob(Merge(texts), surroundings_, JobOrigin::kSubmitted);
    ASSERT_TRUE(plan.ok()) << plan.status();
    const auto stored = JobText(*plan);
    ASSERT_TRUE(stored.ok()) << stored.status();
    EXPECT_THAT(*stored, HasSubstr("recipe: \"" + name + "\""));
    for (const JobOrigin origin : {JobOrigin::kStored, JobOrigin::kSubmitted}) {
      const auto again = PlanJob(*stored, surroundings_, origin);
      ASSERT_TRUE(again.ok()) << again.status();
      EXPECT_EQ(*JobText(*again), *stored);
    }
  }
}

TEST_F(JobPlanTest, RecipeFillsWhatIsNotSetAndTheJobsOwnFieldsWin) {
  const std::string job = Merge({kBareJob, "recipe: 'dapo'", Data()});
  const auto published = PlanJob(job, surroundings_, JobOrigin::kSubmitted);
  ASSERT_TRUE(published.ok()) << published.status();
  const v1::JobSpec& spec = published->spec;
  EXPECT_EQ(spec.rollout().prompts_per_step(), 512u);
  EXPECT_EQ(spec.rollout().group_size(), 16u);
  EXPECT_EQ(spec.rollout().sampling().temperature(), 1);
  EXPECT_EQ(spec.rollout().sampling().max_tokens(), 8u) << "the job's";
  EXPECT_EQ(spec.rollout().dynamic_sampling().max_rounds(), 10u);
  EXPECT_EQ(spec.loss().mini_batches_per_rollout(), 16u);
  EXPECT_EQ(published->loss.epsilon_low, 0.2);
  EXPECT_EQ(published->loss.epsilon_high, 0.28);
  EXPECT_EQ(spec.optimizer().learning_rate(), 1e-6);
  EXPECT_EQ(spec.optimizer().warmup_steps(), 20u);
  const std::string warnings = absl::StrJoin(published->warnings, "\n");
  EXPECT_THAT(warnings, HasSubstr("length { max_tokens: 20480 cache_tokens: 4096 }"));
  EXPECT_THAT(warnings, HasSubstr("optimizer.learning_rate: 1e-06 was published for training all weights"));

  const auto own = PlanJob(Merge({job, R"(rollout { prompts_per_step: 6 dynamic_sampling { max_rounds: 3 reward: "correct" } }
    loss { epsilon_high: 0.3 mini_batches_per_rollout: 2 rollout_correction { mode: ROLLOUT_CORRECTION_MODE_NONE } }
    optimizer { learning_rate: 0.01 warmup_steps: 0 } advantage { scale: ADVANTAGE_SCALE_NONE })"}),
                           surroundings_, JobOrigin::kSubmitted);
  ASSERT_TRUE(own.ok()) << own.status();
  EXPECT_EQ(own->spec.rollout().prompts_per_step(), 6u);
  EXPECT_EQ(own->spec.rollout().group_size(), 16u);
  EXPECT_EQ(own->spec.rollout().dynamic_sampling().max_rounds(), 3u);
  EXPECT_EQ(own->loss.epsilon_high, 0.3);
  EXPECT_EQ(own->loss.rollout_correction, RolloutCorrectionMode::kNone);
  EXPECT_EQ(own->learning_rate.warmup_steps, 0u) << "0 is a value";
  EXPECT_EQ(own->advantage.scale, AdvantageScale::kNone);

  EXPECT_THAT(Faults(Job("recipe: 'dapoo'")), HasSubstr("recipe: 'dapoo' is not known; must be one of bnpo, cispo"));
  const std::string too_long = Faults(Merge({R"(name: "a" num_steps: 10 recipe: "dapo" rewards { weight: 1 ended_by_itself {} }
    adapter { rank: 2 alpha: 4 })",
                                             Data()}));
  EXPECT_THAT(too_long, HasSubstr("rollout.sampling.max_tokens: 20480; must be 1 to 63 (given by recipe 'dapo')"));
  EXPECT_THAT(too_long, HasSubstr("optimizer.warmup_steps: 20; must be below num_steps, 10 (given by recipe 'dapo')"));
}

TEST_F(JobPlanTest, SettingsOfUpdatesAndEvaluationsAreCheckedByNameValueAndLimit) {
  const std::string faults = Faults(Job(R"(
    rollout { dynamic_sampling { max_rounds: 1 reward: "nobody" } }
    loss { mini_batches_per_rollout: 3 reference_sync { interval_steps: 0 alpha: 1.5 } }
    evaluation { samples_per_prompt: 4 pass_at: 5 pass_reward: "none" metric: "pass_at_2" early_stop { patience: 0 min_increase: -1 }
      sampling { seed: 3 top_p: 2 } })"));
  for (const char* words :
       {"rollout.dynamic_sampling.max_rounds: 1; must be 2 to 64",
        "rollout.dynamic_sampling.reward: 'nobody'; must be one of the rewards: correct",
        "loss.mini_batches_per_rollout: 3; must be a divisor of rollout.prompts_per_step, 2",
        "loss.reference_sync.interval_steps: 0; must be 1", "loss.reference_sync.alpha: 1.5; must be > 0 and <= 1",
        "loss.reference_sync: set, but neither loss.beta nor advantage.kl_in_reward",
        "evaluation.pass_at: 5; must be 1 to samples_per_prompt, 4",
        "evaluation.pass_reward: 'none'; must be one of the rewards: correct",
        "evaluation.metric: 'pass_at_2'; must be one of reward, rewards/correct/mean, pass_at_5",
        "evaluation.early_stop.patience: 0; must be 1 to 1000", "evaluation.early_stop.min_increase: -1",
        "evaluation.sampling.seed: 3", "evaluation.sampling.top_p: 2",
        "evaluation.interval_steps: 0; must be at least 1 with early_stop"}) {
    EXPECT_THAT(faults, HasSubstr(words));
  }
  // An evaluation's longer completions count in the memory and against the model's positions.
  const auto plan = Plan(Job("evaluation { content: '" + rows_ + "' sampling { max_tokens: 50 } }"));
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->needs.longest_evaluation_prompt_tokens, 5u + 42u);
  EXPECT_EQ(plan->spec.evaluation().metric(), "reward");
  EXPECT_THAT(plan->spec.evaluation().pass_at(), ElementsAre(1));
  EXPECT_THAT(Faults(Job("evaluation { content: '" + rows_ + "' sampling { max_tokens: 60 } }")),
              HasSubstr("evaluation: data set line 1: the prompt has 5 tokens; the limit is 4"));
  EXPECT_TRUE(Plan(Job("loss { beta: 0.1 reference_sync { interval_steps: 2 alpha: 0.6 } }"))->needs.has_reference_adapter);
}

TEST_F(JobPlanTest, SettingsThatMisleadAreWarnedOf) {
  const std::pair<std::string, std::string> misleading[] = {
      {"loss { epsilon_high: 0.3 }", "every ratio is exactly 1"},
      {"loss { preset: LOSS_PRESET_REINFORCE updates_per_rollout: 2 }", "REINFORCE has no ratio"},
      {"loss { preset: LOSS_PRESET_GSPO epsilon_high: 0.2 updates_per_rollout: 2 }", "a range for single tokens"},
      {"loss { preset: LOSS_PRESET_DAPO epsilon_high: 4e-4 updates_per_rollout: 2 }", "a range for a sequence's mean ratio"},
      {"loss { beta: 0.1 }", "the gradient of K3"},
      {"loss { beta: 0.1 reference_sync { interval_steps: 1 alpha: 1 } }", "begins at its own reference"},
      {"rollout { group_size: 2 }", "+0.71 and -0.71"},
      {"loss { preset: LOSS_PRESET_DR_GRPO } advantage { scale: ADVANTAGE_SCALE_GROUP }", "preset DR_GRPO"},
      {"loss { mask_truncated: true } rewards { weight: 1 length { max_tokens: 8 cache_tokens: 2 } }", "loss.mask_truncated"},
      {"loss { top_entropy_quantile: 0.001 }", "leaves hardly a token"},
      {"rollout { dynamic_sampling { max_rounds: 2 } } rewards { weight: 1 ended_by_itself {} }",
       "rollout.dynamic_sampling.reward: not set"},
      {"evaluation { content: '" + rows_ + "' greedy: true samples_per_prompt: 2 }", "all the same"},
      {"evaluation { content: '" + rows_ + "' }", "the rows that are trained on"},
  };
  for (const auto& [more, words] : misleading) {
    const auto plan = Plan(Job(more));
    ASSERT_TRUE(plan.ok()) << more << plan.status();
    EXPECT_THAT(plan->warnings, ::testing::Contains(HasSubstr(words))) << more;
  }
  surroundings_.model.max_positions = 4096;
  const auto plan = PlanJob(Job("rollout { sampling { max_tokens: 2000 } } loss { rollout_correction { mode: "
                                "ROLLOUT_CORRECTION_MODE_SEQUENCE_MASK } }"),
                            surroundings_, JobOrigin::kSubmitted);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_THAT(plan->warnings, ::testing::Contains(HasSubstr("keeps or drops long completions by chance")));
}

TEST(EvaluationTest, PassAtKIsTheShareOfSubsetsThatHoldAPass) {
  for (std::uint32_t n = 1; n <= 7; ++n) {
    for (std::uint32_t passed = 0; passed <= n; ++passed) {
      for (std::uint32_t k = 1; k <= n; ++k) {
        int subsets = 0, with_pass = 0;
        for (std::uint32_t subset = 0; subset < (1u << n); ++subset) {
          if (static_cast<std::uint32_t>(std::popcount(subset)) != k) continue;
          ++subsets;
          with_pass += (subset & ((1u << passed) - 1)) != 0 ? 1 : 0;
        }
        EXPECT_NEAR(PassAtK(n, passed, k), static_cast<double>(with_pass) / subsets, 1e-12) << n << " " << passed << " " << k;
      }
    }
  }
  EXPECT_NEAR(PassAtK(1024, 1, 512), 0.5, 1e-9);
}

TEST(EvaluationTest, SamplesThatAFunctionDoesNotApplyToAreNotCounted) {
  PassCounter passes(1, 0.5);
  passes.Add({{0, 1}, {0, 0}, {0, std::nullopt}});
  passes.Add({{0, 0.5}, {0, std::nullopt}, {1, std::nullopt}});
  EXPECT_EQ(passes.Mean(1), (0.5 + 1) / 2);
  EXPECT_EQ(passes.Mean(2), 1) << "only the first prompt has two";
  EXPECT_EQ(passes.Mean(3), std::nullopt);
}

TEST(EvaluationTest, BestIsTheFirstOfTheHighestAndPatienceCountsWhatDoesNotRise) {
  v1::EvaluationConfig config;
  config.mutable_early_stop()->set_patience(2);
  config.mutable_early_stop()->set_min_increase(0.1);
  EvaluationProgress progress;
  EXPECT_TRUE(RecordEvaluation(config, 0, 0.5, &progress));
  EXPECT_TRUE(RecordEvaluation(config, 5, 0.55, &progress)) << "better, though no rise";
  EXPECT_EQ(progress.evaluations_without_rise, 1u);
  EXPECT_TRUE(RecordEvaluation(config, 10, 0.61, &progress)) << "0.11 above the last rise";
  EXPECT_EQ(progress.evaluations_without_rise, 0u);
  EXPECT_FALSE(RecordEvaluation(config, 15, 0.61, &progress));
  EXPECT_FALSE(HasStoppedRising(config, progress));
  EXPECT_FALSE(RecordEvaluation(config, 20, std::nullopt, &progress));
  EXPECT_TRUE(HasStoppedRising(config, progress));
  EXPECT_EQ(progress.best_step, 10u);
  EXPECT_EQ(progress.evaluated_step, 20u);
  config.clear_early_stop();
  EXPECT_FALSE(HasStoppedRising(config, progress));
}

TEST_F(JobPlanTest, AdapterBeyondTheStandingRegionIsRefusedWithBothSizes) {
  node_.trainer_standing_bytes = 4096;
  const auto plan = Plan(Job());
  ASSERT_TRUE(plan.ok()) << plan.status();
  const absl::Status status = CheckMemory(plan->memory);
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("adapter.rank: 2; must be small enough"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("trainer's standing region of 4.0 KiB"));
}

// CASES C39: the job's own lengths are what is planned, those of long lines beyond the first rows too.
TEST_F(JobPlanTest, AGroupWithALongPromptIsKeptWholeWhereTheNodeHoldsIt) {
  surroundings_.model.max_positions = 8192;
  rows_ = Store("{\"prompt\": \"" + std::string(3000, 'x') + "\", \"answer\": 1}\n");
  node_.elastic_bytes = std::uint64_t{1} << 32;
  auto plan = Plan(Job());
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->spec.batch().micro_batch_tokens(), 0u);
  KeepGroupsWhole(surroundings_, node_, &*plan);
  EXPECT_EQ(plan->spec.batch().micro_batch_tokens(), 3032u);
  EXPECT_EQ(plan->memory.figures.micro_batch_rows(), 3032u);
  EXPECT_TRUE(CheckMemory(plan->memory).ok()) << CheckMemory(plan->memory);

  // With room for a sequence, but not for the group.
  plan = Plan(Job());
  ASSERT_TRUE(plan.ok()) << plan.status();
  NodeMemory small = node_;
  small.elastic_bytes = PlannedOf(plan->memory.figures, "activations") + PlannedOf(plan->memory.figures, "layer_inputs");
  KeepGroupsWhole(surroundings_, small, &*plan);
  EXPECT_EQ(plan->spec.batch().micro_batch_tokens(), 0u);

  // What the job says stays.
  plan = Plan(Job("batch { micro_batch_tokens: 3010 }"));
  ASSERT_TRUE(plan.ok()) << plan.status();
  KeepGroupsWhole(surroundings_, node_, &*plan);
  EXPECT_EQ(plan->spec.batch().micro_batch_tokens(), 3010u);
}

TEST_F(JobPlanTest, MemoryIsPlannedForTheLongestPromptAndCompletion) {
  std::string rows;
  for (std::size_t i = 0; i < kMaxEncodedRows + kMaxEncodedLongRows + 10; ++i) rows += "{\"prompt\": \"abcd\", \"answer\": 1}\n";
  rows += "{\"prompt\": \"" + std::string(40, 'x') + "\", \"answer\": 1}\n{\"prompt\": \"ab\", \"answer\": 1}\n";
  rows_ = Store(rows);
  auto plan = Plan(Job());
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->needs.longest_prompt_tokens, 40u);
  EXPECT_EQ(plan->memory.figures.context_tokens(), 48u);
  EXPECT_TRUE(CheckMemory(plan->memory).ok()) << CheckMemory(plan->memory);
  EXPECT_THAT(plan->warnings, ::testing::Contains(HasSubstr("256 longest lines")));

  // Stored, then begun on a node with less memory.
  auto stored = PlanJob(Job(), surroundings_, JobOrigin::kStored);
  ASSERT_TRUE(stored.ok()) << stored.status();
  node_.elastic_bytes = 64 << 10;
  ASSERT_TRUE(MeasureMemory(surroundings_, node_, &*stored).ok());
  EXPECT_EQ(stored->needs.longest_prompt_tokens, 40u);
  const absl::Status status = CheckMemory(stored->memory);
  EXPECT_TRUE(absl::IsResourceExhausted(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("rollout.sampling.max_tokens: 8, with prompts of up to 40 tokens; "));
}

TEST(ContentStoreTest, OnlyWholeContentStandsUnderItsAddress) {
  const std::string directory = FreshDirectory("content_store");
  auto store = *ContentStore::Open(directory, 100);
  const std::string bytes(60, 'x'), sha256 = Sha256Hex(bytes);
  EXPECT_TRUE(absl::IsInvalidArgument(store->BeginUpload("../../etc/passwd", 3).status()));
  {
    auto upload = *store->BeginUpload(sha256, 60);
    ASSERT_TRUE(upload->Append(bytes.substr(0, 30)).ok());
    EXPECT_TRUE(absl::IsInvalidArgument(upload->Commit()));  // half of it
  }
  {
    auto upload = *store->BeginUpload(sha256, 60);
    ASSERT_TRUE(upload->Append(std::string(60, 'y')).ok());
    EXPECT_THAT(std::string(upload->Commit().message()), HasSubstr(sha256));  // other bytes
    EXPECT_TRUE(absl::IsInvalidArgument(upload->Append("z")));
  }
  EXPECT_FALSE(store->Has(sha256));
  {
    auto upload = *store->BeginUpload(sha256, 60);
    EXPECT_TRUE(absl::IsResourceExhausted(store->BeginUpload(sha256, 60).status()));  // 60 of 100 are spoken for
    ASSERT_TRUE(upload->Append(bytes).ok());
    ASSERT_TRUE(upload->Commit().ok());
  }
  EXPECT_EQ(ReadText(*store->PathOf(sha256)), bytes);
  WriteText(directory + "/partial-9", "what a crash left");
  store = *ContentStore::Open(directory, 100);
  EXPECT_FALSE(std::filesystem::exists(directory + "/partial-9"));
  EXPECT_TRUE(store->Has(sha256));
  EXPECT_TRUE(absl::IsResourceExhausted(store->BeginUpload(sha256, 60).status()));
}

TEST(ContentStoreTest, AnUploadThatBrokeOffIsGoneOnWithAlsoAfterARestart) {
  const std::string directory = FreshDirectory("content_resume");
  auto store = *ContentStore::Open(directory, 100);
  const std::string bytes = "0123456789", sha256 = Sha256Hex(bytes);
  const auto send = [&](const std::string& part, std::uint64_t offset_bytes) {
    auto upload = store->BeginUpload(sha256, bytes.size(), offset_bytes);
    if (!upload.ok()) return upload.status();
    if (const absl::Status status = (*upload)->Append(part); !status.ok()) return status;
    return (*upload)->Commit();
  };
  EXPECT_EQ(store->PartialBytes(sha256), 0u);
  EXPECT_TRUE(absl::IsInvalidArgument(send("0123", 0)));
  EXPECT_EQ(store->PartialBytes(sha256), 4u);
  EXPECT_TRUE(absl::IsAborted(send("56789", 5)));  // there are 4
  EXPECT_TRUE(absl::IsInvalidArgument(send("", 11)));
  EXPECT_EQ(store->PartialBytes(sha256), 4u);
  EXPECT_TRUE(absl::IsInvalidArgument(send("3456", 3)));  // an offset before the end is as good
  EXPECT_EQ(store->PartialBytes(sha256), 7u);
  { const auto dropped_at_once = *store->BeginUpload(sha256, bytes.size(), 7); }
  EXPECT_EQ(store->PartialBytes(sha256), 7u);
  store.reset();
  store = *ContentStore::Open(directory, 100);
  EXPECT_EQ(store->PartialBytes(sha256), 7u);
  EXPECT_FALSE(store->Has(sha256));
  ASSERT_EQ(send("789", 7), absl::OkStatus());
  EXPECT_EQ(ReadText(*store->PathOf(sha256)), bytes);
  EXPECT_EQ(store->PartialBytes(sha256), 0u);
  EXPECT_TRUE(store->BeginUpload(Sha256Hex("x"), 90).ok());  // of 100, 10 are in use
}

TEST(ContentStoreTest, PartialContentThatIsWrongOldOrInTheWayGoes) {
  const std::string directory = FreshDirectory("content_partial");
  auto store = *ContentStore::Open(directory, 100);
  const auto begin = [&](const std::string& name, std::size_t sent) {
    auto upload = *store->BeginUpload(Sha256Hex(name), 40);
    EXPECT_TRUE(upload->Append(std::string(sent, 'x')).ok());
  };
  const auto partial = [&](const std::string& name) { return store->PartialBytes(Sha256Hex(name)); };
  begin("a", 30);
  {
    auto upload = *store->BeginUpload(Sha256Hex("a"), 40, 30);
    ASSERT_TRUE(upload->Append(std::string(10, 'y')).ok());
    EXPECT_THAT(std::string(upload->Commit().message()), HasSubstr("was announced"));
  }
  EXPECT_EQ(partial("a"), 0u);  // other bytes than announced
  begin("b", 30);
  begin("c", 30);
  EXPECT_EQ(partial("b") + partial("c"), 60u);
  { const auto upload = *store->BeginUpload(Sha256Hex("d"), 70); }
  EXPECT_EQ(partial("b"), 0u);  // the older
  EXPECT_EQ(partial("c"), 30u);
  const auto refused = store->BeginUpload(Sha256Hex("e"), 101);
  EXPECT_TRUE(absl::IsResourceExhausted(refused.status()));
  EXPECT_EQ(partial("c"), 30u) << "what cannot come in anyway drops nobody's part";
  const std::string path = directory + "/partial-" + Sha256Hex("c");
  std::filesystem::last_write_time(path, std::filesystem::file_time_type::clock::now() - std::chrono::hours(25));
  store.reset();
  store = *ContentStore::Open(directory, 100);
  EXPECT_EQ(partial("c"), 0u);
  EXPECT_FALSE(std::filesystem::exists(path));
  for (std::size_t i = 0; i <= ContentStore::kMaxPartials; ++i) begin(absl::StrCat("many ", i), 1);
  EXPECT_EQ(partial("many 0"), 0u);
  EXPECT_EQ(partial(absl::StrCat("many ", ContentStore::kMaxPartials)), 1u);
}

class JobStoreTest : public ::testing::Test {
 protected:
  JobStoreTest() : path_(FreshDirectory("job_store") + "/jobs.sqlite") { Reopen(); }
  void Reopen() {
    store_.reset();
    store_ = *JobStore::Open(path_);
  }
  std::string Add(const std::string& name) {
    v1::JobSpec spec;
    spec.set_name(name);
    spec.set_num_steps(7);
    return *store_->Add(spec, "text of " + name, "ada");
  }
  v1::JobState State(const std::string& job) { return store_->Get(job)->status.state(); }
  const std::string path_;
  std::unique_ptr<JobStore> store_;
};

TEST_F(JobStoreTest, QueueIsFirstInFirstOutAndTheRunningJobGoesBeforeAll) {
  const std::string first = Add("a"), second = Add("b"), third = Add("a");
  EXPECT_NE(first, third);
  EXPECT_EQ((*store_->Next())->status.job(), first);
  ASSERT_TRUE(store_->Pause(first).ok());
  EXPECT_EQ((*store_->Next())->status.job(), second);
  ASSERT_TRUE(store_->Transition(third, v1::JOB_STATE_RUNNING, "").ok());
  ASSERT_TRUE(store_->SetStep(third, 3).ok());
  Reopen();
  const StoredJob next = **store_->Next();
  EXPECT_EQ(next.status.job(), third);
  EXPECT_EQ(next.status.step(), 3u);
  EXPECT_EQ(next.job_text, "text of a");
  EXPECT_EQ(next.status.num_steps(), 7u);
  ASSERT_TRUE(store_->Transition(third, v1::JOB_STATE_FAILED, "why").ok());
  EXPECT_EQ(store_->Get(third)->status.error(), "why");
  ASSERT_TRUE(store_->Resume(first).ok());
  EXPECT_EQ((*store_->Next())->status.job(), first) << "a paused job keeps its place";
  EXPECT_EQ(store_->depth().ready, 2);
  ASSERT_TRUE(store_->Resume(third).ok()) << "a failed job can be resumed";
  EXPECT_EQ(State(third), v1::JOB_STATE_QUEUED);
  EXPECT_EQ(store_->Get(third)->status.error(), "");
  EXPECT_EQ(store_->Get(third)->status.step(), 3u);
}

TEST_F(JobStoreTest, StatesThatDoNotFollowAreRefusedByName) {
  const std::string job = Add("a");
  EXPECT_TRUE(absl::IsFailedPrecondition(store_->Transition(job, v1::JOB_STATE_SUCCEEDED, "")));
  ASSERT_TRUE(store_->Transition(job, v1::JOB_STATE_RUNNING, "").ok());
  ASSERT_TRUE(store_->Transition(job, v1::JOB_STATE_SUCCEEDED, "").ok());
  for (const absl::Status& status :
       {store_->Cancel(job), store_->Pause(job), store_->Resume(job), store_->Transition(job, v1::JOB_STATE_RUNNING, "")}) {
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("is succeeded and cannot be"));
  }
  EXPECT_TRUE(absl::IsNotFound(store_->Cancel("nobody")));
}

TEST_F(JobStoreTest, RunningJobIsAskedAndTheRequestSurvivesADeath) {
  const std::string job = Add("a");
  ASSERT_TRUE(store_->Transition(job, v1::JOB_STATE_RUNNING, "").ok());
  ASSERT_TRUE(store_->Pause(job).ok());
  EXPECT_EQ(State(job), v1::JOB_STATE_RUNNING);
  Reopen();
  ASSERT_TRUE(store_->Transition(job, v1::JOB_STATE_RUNNING, "").ok());  // taken up again
  EXPECT_EQ(store_->Get(job)->request, JobRequest::kPause);
  ASSERT_TRUE(store_->Resume(job).ok());
  EXPECT_EQ(store_->Get(job)->request, JobRequest::kNone);
  ASSERT_TRUE(store_->Cancel(job).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(store_->Pause(job)));
  ASSERT_TRUE(store_->Transition(job, v1::JOB_STATE_CANCELLED, "").ok());
  EXPECT_EQ(store_->Get(job)->request, JobRequest::kNone);
}

TEST_F(JobStoreTest, ListsPagesNewestFirst) {
  std::vector<std::string> jobs;
  for (int i = 0; i < 5; ++i) jobs.push_back(Add("a"));
  const auto page = *store_->List(2, std::nullopt, {});
  ASSERT_EQ(page.size(), 2u);
  EXPECT_EQ(page[0].status.job(), jobs[4]);
  const auto rest = *store_->List(10, page[1].ordinal, {});
  ASSERT_EQ(rest.size(), 3u);
  EXPECT_EQ(rest[2].status.job(), jobs[0]);
}

TEST(HistoryTest, IsCutBackReadAsItGrowsAndKeepsEveryBit) {
  const std::string directory = FreshDirectory("history");
  auto writer = *HistoryWriter::Open(directory, 0, 0);
  HistoryReader reader(directory);
  EXPECT_EQ(reader.Next(), std::nullopt);
  const double awkward = 0.1 + 0.2;
  HistoryEvent event{.step = 1, .values = {{"loss", awkward}, {"bad", std::nan("")}}, .times = {{"step_time", 3}}};
  ASSERT_TRUE(writer.Append(event).ok());
  const std::uint64_t kept = writer.size_bytes();
  event.step = 2;
  ASSERT_TRUE(writer.Append(event).ok());
  const auto read = reader.Next();
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->values, (NamedValues{{"loss", awkward}}));
  EXPECT_EQ(read->times, (NamedValues{{"step_time", 3}}));
  EXPECT_EQ(reader.Next()->step, 2u);
  EXPECT_FALSE(reader.Next().has_value());

  writer = *HistoryWriter::Open(directory, kept, 1);
  EXPECT_EQ(std::filesystem::file_size(directory + "/history.jsonl"), kept);
  EXPECT_EQ(reader.Next()->step, 1u) << "after a cut the reader begins again";
}

TEST(HistoryTest, OneThatWasCutKeepsItsWholeLinesUpToTheStep) {
  const std::string directory = FreshDirectory("history_cut"), path = directory + "/history.jsonl";
  std::vector<std::uint64_t> sizes = {0};
  auto writer = *HistoryWriter::Open(directory, 0, 0);
  for (std::uint64_t step = 1; step <= 4; ++step) {
    ASSERT_TRUE(writer.Append({.step = step, .values = {{"loss", 0.5}}, .times = {}}).ok());
    sizes.push_back(writer.size_bytes());
  }
  EXPECT_EQ(HistoryWriter::Open(directory, sizes[4] + 1, 3)->size_bytes(), sizes[3]) << "step 4 comes again";
  std::filesystem::resize_file(path, sizes[2] + 5);
  EXPECT_EQ(HistoryWriter::Open(directory, sizes[3], 3)->size_bytes(), sizes[2]);
  EXPECT_EQ(std::filesystem::file_size(path), sizes[2]);
  std::filesystem::remove(path);
  EXPECT_EQ(HistoryWriter::Open(directory, sizes[3], 3)->size_bytes(), 0u);
}

TEST(HistoryTest, CountsOfADamagedFileAreInRange) {
  EXPECT_EQ(CountOf<std::uint32_t>(7), 7u);
  EXPECT_EQ(CountOf<std::uint32_t>(-1), 0u);
  EXPECT_EQ(CountOf<std::uint32_t>(std::nan("")), 0u);
  EXPECT_EQ(CountOf<std::uint32_t>(1e300), 0xffffffffu);
  EXPECT_EQ(DataCountsOf({{"rows", 1e300}}).rows(), ~std::uint64_t{0});
  EXPECT_EQ(DataCountsOf({{"rows", -3}}).rows(), 0u);
}

TEST(HistoryTest, GoesOnAtAStepAndPassesOverOthers) {
  const std::string directory = FreshDirectory("history_seek");
  auto writer = *HistoryWriter::Open(directory, 0, 0);
  constexpr std::uint64_t kSteps = 2000;  // 400 KiB: several bisections
  ASSERT_TRUE(writer.Append(DataEvent(v1::DataCounts())).ok());
  for (std::uint64_t step = 1; step <= kSteps; ++step) {
    HistoryEvent event{.step = step, .values = {{std::string(step % 300, 'v'), 1}}, .times = {}};
    ASSERT_TRUE(writer.Append(event).ok());
    event.kind = HistoryEvent::Kind::kEvaluation;
    if (step % 10 == 0) ASSERT_TRUE(writer.Append(event).ok());
  }
  for (const std::uint64_t from : {1, 2, 9, 10, 11, 777, 1000, 1999, 2000}) {
    HistoryReader reader(directory);
    reader.Seek(from);
    const auto event = reader.Next();
    ASSERT_TRUE(event.has_value()) << from;
    EXPECT_EQ(event->step, from);
    EXPECT_EQ(event->kind, HistoryEvent::Kind::kStep) << "the first of the step";
  }
  HistoryReader from_begin(directory), from_end(directory);
  from_begin.Seek(0);
  EXPECT_EQ(from_begin.Next()->kind, HistoryEvent::Kind::kData);
  from_end.Seek(kSteps + 1);
  EXPECT_FALSE(from_end.Next().has_value());
  ASSERT_TRUE(writer.Append({.step = kSteps + 1, .values = {}, .times = {}}).ok());
  EXPECT_EQ(from_end.Next()->step, kSteps + 1) << "what comes later is followed";

  HistoryReader strided(directory, /*stride_steps=*/8);
  std::uint64_t num_steps = 0, num_evaluations = 0;
  while (const auto event = strided.Next()) {
    if (event->kind == HistoryEvent::Kind::kEvaluation) ++num_evaluations;
    if (event->kind != HistoryEvent::Kind::kStep) continue;
    EXPECT_EQ(event->step % 8, 0u);
    ++num_steps;
  }
  EXPECT_EQ(num_steps, kSteps / 8);
  EXPECT_EQ(num_evaluations, kSteps / 10);

  HistoryReader absent(directory + "/absent");
  absent.Seek(5);
  EXPECT_FALSE(absent.Next().has_value());
}

TEST(HistoryTest, CompletionsComeBackAndEndWhereTheReaderStops) {
  const std::string directory = FreshDirectory("completions");
  auto writer = *HistoryWriter::Open(directory, 0, 0);
  std::vector<v1::CompletionRecord> records(3);
  for (std::uint32_t i = 0; i < 3; ++i) {
    records[i].set_member_index(i);
    records[i].set_completion("line\n\"quoted\" \xf0\x9f\x98\x80");
    records[i].set_reward(0.1 * i);
  }
  ASSERT_TRUE(writer.WriteCompletions(4, records).ok());
  std::vector<std::uint32_t> members;
  ASSERT_TRUE(ReadCompletions(directory, 4, [&](const v1::CompletionRecord& record) {
                members.push_back(record.member_index());
                EXPECT_EQ(record.completion(), records[0].completion());
                EXPECT_EQ(record.reward(), 0.1 * record.member_index());
                return members.size() < 2;
              }).ok());
  EXPECT_THAT(members, ElementsAre(0, 1));
  EXPECT_TRUE(absl::IsNotFound(ReadCompletions(directory, 5, [](const auto&) { return true; })));
}

TEST(JobMetricsTest, ValuesOfTheHistoryAreServedUnderTheirDeclaredNames) {
  const auto metrics = *Metrics::Create("");
  ExportHistory(
      {.kind = HistoryEvent::Kind::kStep,
       .step = 3,
       .values = {{"reward", 0.5}, {"rewards/of/two parts/mean", 0.25}, {"rewards/exact/std", 0.125}, {"no_such_value", 1}},
       .times = {{"step_time", 2}}},
      "a", metrics.get());
  ExportHistory({.kind = HistoryEvent::Kind::kEvaluation,
                 .step = 3,
                 .values = {{"reward", 0.75}, {"pass_at_16", 0.9}, {"best/rewards/exact/mean", 0.8}},
                 .times = {}},
                "a", metrics.get());
  const std::string text = metrics->Text();
  for (const char* series :
       {"tandem_train_reward{job=\"a\"} 0.5\n", "tandem_train_rewards_mean{function=\"of/two parts\",job=\"a\"} 0.25\n",
        "tandem_train_rewards_std{function=\"exact\",job=\"a\"} 0.125\n", "tandem_train_step_time{job=\"a\"} 2\n",
        "tandem_train_evaluation_reward{job=\"a\"} 0.75\n", "tandem_train_evaluation_pass_at{job=\"a\",k=\"16\"} 0.9\n",
        "tandem_train_evaluation_best{job=\"a\",metric=\"rewards/exact/mean\"} 0.8\n"}) {
    EXPECT_THAT(text, HasSubstr(series));
  }
  EXPECT_THAT(text, Not(HasSubstr("no_such_value")));
  metrics->RemoveLabel("job", "a");
  EXPECT_EQ(metrics->Text(), "");
}

}  // namespace
}  // namespace tandem
