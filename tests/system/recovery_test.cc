// Either half, or both, may die at any moment: the other lives on, the dead one comes back attached without reading the model,
// the job ends, and its trajectory is that of the undisturbed run, bit for bit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <random>

#include "common/base/clock.h"
#include "common/base/units.h"
#include "common/rpc/channel.h"
#include "tests/support/tiny_model.h"
#include "tests/system/daemon_pair.h"
#include "tests/system/system_jobs.h"

namespace tandem {
namespace {

// Each test kills so often; five times as often, and in a job as much longer, with TANDEM_LONG_TESTS=1.
const int kKills = IsLongTest() ? 100 : 20;
const int kSteps = 20 * kKills;
constexpr int kSeed = 11;
constexpr absl::Duration kAttachLimit = absl::Seconds(5);
constexpr Half kBoth[] = {Half::kRollout, Half::kTrainer};

std::string ModelOf(const std::string& name) { return ::testing::TempDir() + "/" + name + "_model"; }

std::unique_ptr<DaemonPair> StartPair(const std::string& name) {
  DaemonPairOptions options;
  options.directory = ::testing::TempDir() + "/" + name;
  options.model = ModelOf(name);
  std::filesystem::remove_all(options.model);
  EXPECT_TRUE(WriteTinyModel(options.model, SystemModel()).ok());
  auto pair = std::make_unique<DaemonPair>(options);
  for (Half half : kBoth) pair->Start(half);
  for (Half half : kBoth) EXPECT_TRUE(pair->WaitReady(half, absl::Seconds(60))) << pair->log(half);
  return pair;
}

std::string SubmitTiny(DaemonPair* pair) {
  const auto job = pair->Submit(TinyJob(kSteps, kSeed, 3), TinyRows(24));
  EXPECT_TRUE(job.ok()) << job.status();
  return job.value_or("");
}

void ExpectSucceeds(DaemonPair* pair, const std::string& job) {
  const auto end = pair->WaitForEnd(job, IsLongTest() ? absl::Minutes(20) : absl::Minutes(4));
  ASSERT_TRUE(end.ok()) << end.status() << "\n" << pair->log(Half::kTrainer) << pair->log(Half::kRollout);
  EXPECT_EQ(end->state(), v1::JOB_STATE_SUCCEEDED) << end->error();
}

struct Run {
  std::string trajectory;
  double reward = 0;  // mean of the last steps
};
constexpr std::size_t kLastSteps = 50;

Run RunOf(DaemonPair* pair, const std::string& job) { return {pair->Trajectory(job), pair->MeanReward(job, kLastSteps)}; }

const Run& UndisturbedRun() {
  static const Run run = [] {
    auto pair = StartPair("undisturbed");
    const std::string job = SubmitTiny(pair.get());
    ExpectSucceeds(pair.get(), job);
    return RunOf(pair.get(), job);
  }();
  return run;
}

// On the CPU bit for bit. A GPU adds up in an order that differs from run to run: there every step is counted once, and the
// reward is the same within noise.
void ExpectUndisturbed(DaemonPair* pair, const std::string& job) {
  const Run run = RunOf(pair, job);
  if (TestDevice() == Device::kCpu) {
    EXPECT_EQ(run.trajectory, UndisturbedRun().trajectory);
    return;
  }
  std::printf("bit-equal to the undisturbed run: %s; reward %.4f, undisturbed %.4f\n",
              run.trajectory == UndisturbedRun().trajectory ? "yes" : "no", run.reward, UndisturbedRun().reward);
  const auto num_lines = [](const std::string& text) { return std::count(text.begin(), text.end(), '\n'); };
  EXPECT_EQ(num_lines(run.trajectory), num_lines(UndisturbedRun().trajectory));
  EXPECT_NEAR(run.reward, UndisturbedRun().reward, 0.1);
}

bool IsUnfinished(DaemonPair* pair, const std::string& job) {
  const auto status = pair->GetJob(job);
  return !status.ok() || status->state() == v1::JOB_STATE_RUNNING || status->state() == v1::JOB_STATE_QUEUED;
}

// Kills what `choose` names at `kKills` random moments; each time it must be attached again within the limit, with no model to
// read.
template <typename Choose>
void ExpectSurvives(const std::string& name, unsigned seed, Choose choose) {
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  auto pair = StartPair(name);
  std::filesystem::remove_all(ModelOf(name) + "_hidden");
  std::filesystem::rename(ModelOf(name), ModelOf(name) + "_hidden");
  const std::string job = SubmitTiny(pair.get());
  std::mt19937 random(seed);
  absl::Duration slowest;
  int kills = 0;
  for (; kills < kKills && IsUnfinished(pair.get(), job); ++kills) {
    absl::SleepFor(absl::Milliseconds(std::uniform_int_distribution<int>(0, 200)(random)));
    const Half half = choose(random);
    pair->Kill(half);
    const MonotonicTime begin = MonotonicTime::Now();
    pair->Start(half);
    ASSERT_TRUE(pair->WaitReady(half, kAttachLimit)) << "kill " << kills << "\n" << pair->log(half);
    slowest = std::max(slowest, MonotonicTime::Now() - begin);
  }
  EXPECT_EQ(kills, kKills) << "the job ended too early to be disturbed";
  std::printf("%d kills, slowest return: %s\n", kills, absl::FormatDuration(slowest).c_str());
  ExpectSucceeds(pair.get(), job);
  ExpectUndisturbed(pair.get(), job);
}

TEST(RecoveryTest, EqualSeedsGiveEqualTrajectories) {
  auto pair = StartPair("twin");
  const std::string job = SubmitTiny(pair.get());
  ExpectSucceeds(pair.get(), job);
  ExpectUndisturbed(pair.get(), job);
  EXPECT_NE(UndisturbedRun().trajectory.find("reward"), std::string::npos);
}

// CASES C41
TEST(RecoveryTest, RolloutServerKilledAtRandomMomentsLeavesTheTrajectoryAlone) {
  ExpectSurvives("kill_rollout", 1, [](std::mt19937&) { return Half::kRollout; });
}

// CASES C41, C45
TEST(RecoveryTest, TrainerServerKilledAtRandomMomentsLeavesTheTrajectoryAlone) {
  ExpectSurvives("kill_trainer", 2, [](std::mt19937&) { return Half::kTrainer; });
}

TEST(RecoveryTest, EitherKilledInTurnLeavesTheTrajectoryAlone) {
  ExpectSurvives("kill_either", 3, [](std::mt19937& random) { return random() % 2 == 0 ? Half::kRollout : Half::kTrainer; });
}

// CASES C45. Nothing of the pool is left; the checkpoint is.
TEST(RecoveryTest, BothKilledResumesFromTheCheckpoint) {
  auto pair = StartPair("kill_both");
  const std::string job = SubmitTiny(pair.get());
  for (int round = 0; round < 3 && IsUnfinished(pair.get(), job); ++round) {
    absl::SleepFor(absl::Milliseconds(900 + 400 * round));
    for (Half half : kBoth) pair->Signal(half, SIGKILL);
    for (Half half : kBoth) pair->Wait(half, absl::Seconds(10));
    for (Half half : kBoth) pair->Start(half);
    for (Half half : kBoth) ASSERT_TRUE(pair->WaitReady(half, absl::Seconds(30))) << pair->log(half);
  }
  ExpectSucceeds(pair.get(), job);
  ExpectUndisturbed(pair.get(), job);
}

std::uint64_t NewestCheckpoint(DaemonPair* pair, const std::string& job) {
  std::uint64_t newest = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(pair->data_dir(Half::kTrainer) + "/jobs/" + job + "/checkpoints")) {
    unsigned long long step = 0;
    if (std::sscanf(entry.path().filename().c_str(), "step-%llu", &step) == 1) newest = std::max<std::uint64_t>(newest, step);
  }
  return newest;
}

// As an upgrade of one daemon after the other does it. No checkpoint is due in between: all but the signal's are of steps 0 and
// kSteps.
TEST(RecoveryTest, SigtermLosesNoStepAndTheOtherHalfLivesOn) {
  auto pair = StartPair("sigterm");
  const auto job = pair->Submit(TinyJob(kSteps, kSeed, kSteps), TinyRows(24));
  ASSERT_TRUE(job.ok()) << job.status();
  std::uint64_t step = 0;
  for (const Half half : {Half::kTrainer, Half::kRollout, Half::kTrainer}) {
    const std::uint64_t wanted = step + 30;
    const MonotonicTime deadline = MonotonicTime::Now() + absl::Seconds(60);
    for (step = 0; step < wanted && MonotonicTime::Now() < deadline; absl::SleepFor(absl::Milliseconds(10))) {
      const auto status = pair->GetJob(*job);
      if (status.ok()) step = status->step();
    }
    ASSERT_GE(step, wanted);
    ASSERT_LT(step + 10, static_cast<std::uint64_t>(kSteps)) << "the job ended too early to be disturbed";
    pair->Signal(half, SIGTERM);
    EXPECT_EQ(pair->Wait(half, absl::Seconds(10)), 0) << pair->log(half);
    EXPECT_TRUE(pair->IsAlive(half == Half::kTrainer ? Half::kRollout : Half::kTrainer));
    if (half == Half::kTrainer) { EXPECT_GE(NewestCheckpoint(pair.get(), *job), step); }
    pair->Start(half);
    ASSERT_TRUE(pair->WaitReady(half, kAttachLimit)) << pair->log(half);
  }
  ExpectSucceeds(pair.get(), *job);
  ExpectUndisturbed(pair.get(), *job);
}

// A job with every state that a recipe may have: groups drawn again, mini-batches, a reference that moves, evaluations of their
// own sampling that are kept count of.
std::string SubmitRecipe(DaemonPair* pair) {
  const auto job = pair->Submit(R"(name: "recipe" seed: 7 num_steps: 150
    rollout { prompts_per_step: 4 group_size: 4 sampling { temperature: 1 max_tokens: 12 }
      dynamic_sampling { max_rounds: 3 reward: "ended" } }
    rewards { name: "ended" weight: 1 ended_by_itself {} }
    rewards { name: "short" weight: 0.1 length_target { target_tokens: 4 width_tokens: 8 } }
    loss { preset: LOSS_PRESET_DAPO beta: 0.02 kl_bias_correction: true updates_per_rollout: 2 mini_batches_per_rollout: 2
      reference_sync { interval_steps: 3 alpha: 0.5 } }
    adapter { rank: 4 alpha: 8 } optimizer { learning_rate: 1e-2 } checkpoint { interval_steps: 4 keep: 1 })",
                                TinyRows(24),
                                R"(num_prompts: 8 interval_steps: 5 samples_per_prompt: 3 metric: "pass_at_3"
                                   sampling { temperature: 0.8 top_p: 0.9 max_tokens: 10 })");
  EXPECT_TRUE(job.ok()) << job.status();
  return job.value_or("");
}

