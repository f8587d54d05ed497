// A kernel of either daemon goes astray in the middle of a job: the process ends with its own exit code, the other one carries
// on, the job stays RUNNING and goes on when the dead one is back.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "absl/strings/match.h"
#include "common/base/clock.h"
#include "common/rpc/channel.h"
#include "tests/support/tiny_model.h"
#include "tests/system/daemon_pair.h"
#include "tests/system/system_jobs.h"

namespace tandem {
namespace {

constexpr int kSteps = 120;
constexpr Half kBoth[] = {Half::kRollout, Half::kTrainer};

const char* NameOf(Half half) { return half == Half::kRollout ? "rollout_server" : "trainer_server"; }

class LostDeviceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (TestDevice() != Device::kCuda) GTEST_SKIP() << "there is no device to lose without TANDEM_TEST_DEVICE=cuda";
    DaemonPairOptions options;
    options.directory = ::testing::TempDir() + "/lost_device";
    options.model = ::testing::TempDir() + "/lost_device_model";
    options.preloaded = "libtandem_stray_access.so";
    std::filesystem::remove_all(options.model);
    ASSERT_TRUE(WriteTinyModel(options.model, SystemModel()).ok());
    pair_ = std::make_unique<DaemonPair>(options);
    for (Half half : kBoth) pair_->Start(half);
    for (Half half : kBoth) ASSERT_TRUE(pair_->WaitReady(half, absl::Seconds(60))) << pair_->log(half);
  }
  // False when the job ends, or takes long, before it has done so many steps.
  bool AwaitStep(const std::string& job, std::uint32_t step) {
    const MonotonicTime deadline = MonotonicTime::Now() + absl::Seconds(10);
    while (MonotonicTime::Now() < deadline) {
      const auto status = pair_->GetJob(job);
      if (status.ok() && status->step() >= step) return true;
      if (status.ok() && status->state() == v1::JOB_STATE_FAILED) return false;
      absl::SleepFor(absl::Milliseconds(2));
    }
    return false;
  }
  void ExpectLosesAndComesBack(const std::string& job, Half half, std::uint32_t at_step) {
    SCOPED_TRACE(absl::StrCat(NameOf(half), " at step ", at_step));
    const Half other = half == Half::kRollout ? Half::kTrainer : Half::kRollout;
    const pid_t other_pid = pair_->pid(other);
    ASSERT_TRUE(AwaitStep(job, at_step)) << pair_->log(Half::kTrainer);
    const MonotonicTime begin = MonotonicTime::Now();
    pair_->Signal(half, SIGUSR1);
    const int status = pair_->Wait(half, absl::Seconds(5));
    ASSERT_TRUE(status != -1 && WIFEXITED(status)) << "wait status " << status << "\n" << pair_->log(half);
    EXPECT_EQ(WEXITSTATUS(status), kPoisonedContextExitCode) << pair_->log(half);
    EXPECT_TRUE(absl::StrContains(pair_->log(half), "the device context is poisoned")) << pair_->log(half);
    std::printf("%s ended with %d after %s\n", NameOf(half), WEXITSTATUS(status),
                absl::FormatDuration(MonotonicTime::Now() - begin).c_str());
    EXPECT_TRUE(pair_->IsAlive(other) && pair_->pid(other) == other_pid) << pair_->log(other);
    EXPECT_TRUE(pair_->WaitReady(other, absl::Seconds(5))) << "the other half answers";
    if (half == Half::kRollout) {
      absl::SleepFor(absl::Milliseconds(500));  // it has heard of it and has not given up
      const auto waiting = pair_->GetJob(job);
      ASSERT_TRUE(waiting.ok()) << waiting.status();
      EXPECT_EQ(waiting->state(), v1::JOB_STATE_RUNNING) << waiting->ShortDebugString();
    }
    pair_->Start(half);
    ASSERT_TRUE(pair_->WaitReady(half, absl::Seconds(20))) << pair_->log(half);
    const auto resumed = pair_->GetJob(job);
    ASSERT_TRUE(resumed.ok()) << resumed.status();
    EXPECT_EQ(resumed->state(), v1::JOB_STATE_RUNNING) << resumed->ShortDebugString();
    EXPECT_TRUE(pair_->IsAlive(other) && pair_->pid(other) == other_pid);
  }

  std::unique_ptr<DaemonPair> pair_;
};

TEST_F(LostDeviceTest, EitherHalfEndsWithItsOwnCodeAndTheJobGoesOn) {
  const auto job = pair_->Submit(TinyJob(kSteps, 11, 3), TinyRows(24));
  ASSERT_TRUE(job.ok()) << job.status();
  for (const auto& [half, step] : {std::pair(Half::kRollout, 10), {Half::kTrainer, 40}, {Half::kRollout, 70}}) {
    ASSERT_NO_FATAL_FAILURE(ExpectLosesAndComesBack(*job, half, static_cast<std::uint32_t>(step)));
    ASSERT_FALSE(HasNonfatalFailure());
  }
  const auto end = pair_->WaitForEnd(*job, absl::Seconds(20));
  ASSERT_TRUE(end.ok()) << end.status();
  EXPECT_EQ(end->state(), v1::JOB_STATE_SUCCEEDED) << end->error();
  const std::string trajectory = pair_->Trajectory(*job);
  EXPECT_EQ(std::count(trajectory.begin(), trajectory.end(), '\n'), 1 + kSteps + 2)
      << "the data, every step once, an evaluation before and after";
}

}  // namespace
}  // namespace tandem
