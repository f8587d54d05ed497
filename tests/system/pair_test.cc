// The two real daemons over a tiny model on disk: they share one copy of the weights and the reward rises.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "common/base/clock.h"
#include "common/base/hash.h"
#include "common/base/units.h"
#include "common/rpc/channel.h"
#include "nlohmann/json.hpp"
#include "tests/support/block_scaled_model.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/tiny_model.h"
#include "tests/system/daemon_pair.h"
#include "tests/system/system_jobs.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;

std::string TinyModelDirectory(const std::string& name, TinyModelOptions options = SystemModel()) {
  const std::string directory = ::testing::TempDir() + "/" + name;
  std::filesystem::remove_all(directory);
  const absl::StatusOr<std::string> path = WriteTinyModel(directory, options);
  EXPECT_TRUE(path.ok()) << path.status();
  return *path;
}

std::unique_ptr<DaemonPair> StartPairOver(const std::string& model, const std::string& name,
                                          std::vector<std::string> flags = {}) {
  DaemonPairOptions options;
  options.directory = ::testing::TempDir() + "/" + name;
  options.model = model;
  options.flags = std::move(flags);
  auto pair = std::make_unique<DaemonPair>(options);
  pair->Start(Half::kRollout);
  pair->Start(Half::kTrainer);
  EXPECT_TRUE(pair->WaitReady(Half::kRollout, absl::Seconds(60))) << pair->log(Half::kRollout);
  EXPECT_TRUE(pair->WaitReady(Half::kTrainer, absl::Seconds(60))) << pair->log(Half::kTrainer);
  return pair;
}

std::unique_ptr<DaemonPair> StartPair(const std::string& name, std::vector<std::string> flags = {}) {
  return StartPairOver(TinyModelDirectory(name + "_model"), name, std::move(flags));
}

struct Mapping {
  std::string name;
  std::string inode;
  std::uint64_t resident_bytes = 0;
  bool is_shared = false;
};
std::vector<Mapping> MappingsOf(pid_t pid) {
  std::vector<Mapping> mappings;
  std::ifstream file(absl::StrCat("/proc/", pid, "/smaps"));
  std::string line;
  while (std::getline(file, line)) {
    const std::vector<std::string> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
    if (words.size() >= 5 && words[0].find('-') != std::string::npos && words[0].back() != ':') {
      mappings.push_back({words.size() > 5 ? words[5] : "", words[4], 0, words[1][3] == 's'});
    } else if (words.size() >= 2 && words[0] == "Rss:" && !mappings.empty()) {
      std::uint64_t kib = 0;
      EXPECT_TRUE(absl::SimpleAtoi(words[1], &kib));
      mappings.back().resident_bytes += kib * kKiB;
    }
  }
  return mappings;
}
std::set<std::string> PoolInodes(pid_t pid) {
  std::set<std::string> inodes;
  for (const Mapping& mapping : MappingsOf(pid)) {
    if (mapping.name.rfind("/memfd:", 0) == 0 && mapping.is_shared) inodes.insert(mapping.inode);
  }
  return inodes;
}