// CASES C45
TEST(RecoveryTest, EveryRecipesStateSurvivesDeath) {
  std::string undisturbed;
  {
    auto pair = StartPair("recipe_twin");
    const std::string job = SubmitRecipe(pair.get());
    ExpectSucceeds(pair.get(), job);
    undisturbed = pair->Trajectory(job);
    EXPECT_EQ(pair->log(Half::kTrainer).find("no metric is declared"), std::string::npos) << pair->log(Half::kTrainer);
  }
  EXPECT_NE(undisturbed.find("\"pass_at_3\""), std::string::npos);
  EXPECT_NE(undisturbed.find("\"dynamic_sampling/groups_replaced\""), std::string::npos);
  auto pair = StartPair("recipe_killed");
  const std::string job = SubmitRecipe(pair.get());
  std::mt19937 random(4);
  int kills = 0;
  for (; kills < 8 && IsUnfinished(pair.get(), job); ++kills) {
    absl::SleepFor(absl::Milliseconds(std::uniform_int_distribution<int>(0, 300)(random)));
    const Half half = kBoth[kills % 2];
    pair->Kill(half);
    pair->Start(half);
    ASSERT_TRUE(pair->WaitReady(half, absl::Seconds(30))) << pair->log(half);
  }
  EXPECT_EQ(kills, 8) << "the job ended too early to be disturbed";
  ExpectSucceeds(pair.get(), job);
  const std::string trajectory = pair->Trajectory(job);
  if (TestDevice() == Device::kCpu) { EXPECT_EQ(trajectory, undisturbed); }
  EXPECT_EQ(std::count(trajectory.begin(), trajectory.end(), '\n'), std::count(undisturbed.begin(), undisturbed.end(), '\n'));
}

