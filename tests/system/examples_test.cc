// The examples as a user runs them, with a tiny model in place of theirs, and the commands that look at what came of it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/str_split.h"
#include "nlohmann/json.hpp"
#include "tests/support/tiny_model.h"
#include "tests/system/daemon_pair.h"
#include "tests/system/system_jobs.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::json;
namespace fs = std::filesystem;

// What makes an example short, as the client's flag.
std::string Short(const std::string& more = "seed: 0") {
  return absl::StrCat(
      "--set='num_steps: 2,rollout { prompts_per_step: 2 group_size: 4 sampling { max_tokens: 24 } },"
      "optimizer { learning_rate: 1e-2 warmup_steps: 0 },checkpoint { interval_steps: 1 },evaluation { num_prompts: 4 },",
      more, "' ");
}

std::vector<Json> Lines(const std::string& text) {
  std::vector<Json> lines;
  for (const auto line : absl::StrSplit(text, '\n', absl::SkipEmpty())) lines.push_back(Json::parse(std::string(line)));
  return lines;
}

std::vector<Json> Of(const absl::StatusOr<std::string>& output) {
  EXPECT_TRUE(output.ok()) << output.status();
  return output.ok() ? Lines(*output) : std::vector<Json>();
}

class ExamplesTest : public ::testing::Test {
 protected:
  static std::unique_ptr<DaemonPair> StartPair(const std::string& name, const std::string& model) {
    DaemonPairOptions options;
    options.directory = ::testing::TempDir() + "/examples_" + name;
    options.model = model;
    auto pair = std::make_unique<DaemonPair>(options);
    for (Half half : {Half::kRollout, Half::kTrainer}) pair->Start(half);
    for (Half half : {Half::kRollout, Half::kTrainer}) EXPECT_TRUE(pair->WaitReady(half, absl::Seconds(60))) << pair->log(half);
    return pair;
  }
  static void SetUpTestSuite() {
    TinyModelOptions options = SystemModel();
    options.max_positions = 4096;
    options.dtype = "BF16";
    const std::string model = ::testing::TempDir() + "/examples_model";
    fs::remove_all(model);
    ASSERT_TRUE(WriteTinyModel(model, options).ok());
    pair_ = StartPair("pair", model).release();
  }
  static void TearDownTestSuite() { delete pair_; }

  // Submits the job of a folder and waits for its end. Empty after a failure.
  static std::string RunExample(const std::string& folder, const std::string& more = "seed: 0") {
    const auto submitted = pair_->Client(absl::StrCat(Short(more), "submit '", folder, "/job.textproto'"));
    EXPECT_TRUE(submitted.ok()) << submitted.status();
    if (!submitted.ok()) return "";
    const std::string job = Lines(*submitted)[0]["job"];
    const auto ended = pair_->WaitForEnd(job, absl::Seconds(120));
    EXPECT_TRUE(ended.ok()) << ended.status();
    if (ended.ok()) { EXPECT_EQ(ended->state(), v1::JOB_STATE_SUCCEEDED) << ended->error(); }
    return job;
  }
  static std::string Example(const std::string& name) { return TANDEM_EXAMPLES_DIR "/" + name; }

  static DaemonPair* pair_;
};
DaemonPair* ExamplesTest::pair_ = nullptr;

// Rows as they are published, their own field names and answers.
TEST_F(ExamplesTest, Gsm8k) {
  const std::string folder = ::testing::TempDir() + "/examples_gsm8k";
  fs::remove_all(folder);
  fs::create_directories(folder);
  fs::copy(Example("gsm8k/job.textproto"), folder + "/job.textproto");
  std::ifstream golden(TANDEM_GOLDEN_DIR "/gsm8k/answers.jsonl");
  std::ofstream train(folder + "/train.jsonl"), test(folder + "/test.jsonl");
  int num_rows = 0;
  for (std::string line; std::getline(golden, line); ++num_rows) {
    const Json row = {{"question", absl::StrCat("How many is it in all, in case ", num_rows, "?")},
                      {"answer", Json::parse(line)["answer"]}};
    train << row.dump() << "\n";
    test << row.dump() << "\n";
  }
  train << Json({{"question", std::string(2000, 'q')}, {"answer", "#### 1"}}).dump() << "\n";
  train.close();
  test.close();
  const auto plan = Of(pair_->Client(absl::StrCat(Short(), "plan '", folder, "/job.textproto'")));
  ASSERT_EQ(plan.size(), 1u);
  EXPECT_EQ(plan[0]["data"]["trained"], absl::StrCat(num_rows));
  EXPECT_EQ(plan[0]["data"]["too_long"], "1");
  EXPECT_FALSE(RunExample(folder).empty());
}