TEST(PairTest, RewardRisesAndLedgersAddUpToOnePool) {
  auto pair = StartPair("rises");
  const auto job = pair->Submit(TinyJob(25, 1), TinyRows(32));
  ASSERT_TRUE(job.ok()) << job.status();
  const auto end = pair->WaitForEnd(*job, absl::Seconds(180));
  ASSERT_TRUE(end.ok()) << end.status() << pair->log(Half::kTrainer);
  ASSERT_EQ(end->state(), v1::JOB_STATE_SUCCEEDED) << end->error();

  v1::WatchRequest request;
  request.set_job(*job);
  auto context = ContextFor(absl::Seconds(10));
  auto reader = pair->Trainer()->Watch(context.get(), request);
  v1::WatchResponse response;
  std::vector<v1::EvaluationMetrics> evaluations;
  int steps = 0;
  while (reader->Read(&response)) {
    if (response.has_evaluation()) evaluations.push_back(response.evaluation());
    if (response.has_step()) ++steps;
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(steps, 25);
  ASSERT_EQ(evaluations.size(), 2u);
  EXPECT_GT(evaluations.back().reward(), evaluations.front().reward() + 0.3);

  // Same chunks in both processes, mapped shared: the weights exist once.
  // (Device memory shows in no map: tandem_pool_gpu_test weighs it by the driver's figures.)
  if (TestDevice() == Device::kCpu) { EXPECT_FALSE(PoolInodes(pair->pid(Half::kRollout)).empty()); }
  EXPECT_EQ(PoolInodes(pair->pid(Half::kRollout)), PoolInodes(pair->pid(Half::kTrainer)));
  std::uint64_t pool_bytes[2] = {0, 0};
  v1::RolloutStatus rollout;
  v1::TrainerStatus trainer;
  auto rollout_context = ContextFor(absl::Seconds(5));
  auto trainer_context = ContextFor(absl::Seconds(5));
  ASSERT_TRUE(pair->Rollout()->GetStatus(rollout_context.get(), {}, &rollout).ok());
  ASSERT_TRUE(pair->Trainer()->GetStatus(trainer_context.get(), {}, &trainer).ok());
  int weights_entries = 0;
  for (const auto& entry : rollout.ledger()) {
    if (entry.in_pool()) pool_bytes[0] += entry.bytes();
    if (entry.owner() == "weights") ++weights_entries;
  }
  for (const auto& entry : trainer.ledger()) {
    if (entry.in_pool()) pool_bytes[1] += entry.bytes();
  }
  EXPECT_EQ(weights_entries, 1);
  EXPECT_GT(pool_bytes[0], 0u);
  EXPECT_EQ(pool_bytes[0], pool_bytes[1]);
}

TEST(PairTest, GenerateStreamsEqualArraysAndTheAdapterOfAFinishedJobCanBeAsked) {
  auto pair = StartPair("generate");
  v1::SamplingParams sampling;
  sampling.set_temperature(1);
  sampling.set_max_tokens(20);
  sampling.set_seed(5);
  const GenerateResult first = GenerateText(pair->Rollout().get(), "hello", sampling, 4);
  ASSERT_TRUE(first.status.ok()) << first.status.error_message();
  std::set<std::vector<std::uint32_t>> distinct;
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_FALSE(first.ids[i].empty());
    EXPECT_EQ(first.ids[i].size(), first.rollout_logprobs[i].size());
    distinct.insert(first.ids[i]);
  }
  EXPECT_EQ(distinct.size(), 4u) << "each member draws with its own seed";
  const GenerateResult again = GenerateText(pair->Rollout().get(), "hello", sampling, 4);
  EXPECT_EQ(again.ids, first.ids) << "same seed, same completions";
}

