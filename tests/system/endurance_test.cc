// The pair over a long time and under more than it can do at once: what lies outside the pool is frozen after warm-up, and a
// flood of requests is refused or finished, never the end of a daemon.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <thread>

#include "common/base/clock.h"
#include "common/base/units.h"
#include "common/rpc/channel.h"
#include "tests/support/tiny_model.h"
#include "tests/system/daemon_pair.h"
#include "tests/system/system_jobs.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;

constexpr Half kBoth[] = {Half::kRollout, Half::kTrainer};
constexpr std::uint64_t kFrozenBytes = 32 * kMiB;

std::unique_ptr<DaemonPair> StartPair(const std::string& name, const std::string& model, const std::vector<std::string>& flags) {
  DaemonPairOptions options;
  options.directory = ::testing::TempDir() + "/" + name;
  options.model = model;
  options.flags = flags;
  auto pair = std::make_unique<DaemonPair>(options);
  for (Half half : kBoth) pair->Start(half);
  for (Half half : kBoth) EXPECT_TRUE(pair->WaitReady(half, absl::Seconds(90))) << pair->log(half);
  return pair;
}

std::string TinyModelOf(const std::string& name, const TinyModelOptions& model) {
  const std::string directory = ::testing::TempDir() + "/" + name + "_model";
  std::filesystem::remove_all(directory);
  EXPECT_TRUE(WriteTinyModel(directory, model).ok());
  return directory;
}

v1::RolloutStatus StatusOf(const DaemonPair& pair) {
  v1::RolloutStatus status;
  auto context = ContextFor(absl::Seconds(10));
  const grpc::Status got = pair.Rollout()->GetStatus(context.get(), {}, &status);
  EXPECT_TRUE(got.ok()) << got.error_message();
  return status;
}

std::uint64_t PoolBytes(const v1::RolloutStatus& status) {
  std::uint64_t bytes = 0;
  for (const v1::OwnedBytes& owned : status.ledger()) bytes += owned.in_pool() ? owned.bytes() : 0;
  return bytes;
}

struct Range {
  std::uint64_t least = UINT64_MAX, most = 0;
  void Add(std::uint64_t value) {
    least = std::min(least, value);
    most = std::max(most, value);
  }
  std::uint64_t width() const { return most - std::min(least, most); }
};

// Samples of what may not move. What is in use of the card is everybody's, this test's context included, which stays as it is.
class Watch {
 public:
  explicit Watch(const DaemonPair* pair) : pair_(pair) {}
  void Look() {
    const v1::RolloutStatus status = StatusOf(*pair_);
    const std::uint64_t pool_bytes = PoolBytes(status);
    pool_.Add(pool_bytes);
    epochs_.Add(status.lease_epoch());
    for (std::size_t i = 0; i < 2; ++i) {
      descriptors_[i].Add(NumDescriptors(pair_->pid(kBoth[i])));
      anonymous_[i].Add(AnonymousBytes(pair_->pid(kBoth[i])));
    }
    if (TestDevice() == Device::kCpu) return;
    const auto use = DriverMemory(TestDevice());
    ASSERT_TRUE(use.ok()) << use.status();
    outside_.Add(use->total_bytes - use->free_bytes - pool_bytes);
    ++num_looks_;
  }
  // Each transfer of the elastic range raises the epoch; a switch is there and back.
  std::uint64_t num_switches() const { return epochs_.width() / 2; }
  void Expect(std::uint64_t anonymous_limit) const {
    for (std::size_t i = 0; i < 2; ++i) {
      std::printf("%s: descriptors %lu to %lu, own host memory %s to %s\n", i == 0 ? "rollout_server" : "trainer_server",
                  descriptors_[i].least, descriptors_[i].most, FormatBytes(anonymous_[i].least).c_str(),
                  FormatBytes(anonymous_[i].most).c_str());
      EXPECT_LE(descriptors_[i].width(), 8u) << "calls under way hold sockets, a checkpoint files and folders";
      EXPECT_LE(anonymous_[i].width(), anonymous_limit);
    }
    EXPECT_EQ(pool_.width(), 0u);
    if (TestDevice() == Device::kCpu) return;
    std::printf("device memory outside the pool: %s to %s, moves by %s (%d looks); the pool %s\n",
                FormatBytes(outside_.least).c_str(), FormatBytes(outside_.most).c_str(), FormatBytes(outside_.width()).c_str(),
                num_looks_, FormatBytes(pool_.most).c_str());
    EXPECT_LE(outside_.width(), kFrozenBytes);
  }