TEST_F(ExamplesTest, Email) { EXPECT_FALSE(RunExample(Example("email")).empty()); }

TEST_F(ExamplesTest, Code) {
  const auto plan = pair_->Client(absl::StrCat(Short(), "plan '", Example("code"), "/job.textproto'"));
  if (!plan.ok() && plan.status().message().find("bubblewrap") != std::string::npos) GTEST_SKIP() << plan.status().message();
  EXPECT_FALSE(RunExample(Example("code")).empty());
}

// CASES C31 through both daemons: the trainer's log-probs of every turn's tokens are those with which they were drawn.
TEST_F(ExamplesTest, ConversationsAreTrainedOnTheTurnsThatTheModelWrote) {
  const std::string folder = ::testing::TempDir() + "/examples_conversation";
  fs::remove_all(folder);
  fs::create_directories(folder);
  std::ofstream(folder + "/train.jsonl")
      << R"({"prompt": [{"role": "user", "content": "7 + 9?"}, {"role": "assistant"}, {"role": "tool", "content": "16<|im_end|>"},)"
         R"( {"role": "assistant", "content": null}, {"role": "user", "content": "sure?"}]})"
         "\n"
      << R"({"prompt": [{"role": "user", "content": "one turn"}]})"
         "\n";
  std::ofstream(folder + "/job.textproto") << R"(
    name: "talk" num_steps: 2 data { path: "train.jsonl" }
    rollout { prompts_per_step: 2 group_size: 16 sampling { temperature: 1 max_tokens: 400 } }
    rewards { name: "latin" weight: 1 script_share { scripts: "Latin" } }
    adapter { rank: 4 alpha: 8 } optimizer { learning_rate: 1e-3 })";
  const auto submitted = Of(pair_->Client("submit '" + folder + "/job.textproto'"));
  ASSERT_FALSE(submitted.empty());
  const std::string job = submitted[0]["job"];
  const auto ended = pair_->WaitForEnd(job, absl::Seconds(200));
  ASSERT_TRUE(ended.ok()) << ended.status();
  ASSERT_EQ(ended->state(), v1::JOB_STATE_SUCCEEDED) << ended->error();
  int num_talks = 0;
  for (const Json& record : Of(pair_->Client("--step=1 --last_step=2 completions " + job))) {
    const std::string text = record["completion"];
    if (text.find("<|im_start|>tool\n16<|im_end|><|im_end|>\n<|im_start|>assistant\n") != std::string::npos) ++num_talks;
  }
  EXPECT_GT(num_talks, 0);
  for (const Json& event : Of(pair_->Client("history " + job))) {
    if (event["kind"] != "step") continue;
    // A shifted mask would show as whole nats.
    EXPECT_LT(event["sampling/sampling_logp_difference/max"].get<double>(), TestDevice() == Device::kCpu ? 2e-4 : 0.1) << event;
    EXPECT_EQ(event["conversations_split"], 0);
  }
}