// CASES C07 (a), and every other limit of a request: refused on arrival with the value and the limit.
TEST(PairTest, BadRequestsAndJobsAreRefusedAndBothDaemonsGoOnServing) {
  auto pair = StartPair("refusals");
  v1::SamplingParams sampling;
  sampling.set_temperature(-1);
  sampling.set_max_tokens(4);
  GenerateResult result = GenerateText(pair->Rollout().get(), "x", sampling, 1);
  EXPECT_EQ(result.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(result.status.error_message(), HasSubstr("temperature"));
  sampling.set_temperature(1);
  sampling.set_max_tokens(100000000);
  result = GenerateText(pair->Rollout().get(), "x", sampling, 1);
  EXPECT_FALSE(result.status.ok());
  EXPECT_THAT(result.status.error_message(), HasSubstr("100000000"));

  // Every fault is listed at once.
  const auto bad = pair->Submit(
      "name: \"No Spaces\" num_steps: 0 rollout { prompts_per_step: 0 group_size: 5000 sampling { temperature: 1 max_tokens: 4 } "
      "} "
      "rewards { weight: 1 ended_by_itself {} } adapter { rank: 9999 alpha: -1 }",
      TinyRows(4));
  ASSERT_FALSE(bad.ok());
  for (const char* field : {"name", "num_steps", "prompts_per_step", "group_size", "rank", "alpha"}) {
    EXPECT_THAT(std::string(bad.status().message()), HasSubstr(field));
  }
  const auto bad_rows = pair->Submit(TinyJob(1, 1), "{\"prompt\": \"a\"}\nnot json\n");
  ASSERT_FALSE(bad_rows.ok());
  EXPECT_THAT(std::string(bad_rows.status().message()), HasSubstr("line 2"));

  sampling.set_max_tokens(3);
  EXPECT_TRUE(GenerateText(pair->Rollout().get(), "x", sampling, 1).status.ok());
  const auto job = pair->Submit(TinyJob(1, 1), TinyRows(8));
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(pair->WaitForEnd(*job, absl::Seconds(60))->state(), v1::JOB_STATE_SUCCEEDED);
}

TEST(PairTest, PausedJobResumesToTheUndisturbedTrajectory) {
  std::string trajectories[2];
  for (int disturbed = 0; disturbed < 2; ++disturbed) {
    auto pair = StartPair(absl::StrCat("pause", disturbed));
    const auto job = pair->Submit(TinyJob(10, 3), TinyRows(16));
    ASSERT_TRUE(job.ok()) << job.status();
    if (disturbed == 1) {
      v1::PauseRequest pause;
      pause.set_job(*job);
      v1::JobStatus status;
      auto context = ContextFor(absl::Seconds(30));
      ASSERT_TRUE(pair->Trainer()->Pause(context.get(), pause, &status).ok());
      const MonotonicTime deadline = MonotonicTime::Now() + absl::Seconds(30);
      while (pair->GetJob(*job)->state() == v1::JOB_STATE_RUNNING && MonotonicTime::Now() < deadline)
        absl::SleepFor(absl::Milliseconds(20));
      EXPECT_EQ(pair->GetJob(*job)->state(), v1::JOB_STATE_PAUSED);
      v1::ResumeRequest resume;
      resume.set_job(*job);
      auto resume_context = ContextFor(absl::Seconds(30));
      ASSERT_TRUE(pair->Trainer()->Resume(resume_context.get(), resume, &status).ok());
    }
    const auto end = pair->WaitForEnd(*job, absl::Seconds(120));
    ASSERT_TRUE(end.ok()) << end.status();
    EXPECT_EQ(end->state(), v1::JOB_STATE_SUCCEEDED) << end->error();
    trajectories[disturbed] = pair->Trajectory(*job);
  }
  if (TestDevice() == Device::kCpu) {  // a GPU adds up in an order that differs from run to run
    EXPECT_EQ(trajectories[0], trajectories[1]);
  }
}

// Trained, exported, given to another job by the command: it starts where the first ended, and that is its reference.
TEST(PairTest, JobStartsFromAnExportedAdapterWhichIsThenTheReference) {
  auto pair = StartPair("start_adapter");
  const std::string directory = pair->directory() + "/client";
  std::filesystem::create_directories(directory);
  std::ofstream(directory + "/rows.jsonl") << TinyRows(16);
  const auto run = [&](const std::string& name, const std::string& fields) {
    std::ofstream(absl::StrCat(directory, "/", name, ".textproto"))
        << "name: \"" << name << "\" seed: 1 num_steps: 6 data { path: \"rows.jsonl\" } evaluation { path: \"rows.jsonl\" }"
        << R"(rollout { prompts_per_step: 4 group_size: 8 sampling { temperature: 1 max_tokens: 12 } }
              rewards { name: "ended" weight: 1 ended_by_itself {} } optimizer { learning_rate: 2e-2 })"
        << fields;
    const auto submitted = pair->Client(absl::StrCat("submit ", directory, "/", name, ".textproto"));
    EXPECT_TRUE(submitted.ok()) << submitted.status();
    const std::string job = nlohmann::json::parse(*submitted)["job"];
    const auto end = pair->WaitForEnd(job, absl::Seconds(120));
    EXPECT_TRUE(end.ok() && end->state() == v1::JOB_STATE_SUCCEEDED) << end.status() << end->error();
    return job;
  };
  const auto lines = [&](const std::string& job) {
    std::ifstream file(absl::StrCat(pair->data_dir(Half::kTrainer), "/jobs/", job, "/history.jsonl"));
    std::vector<nlohmann::json> rows;
    for (std::string line; std::getline(file, line);) {
      nlohmann::json row = nlohmann::json::parse(line);
      if (row.at("kind") != "data") rows.push_back(std::move(row));
    }
    return rows;
  };
  const std::string first = run("first", "adapter { rank: 4 alpha: 8 } loss { preset: LOSS_PRESET_DR_GRPO }");
  const auto exported = pair->Client(absl::StrCat("export ", first, " ", directory, "/adapter"));
  ASSERT_TRUE(exported.ok()) << exported.status();
  const std::string second =
      run("second",
          "adapter { rank: 4 alpha: 8 start_path: \"adapter\" } loss { preset: LOSS_PRESET_DR_GRPO beta: 0.05 } "
          "rewards { name: \"short\" weight: 1 length { max_tokens: 12 cache_tokens: 11 } }");

  const auto before = lines(first), after = lines(second);
  ASSERT_FALSE(before.empty());
  ASSERT_FALSE(after.empty());
  // The same adapter, prompts and seeds: the same reward on the held-out set.
  EXPECT_EQ(after.front().at("rewards/ended/mean"), before.back().at("rewards/ended/mean")) << after.front() << before.back();
  std::vector<double> kl;
  for (const auto& row : after) {
    if (row.contains("kl")) kl.push_back(row["kl"]);
  }
  ASSERT_EQ(kl.size(), 6u);
  EXPECT_NEAR(kl.front(), 0, 1e-6) << "before its first update the policy is its reference";
  EXPECT_GT(kl.back(), 1e-5);
}