 private:
  const DaemonPair* const pair_;
  Range pool_, epochs_, outside_, descriptors_[2], anonymous_[2];
  int num_looks_ = 0;
};

// Every step trains: with a KL term no group is passed over, whatever its rewards.
std::string EnduranceJob(std::uint64_t num_steps) {
  return absl::StrCat("name: \"endurance\" seed: 3 num_steps: ", num_steps, R"(
    rollout { prompts_per_step: 4 group_size: 8 sampling { temperature: 1 max_tokens: 12 } }
    rewards { name: "ended" weight: 1 ended_by_itself {} }
    loss { preset: LOSS_PRESET_DR_GRPO beta: 0.05 }
    adapter { rank: 8 alpha: 16 }
    optimizer { learning_rate: 1e-4 }
    checkpoint { interval_steps: 200 })");
}

void RunAThousandVersions(DaemonPair* pair) {
  constexpr std::uint64_t kWarmSteps = 100, kSteps = kWarmSteps + 1050;
  const auto job = pair->Submit(EnduranceJob(kSteps), TinyRows(24));
  ASSERT_TRUE(job.ok()) << job.status();
  Watch watch(pair);
  std::uint64_t first_step = 0, last_step = 0;
  const MonotonicTime deadline = MonotonicTime::Now() + absl::Minutes(8);
  for (;;) {
    ASSERT_LT(MonotonicTime::Now(), deadline) << "step " << last_step;
    const auto status = pair->GetJob(*job);
    ASSERT_TRUE(status.ok()) << status.status() << pair->log(Half::kTrainer);
    if (status->state() != v1::JOB_STATE_RUNNING && status->state() != v1::JOB_STATE_QUEUED) break;
    if (status->step() >= kWarmSteps) {
      watch.Look();
      last_step = status->step();
      if (first_step == 0) first_step = last_step;
    }
    absl::SleepFor(absl::Milliseconds(50));
  }
  EXPECT_EQ(pair->GetJob(*job)->state(), v1::JOB_STATE_SUCCEEDED) << pair->GetJob(*job)->error();
  watch.Look();
  std::printf("versions %lu, phase switches %lu\n", kSteps - first_step, watch.num_switches());
  EXPECT_GE(kSteps - first_step, 1000u);
  EXPECT_GE(watch.num_switches(), 1000u);
  watch.Expect(96 * kMiB);
}

// CASES C36, C40
TEST(EnduranceTest, NothingMovesOverAThousandVersionsAndPhaseSwitches) {
  auto pair = StartPair("endurance", TinyModelOf("endurance", SystemModel()), {});
  RunAThousandVersions(pair.get());
}

// CASES C36, C40
TEST(EnduranceTest, NothingMovesOverAThousandVersionsOfSmolLm2) {
  if (TestDevice() != Device::kCuda) GTEST_SKIP() << "a GPU's work";
  auto pair = StartPair("endurance_smollm2", "", {"--random_weights=smollm2-135m", "--pool_bytes=16GiB"});
  RunAThousandVersions(pair.get());
}

v1::SamplingParams Sampling(std::uint32_t max_tokens, std::uint64_t seed) {
  v1::SamplingParams sampling;
  sampling.set_temperature(1);
  sampling.set_max_tokens(max_tokens);
  sampling.set_seed(seed);
  sampling.set_ignore_end_tokens(true);
  return sampling;
}