// CASES C44. A stopped peer holds things up, within a bound; nothing is lost when it goes on.
TEST(RecoveryTest, StoppedPeerIsWaitedForAndTheTrajectoryIsUnchanged) {
  auto pair = StartPair("stopped");
  const std::string job = SubmitTiny(pair.get());
  for (int round = 0; round < 4 && IsUnfinished(pair.get(), job); ++round) {
    absl::SleepFor(absl::Milliseconds(350));
    pair->Signal(Half::kRollout, SIGSTOP);
    absl::SleepFor(absl::Milliseconds(700));
    EXPECT_TRUE(pair->GetJob(job).ok()) << "the trainer answers while its peer is stopped";
    pair->Signal(Half::kRollout, SIGCONT);
  }
  ExpectSucceeds(pair.get(), job);
  ExpectUndisturbed(pair.get(), job);
}

std::uint64_t PoolBytes(DaemonPair* pair) {
  v1::TrainerStatus status;
  auto context = ContextFor(absl::Seconds(5));
  EXPECT_TRUE(pair->Trainer()->GetStatus(context.get(), {}, &status).ok());
  std::uint64_t bytes = 0;
  for (const auto& entry : status.ledger()) bytes += entry.in_pool() ? entry.bytes() : 0;
  return bytes;
}