// On a GPU both daemons take the checkpoint's codes and factors as the file has them; on the CPU, their products.
TEST(PairTest, ACheckpointInBlocksTrainsAsItIsStored) {
  const bool is_on_gpu = TestDevice() == Device::kCuda;
  TinyModelOptions model = SystemModel();
  model.hidden_size = 144;
  model.intermediate_size = 272;
  const testing::TemporaryDirectory directory;
  const testing::BlockScaledModel saved(directory.path(), model);
  auto pair = StartPairOver(directory.path(), "blocks",
                            is_on_gpu ? std::vector<std::string>{"--weights=fp8"} : std::vector<std::string>{});
  for (const Half half : {Half::kRollout, Half::kTrainer}) {
    EXPECT_THAT(pair->log(half), HasSubstr(is_on_gpu ? " weights=fp8_block " : " weights=fp32 "));
  }
  const auto job = pair->Submit(R"(name: "tiny" seed: 1 num_steps: 3
      rollout { prompts_per_step: 4 group_size: 8 sampling { temperature: 1 max_tokens: 12 } }
      rewards { name: "vowel" weight: 1 regular_expression { pattern: "[aeiou]" } } loss { preset: LOSS_PRESET_DR_GRPO }
      optimizer { learning_rate: 2e-2 } adapter { rank: 4 alpha: 8 })",
                                TinyRows(16));
  ASSERT_TRUE(job.ok()) << job.status();
  const auto end = pair->WaitForEnd(*job, absl::Seconds(120));
  ASSERT_TRUE(end.ok()) << end.status() << pair->log(Half::kTrainer) << pair->log(Half::kRollout);
  ASSERT_EQ(end->state(), v1::JOB_STATE_SUCCEEDED) << end->error();
  int num_steps = 0;
  std::ifstream history(absl::StrCat(pair->data_dir(Half::kTrainer), "/jobs/", *job, "/history.jsonl"));
  for (std::string line; std::getline(history, line);) {
    const nlohmann::json row = nlohmann::json::parse(line);
    if (row.at("kind") != "step") continue;
    ++num_steps;
    const double gap = row.at("sampling/sampling_logp_difference/mean");
    std::printf("step %d: the sides' log-probs differ by %.2e in the mean\n", num_steps, gap);
    EXPECT_LT(gap, is_on_gpu ? 0.03 : 1e-4);
  }
  EXPECT_EQ(num_steps, 3);
}