// CASES C37, with LoRA, and C35: streams fill 95 % of the KV cache, then a job takes the whole range and gives it back, several
// times. The peak is the larger of the two, never their sum; every stream ends whole.
TEST(EnduranceTest, SwitchesAtAFilledPoolAllocateNothing) {
  constexpr int kMembers = 40;
  constexpr std::uint32_t kTokens = 900;
  TinyModelOptions model = SystemModel();
  model.num_layers = 8;
  model.num_kv_heads = 4;
  // About 126 MiB elastic on a GPU, 62 MiB on the CPU: 16 Ki tokens, less than half of what the streams want.
  auto pair = StartPair("filled", TinyModelOf("filled", model),
                        {TestDevice() == Device::kCuda ? "--pool_bytes=2176MiB" : "--pool_bytes=384MiB",
                         TestDevice() == Device::kCuda ? "--chunk_bytes=16MiB" : "--chunk_bytes=4MiB"});
  Watch watch(pair.get());
  const int num_rounds = TestDevice() == Device::kCuda ? 5 : 2;
  for (int round = 0; round < num_rounds; ++round) {  // the first warms up
    GenerateResult streams;
    std::jthread caller([&] {
      streams = GenerateText(pair->Rollout().get(), absl::StrCat("round ", round), Sampling(kTokens, round), kMembers, "",
                             absl::Minutes(4));
    });
    double filled = 0;
    for (int i = 0; i < 6000 && filled < 0.95; ++i) {
      const v1::RolloutStatus status = StatusOf(*pair);
      filled = static_cast<double>(status.kv_blocks_used()) / std::max(status.kv_blocks_total(), 1u);
      if (filled < 0.95) absl::SleepFor(absl::Milliseconds(10));
    }
    EXPECT_GE(filled, 0.95);
    const auto job = pair->Submit(EnduranceJob(3), TinyRows(8));
    EXPECT_TRUE(job.ok()) << job.status();
    for (bool is_running = job.ok(); is_running; absl::SleepFor(absl::Milliseconds(2))) {
      const auto status = pair->GetJob(*job);
      is_running = status.ok() && (status->state() == v1::JOB_STATE_RUNNING || status->state() == v1::JOB_STATE_QUEUED);
      if (round > 0) watch.Look();
    }
    caller.join();
    ASSERT_TRUE(job.ok());
    EXPECT_EQ(pair->GetJob(*job)->state(), v1::JOB_STATE_SUCCEEDED) << pair->GetJob(*job)->error() << pair->log(Half::kTrainer);
    ASSERT_TRUE(streams.status.ok()) << streams.status.error_message() << pair->log(Half::kRollout);
    for (const auto& ids : streams.ids) EXPECT_EQ(ids.size(), kTokens);
    std::printf("round %d: %.1f %% of the KV cache in use when the job came\n", round, 100 * filled);
  }
  std::printf("phase switches %lu\n", watch.num_switches());
  EXPECT_GE(watch.num_switches(), 2u);
  watch.Expect(96 * kMiB);
}

// One stream of `num_groups` groups of one, or of `group_size`.
struct Flood {
  grpc::Status status;
  std::uint64_t num_finished = 0;  // whole: the tokens asked for, and no error
};
Flood Send(v1::RolloutService::Stub* rollout, std::uint32_t num_groups, std::uint32_t group_size, const std::string& prompt,
           std::uint32_t max_tokens) {
  auto context = ContextFor(absl::Minutes(8));
  auto stream = rollout->Generate(context.get());
  v1::GenerateRequest request;
  request.mutable_header()->set_mode(v1::SCHEDULE_MODE_SHARED);
  request.mutable_header()->set_num_groups(num_groups);
  bool is_open = stream->Write(request);
  for (std::uint32_t group = 0; group < num_groups && is_open; ++group) {
    request.mutable_group()->set_group_index(group);
    request.mutable_group()->set_group_size(group_size);
    *request.mutable_group()->mutable_sampling() = Sampling(max_tokens, group);
    is_open = stream->Write(request);
    request.mutable_prompt()->set_text(absl::StrCat(group, " ", prompt));  // no two begin alike: nothing is cached
    is_open = is_open && stream->Write(request);
  }
  request.mutable_run();
  if (is_open) stream->Write(request);
  stream->WritesDone();
  Flood flood;
  v1::GenerateResponse response;
  while (stream->Read(&response)) {
    flood.num_finished += response.has_finished() && response.finished().reason() == v1::FINISH_REASON_LENGTH &&
                          response.finished().completion_tokens() == max_tokens;
  }
  flood.status = stream->Finish();
  return flood;
}