// Of the whole card; 0 on the CPU.
std::uint64_t DeviceBytes() {
  const auto use = DriverMemory(TestDevice());
  return use.ok() ? use->total_bytes - use->free_bytes : 0;
}

// CASES C36, C40: a hundred phase switches and weight versions leave no descriptor, no memory and no change of the ledger behind.
TEST(RecoveryTest, DescriptorsAndMemoryAreFlatOverAHundredSwitches) {
  constexpr std::uint32_t kWarmSteps = 40;
  auto pair = StartPair("flat");
  const std::string job = SubmitTiny(pair.get());
  const MonotonicTime deadline = MonotonicTime::Now() + absl::Seconds(120);
  while (MonotonicTime::Now() < deadline) {
    const auto status = pair->GetJob(job);
    if (status.ok() && status->step() >= kWarmSteps) break;
    absl::SleepFor(absl::Milliseconds(5));
  }
  std::uint64_t descriptors[2];
  std::uint64_t anonymous_bytes[2];
  const std::uint64_t pool_bytes = PoolBytes(pair.get());
  const std::uint64_t device_bytes = DeviceBytes();
  for (std::size_t i = 0; i < 2; ++i) {
    descriptors[i] = NumDescriptors(pair->pid(kBoth[i]));
    anonymous_bytes[i] = AnonymousBytes(pair->pid(kBoth[i]));
  }
  ASSERT_LT(pair->GetJob(job)->step() + 100, static_cast<std::uint32_t>(kSteps)) << "too late to see a hundred switches";
  ExpectSucceeds(pair.get(), job);
  EXPECT_EQ(PoolBytes(pair.get()), pool_bytes);
  if (TestDevice() == Device::kCuda) {
    const std::uint64_t now_bytes = DeviceBytes();
    std::printf("device memory in use: %s, after the job %s\n", FormatBytes(device_bytes).c_str(),
                FormatBytes(now_bytes).c_str());
    EXPECT_LT(std::max(now_bytes, device_bytes) - std::min(now_bytes, device_bytes), 32 * kMiB);
  }
  for (std::size_t i = 0; i < 2; ++i) {
    // A call under way may hold a socket or two; under 100 KiB a cycle is allocator slack, not a leak of what a step holds.
    EXPECT_LE(NumDescriptors(pair->pid(kBoth[i])), descriptors[i] + 3);
    EXPECT_LE(AnonymousBytes(pair->pid(kBoth[i])),
              anonymous_bytes[i] + 90 * kKiB * (static_cast<std::uint32_t>(kSteps) - kWarmSteps));
  }
}

}  // namespace
}  // namespace tandem