// Neither daemon touches the elastic range while the other has it: with strict leases it could not.
TEST(PairTest, JobRunsUnderStrictLeases) {
  auto pair = StartPair("strict", {"--strict_leases"});
  const auto job = pair->Submit(TinyJob(5, 1), TinyRows(16));
  ASSERT_TRUE(job.ok()) << job.status();
  const auto end = pair->WaitForEnd(*job, absl::Seconds(120));
  ASSERT_TRUE(end.ok()) << end.status() << pair->log(Half::kTrainer) << pair->log(Half::kRollout);
  EXPECT_EQ(end->state(), v1::JOB_STATE_SUCCEEDED) << end->error();
  EXPECT_TRUE(pair->IsAlive(Half::kRollout)) << pair->log(Half::kRollout);
  EXPECT_TRUE(pair->IsAlive(Half::kTrainer)) << pair->log(Half::kTrainer);
}

TEST(PairTest, SecondTransportRunsTheJobAndItsSurvivorEndsWithAClearError) {
  if (TestDevice() != Device::kCuda) GTEST_SKIP() << "device memory only";
  auto pair = StartPair("ipc", {"--pool_transport=cuda_ipc"});
  const auto job = pair->Submit(TinyJob(5, 1), TinyRows(16));
  ASSERT_TRUE(job.ok()) << job.status();
  const auto end = pair->WaitForEnd(*job, absl::Seconds(120));
  ASSERT_TRUE(end.ok()) << end.status() << pair->log(Half::kTrainer) << pair->log(Half::kRollout);
  EXPECT_EQ(end->state(), v1::JOB_STATE_SUCCEEDED) << end->error();
  const bool rollout_made = pair->log(Half::kRollout).find("made pool=") != std::string::npos;
  const Half maker = rollout_made ? Half::kRollout : Half::kTrainer;
  const Half survivor = rollout_made ? Half::kTrainer : Half::kRollout;
  pair->Kill(maker);
  const int status = pair->Wait(survivor, absl::Seconds(30));
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 3) << status << pair->log(survivor);
  EXPECT_THAT(pair->log(survivor), HasSubstr("the pool's memory died with"));
  for (const Half half : {maker, survivor}) pair->Start(half);
  for (const Half half : {maker, survivor}) EXPECT_TRUE(pair->WaitReady(half, absl::Seconds(60))) << pair->log(half);
}