TEST(EnduranceTest, TenThousandLongRequestsAreFinishedOrRefused) {
  constexpr std::uint32_t kStreams = 50, kGroups = 200, kTokens = 8, kMaxStreams = 56, kLate = 20;
  const std::size_t prompt_tokens = TestDevice() == Device::kCuda ? 900 : 400;  // of 1,024
  DaemonPairOptions options;
  options.directory = ::testing::TempDir() + "/overload";
  options.model = TinyModelOf("overload", SystemModel());
  options.flags = {"--max_waiting_sequences=10000", absl::StrCat("--max_streams=", kMaxStreams)};  // rollout_server's
  const auto pair = std::make_unique<DaemonPair>(options);
  pair->Start(Half::kRollout);
  ASSERT_TRUE(pair->WaitReady(Half::kRollout, absl::Seconds(60))) << pair->log(Half::kRollout);
  ASSERT_TRUE(Send(pair->Rollout().get(), 300, 1, std::string(prompt_tokens, 'w'), kTokens).status.ok()) << "warm-up";
  const auto device_bytes = [] {
    const auto use = DriverMemory(TestDevice());
    return use.ok() ? use->total_bytes - use->free_bytes : 0;
  };
  Range device, anonymous;
  device.Add(device_bytes());
  anonymous.Add(AnonymousBytes(pair->pid(Half::kRollout)));

  std::vector<Flood> floods(kStreams), late(kLate);
  std::vector<std::jthread> callers;
  for (std::uint32_t i = 0; i < kStreams; ++i) {
    callers.emplace_back([&, i] {
      floods[i] = Send(pair->Rollout().get(), kGroups, 1,
                       absl::StrCat(i, std::string(prompt_tokens, static_cast<char>('a' + i % 26))), kTokens);
    });
  }
  std::uint32_t most_waiting = 0;
  const MonotonicTime deadline = MonotonicTime::Now() + absl::Minutes(2);
  while (most_waiting < 5000 && MonotonicTime::Now() < deadline) {
    most_waiting = std::max(most_waiting, StatusOf(*pair).waiting_sequences());
    absl::SleepFor(absl::Milliseconds(5));
  }
  EXPECT_GE(most_waiting, 5000u);
  const Flood refused = Send(pair->Rollout().get(), 10, 999, "too many", kTokens);
  EXPECT_EQ(refused.status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << refused.status.error_message();
  EXPECT_THAT(refused.status.error_message(), HasSubstr("9990"));
  EXPECT_THAT(refused.status.error_message(), HasSubstr("10000"));
  for (std::uint32_t i = 0; i < kLate; ++i)
    callers.emplace_back([&, i] { late[i] = Send(pair->Rollout().get(), 1, 1, "late", kTokens); });

  std::atomic<bool> is_over = false;
  std::jthread sampler([&] {
    while (!is_over) {
      most_waiting = std::max(most_waiting, StatusOf(*pair).waiting_sequences());
      anonymous.Add(AnonymousBytes(pair->pid(Half::kRollout)));
      device.Add(device_bytes());
      absl::SleepFor(absl::Milliseconds(20));
    }
  });
  for (std::jthread& caller : callers) caller.join();
  is_over = true;
  sampler.join();

  std::uint64_t num_finished = 0;
  for (const Flood& flood : floods) {
    EXPECT_TRUE(flood.status.ok()) << flood.status.error_message();
    num_finished += flood.num_finished;
  }
  EXPECT_EQ(num_finished, kStreams * kGroups);
  int num_refused = 0;
  for (const Flood& flood : late) {
    if (flood.status.ok()) {
      EXPECT_EQ(flood.num_finished, 1u);
      continue;
    }
    ++num_refused;
    EXPECT_EQ(flood.status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << flood.status.error_message();
    EXPECT_THAT(flood.status.error_message(), HasSubstr("streams at a time"));
  }
  EXPECT_GE(num_refused, 1);
  std::printf("waiting at most %u; of %u late streams %d refused; own host memory %s to %s; device memory moves by %s\n",
              most_waiting, kLate, num_refused, FormatBytes(anonymous.least).c_str(), FormatBytes(anonymous.most).c_str(),
              FormatBytes(device.width()).c_str());
  EXPECT_LE(anonymous.width(), 512 * kMiB);
  EXPECT_LE(device.width(), kFrozenBytes);
  EXPECT_TRUE(Send(pair->Rollout().get(), 1, 1, "after", kTokens).status.ok());
}

}  // namespace
}  // namespace tandem