TEST_F(ExamplesTest, FormatAndTheCommandsThatLookAtJobs) {
  const std::string job = RunExample(Example("format"));
  ASSERT_FALSE(job.empty());

  const std::vector<Json> history = Of(pair_->Client("history " + job));
  ASSERT_GE(history.size(), 5u);
  EXPECT_EQ(history[0]["kind"], "data");
  EXPECT_EQ(history[0]["rows"], 96);
  EXPECT_EQ(history[0]["trained"], 72);
  EXPECT_EQ(history[0]["held_out"], 24);
  EXPECT_EQ(history[0]["evaluated"], 4);
  EXPECT_EQ(history[1]["kind"], "evaluation");
  EXPECT_EQ(history[2]["kind"], "step");

  // Filters are the server's.
  const std::vector<Json> newest = Of(pair_->Client("completions " + job));
  ASSERT_EQ(newest.size(), 8u);
  EXPECT_EQ(newest[0]["step"], 2);
  EXPECT_EQ(Of(pair_->Client("--step=1 --last_step=2 completions " + job)).size(), 16u);
  EXPECT_EQ(Of(pair_->Client("--step=1 --limit=3 completions " + job)).size(), 3u);
  const double bound = newest[3]["reward"];
  std::size_t num_expected = 0;
  for (const Json& record : newest) num_expected += record["reward"].get<double>() >= bound ? 1 : 0;
  EXPECT_EQ(Of(pair_->Client(absl::StrFormat("--min_reward=%.17g completions %s", bound, job))).size(), num_expected);
  for (const Json& record :
       Of(pair_->Client("--finish_reason=length --function=form --max_reward=0 --min_length=24 --group=1 completions " + job))) {
    EXPECT_EQ(record["finish_reason"], "FINISH_REASON_LENGTH");
    EXPECT_EQ(record["completion_tokens"], 24);
    EXPECT_EQ(record["group_index"], 1);
  }
  EXPECT_THAT(std::string(pair_->Client("--function=nothing completions " + job).status().message()),
              HasSubstr("must be one of the job's rewards: tags, form, integer, correct"));
  EXPECT_THAT(std::string(pair_->Client("--step=9 completions " + job).status().message()),
              HasSubstr("no completions of step 9; steps 1 to 2 have some"));

  // With a reward that a model of random weights earns too, so that there is something to learn.
  const std::string other =
      RunExample(Example("format"), "seed: 5,rewards { name: \"latin\" weight: 1 script_share { scripts: \"Latin\" } }");
  ASSERT_FALSE(other.empty());
  EXPECT_TRUE(Of(pair_->Client("history " + other))[2]["entropy"].is_number());
  std::vector<std::string> settings;
  for (const Json& row : Of(pair_->Client("compare " + job + " " + other))) {
    if (row.contains("setting")) settings.push_back(row["setting"]);
  }
  EXPECT_THAT(settings, ::testing::ElementsAre("rewards[4]", "rewards[4].name", "rewards[4].script_share",
                                               "rewards[4].script_share.scripts[0]", "rewards[4].weight", "seed"));

  const std::string png = ::testing::TempDir() + "/examples.png", runs = ::testing::TempDir() + "/examples_runs";
  fs::remove(png);
  fs::remove_all(runs);
  EXPECT_TRUE(pair_->Client("--png='" + png + "' plot " + job).ok());
  EXPECT_TRUE(fs::exists(png));
  EXPECT_TRUE(pair_->Client("plot " + job).ok());
  EXPECT_TRUE(pair_->Client("--tensorboard='" + runs + "' watch " + job).ok());
  EXPECT_FALSE(fs::is_empty(runs + "/" + job));

  // The model taken away whole is the model as trained.
  const std::string merged = ::testing::TempDir() + "/examples_whole";
  fs::remove_all(merged);
  const auto exported = pair_->Client("--merged export " + other + " '" + merged + "'");
  ASSERT_TRUE(exported.ok()) << exported.status();
  v1::SamplingParams greedy;
  greedy.set_max_tokens(1);
  const auto raw_logprob = [&](DaemonPair* pair, const std::string& of_job) {
    const GenerateResult result = GenerateText(pair->Rollout().get(), "how many?", greedy, 1, of_job);
    EXPECT_TRUE(result.status.ok()) << result.status.error_message();
    for (const v1::GenerateResponse& response : result.responses) {
      if (response.tokens().raw_logprobs_size() > 0) return response.tokens().raw_logprobs(0);
    }
    return 0.f;
  };
  const float base = raw_logprob(pair_, ""), trained = raw_logprob(pair_, other);
  const auto merged_pair = StartPair("merged", merged);
  const float whole = raw_logprob(merged_pair.get(), "");
  EXPECT_NE(base, trained);
  EXPECT_NEAR(whole, trained, 0.02);
}

}  // namespace
}  // namespace tandem