std::string JobOf(std::uint64_t max_tokens, int rank) {
  return absl::StrCat(R"(name: "tiny" seed: 1 num_steps: 3
    rollout { prompts_per_step: 4 group_size: 8 sampling { temperature: 1 max_tokens: )",
                      max_tokens, R"( } }
    rewards { name: "ended" weight: 1 ended_by_itself {} } loss { preset: LOSS_PRESET_DR_GRPO }
    optimizer { learning_rate: 2e-2 } adapter { rank: )",
                      rank, " alpha: 8 }");
}

// Of a job whose rows are content already.
v1::PlanResponse PlanOf(DaemonPair* pair, const std::string& job_text, const std::string& rows) {
  v1::PlanRequest request;
  request.set_job_text(absl::StrCat(job_text, " data { content: \"", Sha256Hex(rows), "\" }"));
  v1::PlanResponse response;
  auto context = ContextFor(absl::Seconds(10));
  const grpc::Status status = pair->Trainer()->Plan(context.get(), request, &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return response;
}

void ExpectRuns(DaemonPair* pair, const std::string& job_text, const std::string& rows) {
  const auto job = pair->Submit(job_text, rows);
  ASSERT_TRUE(job.ok()) << job.status();
  const auto end = pair->WaitForEnd(*job, absl::Seconds(120));
  ASSERT_TRUE(end.ok()) << end.status() << pair->log(Half::kTrainer) << pair->log(Half::kRollout);
  EXPECT_EQ(end->state(), v1::JOB_STATE_SUCCEEDED) << end->error();
}

// The plan knows the pool by owner, and the pool that it asks for runs the job.
TEST(PairTest, JobRunsInThePoolThatItsPlanAsksFor) {
  const std::string rows = TinyRows(16);
  v1::MemoryPlan plan;
  {
    auto pair = StartPair("planned");
    ExpectRuns(pair.get(), JobOf(12, 4), rows);
    plan = PlanOf(pair.get(), JobOf(12, 4), rows).memory();
    EXPECT_EQ(plan.live_sequences(), 32u);
    std::uint64_t generation = 0, training = 0, pool_bytes = 0;
    for (const v1::PlannedBytes& owned : plan.owners()) {
      if (owned.place() != v1::MEMORY_PLACE_POOL) continue;
      generation += owned.generation_bytes();
      training += owned.training_bytes();
    }
    v1::TrainerStatus status;
    auto context = ContextFor(absl::Seconds(5));
    ASSERT_TRUE(pair->Trainer()->GetStatus(context.get(), {}, &status).ok());
    for (const auto& entry : status.ledger()) pool_bytes += entry.in_pool() ? entry.bytes() : 0;
    EXPECT_EQ(plan.pool_bytes(), pool_bytes);
    EXPECT_EQ(generation, pool_bytes);
    EXPECT_EQ(training, pool_bytes);
  }
  auto pair = StartPair("asked", {absl::StrCat("--pool_bytes=", plan.asked_pool_bytes() / kMiB, "MiB"),
                                  absl::StrCat("--rollout_standing_bytes=", plan.asked_rollout_standing_bytes() / kMiB, "MiB"),
                                  absl::StrCat("--trainer_standing_bytes=", plan.asked_trainer_standing_bytes() / kMiB, "MiB")});
  ExpectRuns(pair.get(), JobOf(12, 4), rows);
  EXPECT_LE(PlanOf(pair.get(), JobOf(12, 4), rows).memory().pool_bytes(), plan.asked_pool_bytes());
  const auto refused = pair->Submit(JobOf(12, 1024), rows);
  EXPECT_TRUE(absl::IsResourceExhausted(refused.status())) << refused.status();
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("adapter.rank: 1024; must be small enough"));
}

// CASES C39: in a pool of few MiB, the longest context that fits runs and one of a tenth more is refused, naming it; the pair
// serves on.
TEST(PairTest, LargestContextThatFitsRunsAndATenthMoreIsRefused) {
  if (TestDevice() == Device::kCuda) GTEST_SKIP() << "a GPU's standing memory alone is larger than this pool";
  const std::string rows = TinyRows(16);
  auto pair = StartPair(
      "tight", {"--pool_bytes=18MiB", "--chunk_bytes=2MiB", "--rollout_standing_bytes=2MiB", "--trainer_standing_bytes=8MiB"});
  ExpectRuns(pair.get(), JobOf(4, 4), rows);
  const v1::PlanResponse planned = PlanOf(pair.get(), JobOf(1000, 4), rows);
  const std::uint64_t largest = planned.memory().largest_context_tokens();
  const std::uint64_t prompt = planned.memory().context_tokens() - 1000;
  EXPECT_EQ(planned.faults_size(), 1);
  ASSERT_GT(largest, prompt);
  EXPECT_EQ(planned.memory().walls(0).name(), "activations");
  ExpectRuns(pair.get(), JobOf(largest - prompt, 4), rows);
  const auto refused = pair->Submit(JobOf((largest + largest / 10) - prompt + 1, 4), rows);
  EXPECT_TRUE(absl::IsResourceExhausted(refused.status())) << refused.status();
  EXPECT_THAT(std::string(refused.status().message()),
              HasSubstr(absl::StrCat("the largest context that fits is ", largest, " tokens")));
  ExpectRuns(pair.get(), JobOf(4, 4), rows);
}

// CASES C46: a daemon refuses a broken model by name and ends with its own exit code.
TEST(PairTest, MalformedModelIsRefusedByNameAtStart) {
  DaemonPairOptions options;
  options.directory = ::testing::TempDir() + "/malformed";
  options.model = TinyModelDirectory("malformed_model");
  std::filesystem::resize_file(options.model + "/model.safetensors", 1000);
  DaemonPair pair(options);
  pair.Start(Half::kRollout);
  const int status = pair.Wait(Half::kRollout, absl::Seconds(30));
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 2) << status;
  EXPECT_THAT(pair.log(Half::kRollout), HasSubstr("model.safetensors"));
}

}  // namespace
}  // namespace tandem
