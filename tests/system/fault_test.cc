// What befalls a running pair from outside: halves that are stopped, a disk that fills, files that lost their end, a time of day
// that jumps. Nothing is lost, nothing hangs, and what is wrong is named.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "common/base/clock.h"
#include "common/base/unique_fd.h"
#include "common/base/units.h"
#include "tests/support/tiny_model.h"
#include "tests/system/daemon_pair.h"
#include "tests/system/system_jobs.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr Half kBoth[] = {Half::kRollout, Half::kTrainer};
constexpr int kSteps = 300;
constexpr absl::Duration kSoon = absl::Seconds(20);

class FaultTest : public ::testing::Test {
 protected:
  void MakePair(const std::string& name, DaemonPairOptions options = {}) {
    options.directory = absl::StrCat(::testing::TempDir(), "fault_", name);
    options.model = options.directory + "_model";
    std::filesystem::remove_all(options.model);
    ASSERT_TRUE(WriteTinyModel(options.model, SystemModel()).ok());
    pair_ = std::make_unique<DaemonPair>(options);
  }
  void StartPair() {
    for (const Half half : kBoth) pair_->Start(half);
    for (const Half half : kBoth) ASSERT_TRUE(pair_->WaitReady(half, absl::Seconds(60))) << pair_->log(half);
  }
  void Restart(Half half) {
    pair_->Start(half);
    ASSERT_TRUE(pair_->WaitReady(half, kSoon)) << pair_->log(half);
  }
  // Equal jobs have equal trajectories, whatever befalls them.
  std::string Submit(int checkpoint_interval = 5) {
    const auto job = pair_->Submit(TinyJob(kSteps, /*seed=*/21, checkpoint_interval), TinyRows(24));
    EXPECT_TRUE(job.ok()) << job.status();
    return job.value_or("");
  }
  std::string RunUndisturbed() {
    const std::string job = Submit();
    ExpectSucceeds(job);
    return pair_->Trajectory(job);
  }
  void ExpectSucceeds(const std::string& job) {
    const auto end = pair_->WaitForEnd(job, absl::Minutes(2));
    ASSERT_TRUE(end.ok()) << end.status() << "\n" << pair_->log(Half::kTrainer) << pair_->log(Half::kRollout);
    EXPECT_EQ(end->state(), v1::JOB_STATE_SUCCEEDED) << end->error() << "\n" << pair_->log(Half::kTrainer);
  }
  void WaitForStep(const std::string& job, std::uint32_t step) {
    std::uint32_t seen = 0;
    ASSERT_TRUE(WaitUntil(kSoon,
                          [&] {
                            const auto status = pair_->GetJob(job);
                            if (status.ok()) seen = status->step();
                            return seen >= step;
                          }))
        << "at step " << seen << " of " << step << "\n"
        << pair_->log(Half::kTrainer);
    ASSERT_LT(seen + 10, static_cast<std::uint32_t>(kSteps)) << "the job ended too early to be disturbed";
  }
  std::string CheckpointsOf(const std::string& job) const {
    return pair_->data_dir(Half::kTrainer) + "/jobs/" + job + "/checkpoints";
  }

  std::unique_ptr<DaemonPair> pair_;
};

// CASES C44. By hand each stop takes 30 s.
TEST_F(FaultTest, AStoppedHalfIsWaitedForAndToldOfInTheLog) {
  DaemonPairOptions options;
  options.flags = {"--holder_timeout=1s"};
  MakePair("stopped", options);
  StartPair();
  const std::string undisturbed = RunUndisturbed();
  const std::string job = Submit();
  for (const Half half : kBoth) {
    const Half other = half == Half::kRollout ? Half::kTrainer : Half::kRollout;
    const auto before = pair_->GetJob(job);
    ASSERT_TRUE(before.ok());
    WaitForStep(job, before->step() + 20);
    pair_->Signal(half, SIGSTOP);
    absl::SleepFor(IsLongTest() ? absl::Seconds(30) : absl::Seconds(3));
    EXPECT_TRUE(pair_->IsAlive(other));
    EXPECT_THAT(pair_->log(other), HasSubstr(absl::StrCat("pid=", pair_->pid(half), " is stopped since")));
    pair_->Signal(half, SIGCONT);
  }
  ExpectSucceeds(job);
  EXPECT_EQ(pair_->Trajectory(job), undisturbed);
}

// A file system of its own under the trainer's data, taken away with the object.
class SmallDisk {
 public:
  static absl::StatusOr<std::unique_ptr<SmallDisk>> Mount(const std::string& path, std::uint64_t size_bytes) {
    std::filesystem::create_directories(path);
    if (::mount("tmpfs", path.c_str(), "tmpfs", 0, absl::StrCat("size=", size_bytes).c_str()) != 0)
      return absl::UnavailableError(absl::StrCat("mounting a file system needs root: ", std::strerror(errno)));
    return std::unique_ptr<SmallDisk>(new SmallDisk(path));
  }
  ~SmallDisk() { ::umount2(path_.c_str(), MNT_DETACH); }
  // Leaves so much free, and 0 means not a byte.
  void FillUpTo(std::uint64_t free_bytes) {
    std::ofstream file(path_ + "/filler", std::ios::binary | std::ios::app);
    const std::string piece(64 << 10, 'x');
    while (file.good() && std::filesystem::space(path_).available > free_bytes) file.write(piece.data(), 64 << 10).flush();
  }
  void MakeRoom() { std::filesystem::remove(path_ + "/filler"); }

 private:
  explicit SmallDisk(std::string path) : path_(std::move(path)) {}
  const std::string path_;
};

class DiskFaultTest : public FaultTest {
 protected:
  // So that the trainer finds the disk as it then is, not one that fills.
  void FillWhileStopped(SmallDisk* disk, std::uint64_t free_bytes) {
    pair_->Signal(Half::kTrainer, SIGSTOP);
    disk->FillUpTo(free_bytes);
    pair_->Signal(Half::kTrainer, SIGCONT);
  }
};

TEST_F(DiskFaultTest, ADiskThatFillsFailsTheJobByNameAndItGoesOnWhenThereIsRoom) {
  MakePair("disk");
  const auto disk = SmallDisk::Mount(pair_->data_dir(Half::kTrainer), 256 * kMiB);
  if (!disk.ok()) GTEST_SKIP() << disk.status();
  StartPair();
  const std::string undisturbed = RunUndisturbed();
  // Too little for a checkpoint, then not a byte for anything.
  for (const std::uint64_t free_bytes : {8 * kMiB, 0 * kMiB}) {
    SCOPED_TRACE(absl::StrCat(free_bytes, " bytes left"));
    const std::string job = Submit();
    WaitForStep(job, 20);
    FillWhileStopped(disk->get(), free_bytes);
    const auto end = pair_->WaitForEnd(job, kSoon);
    ASSERT_TRUE(end.ok()) << end.status() << pair_->log(Half::kTrainer);
    EXPECT_EQ(end->state(), v1::JOB_STATE_FAILED);
    EXPECT_THAT(end->error(), HasSubstr(pair_->data_dir(Half::kTrainer)));
    EXPECT_THAT(end->error(), HasSubstr("make room"));
    // What else is asked for is refused as clearly, and the trainer lives.
    const auto refused = pair_->Submit(TinyJob(2, 1), TinyRows(25) + std::string(512 << 10, ' '));
    if (free_bytes == 0) { EXPECT_THAT(std::string(refused.status().message()), HasSubstr("No space left")) << refused.status(); }
    ASSERT_TRUE(pair_->IsAlive(Half::kTrainer)) << pair_->log(Half::kTrainer);
    (*disk)->MakeRoom();
    ASSERT_TRUE(pair_->Client("resume " + job).ok());
    ExpectSucceeds(job);
    EXPECT_EQ(pair_->Trajectory(job), undisturbed);
  }
  for (const Half half : kBoth) pair_->Kill(half);  // before their disk goes
}

// The job store's own file must grow for the end of the job: its log is that of a fresh store.
TEST_F(DiskFaultTest, ADiskThatFillsBeforeTheJobStoreHasItsSizeIsWaitedFor) {
  MakePair("store_disk");
  const auto disk = SmallDisk::Mount(pair_->data_dir(Half::kTrainer), 256 * kMiB);
  if (!disk.ok()) GTEST_SKIP() << disk.status();
  StartPair();
  const std::string job = Submit();
  WaitForStep(job, 5);
  FillWhileStopped(disk->get(), 0);
  const auto waits = [&] {
    const auto status = pair_->GetJob(job);
    return status.ok() && status->state() == v1::JOB_STATE_RUNNING && status->waiting_for() == "room for the job store";
  };
  EXPECT_TRUE(WaitUntil(kSoon, waits)) << pair_->GetJob(job)->ShortDebugString() << pair_->log(Half::kTrainer);
  absl::SleepFor(absl::Seconds(2));
  EXPECT_TRUE(waits());
  const std::string log = pair_->log(Half::kTrainer), told = "no job runs because=job store";
  EXPECT_THAT(log, HasSubstr(told));
  EXPECT_EQ(log.find(told), log.rfind(told)) << log;
  EXPECT_THAT(log, HasSubstr("make room"));
  (*disk)->MakeRoom();
  ExpectSucceeds(job);
  EXPECT_EQ(pair_->Trajectory(job), RunUndisturbed());
  for (const Half half : kBoth) pair_->Kill(half);  // before their disk goes
}

std::string ReadText(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}
void WriteText(const std::string& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

std::string NewestOf(const std::string& checkpoints) {
  std::string newest;
  for (const auto& entry : std::filesystem::directory_iterator(checkpoints)) {
    const std::string name = entry.path().filename();
    if (name.starts_with("step-")) newest = std::max(newest, name);
  }
  return newest;
}

TEST_F(FaultTest, ADamagedCheckpointIsPassedOverForTheOneBefore) {
  MakePair("checkpoint");
  StartPair();
  const std::string undisturbed = RunUndisturbed();
  const std::string job = Submit();
  std::uint32_t step = 20;
  for (const std::string file : {"adapter.bin", "state.json", "manifest.json"}) {
    SCOPED_TRACE(file);
    WaitForStep(job, step);
    pair_->Kill(Half::kTrainer);
    const std::string newest = NewestOf(CheckpointsOf(job)), path = CheckpointsOf(job) + "/" + newest + "/" + file;
    std::filesystem::resize_file(path, std::filesystem::file_size(path) / 2);
    Restart(Half::kTrainer);
    EXPECT_TRUE(WaitUntil(kSoon, [&] { return std::filesystem::exists(CheckpointsOf(job) + "/damaged-" + newest); }));
    EXPECT_THAT(pair_->log(Half::kTrainer), HasSubstr("because=checkpoint " + path));
    step += 30;
  }
  ExpectSucceeds(job);
  EXPECT_EQ(pair_->Trajectory(job), undisturbed);
}

TEST_F(FaultTest, AHistoryThatWasCutCostsFiguresAndNoStep) {
  MakePair("history");
  StartPair();
  const std::string undisturbed = RunUndisturbed();
  const std::string job = Submit();
  WaitForStep(job, 20);
  pair_->Kill(Half::kTrainer);
  const std::string path = pair_->data_dir(Half::kTrainer) + "/jobs/" + job + "/history.jsonl";
  std::filesystem::resize_file(path, std::filesystem::file_size(path) / 3);
  Restart(Half::kTrainer);
  ExpectSucceeds(job);
  EXPECT_THAT(pair_->log(Half::kTrainer), HasSubstr("a history was cut"));
  const std::string cut = pair_->Trajectory(job);
  ASSERT_LT(cut.size(), undisturbed.size());
  const std::string end = cut.substr(cut.size() * 3 / 4);
  EXPECT_THAT(undisturbed, testing::EndsWith(end)) << "what came after is as if nothing had been";
}

TEST_F(FaultTest, AJobWhoseCheckpointsAreAllDamagedFailsByNameAndTheNextOneRuns) {
  MakePair("checkpoints");
  StartPair();
  const std::string job = Submit();
  WaitForStep(job, 20);
  pair_->Kill(Half::kTrainer);
  for (const auto& entry : std::filesystem::directory_iterator(CheckpointsOf(job)))
    std::filesystem::resize_file(entry.path() / "adapter.bin", 100);
  const std::string newest = NewestOf(CheckpointsOf(job));
  Restart(Half::kTrainer);
  const auto end = pair_->WaitForEnd(job, kSoon);
  ASSERT_TRUE(end.ok()) << end.status();
  EXPECT_EQ(end->state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(end->error(), HasSubstr(CheckpointsOf(job) + "/" + newest + "/adapter.bin"));
  ExpectSucceeds(Submit());
}

TEST_F(FaultTest, ADamagedJobStoreIsRefusedByNameAndTheJobGoesOnWithTheCopy) {
  MakePair("store");
  StartPair();
  const std::string undisturbed = RunUndisturbed();
  const std::string job = Submit();
  WaitForStep(job, 20);
  pair_->Signal(Half::kTrainer, SIGTERM);
  ASSERT_EQ(pair_->Wait(Half::kTrainer, kSoon), 0);
  const std::string path = pair_->data_dir(Half::kTrainer) + "/jobs.sqlite", whole = ReadText(path);
  std::string changed = whole;
  changed.replace(4096, 256, 256, '\xff');
  for (const std::string& damaged : {whole.substr(0, whole.size() / 2), whole.substr(0, 50), changed}) {
    WriteText(path, damaged);
    pair_->Start(Half::kTrainer);
    const int status = pair_->Wait(Half::kTrainer, kSoon);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 2) << status;
    EXPECT_THAT(pair_->log(Half::kTrainer), HasSubstr("could not start: DATA_LOSS: job store " + path));
    EXPECT_TRUE(pair_->IsAlive(Half::kRollout));
    EXPECT_EQ(ReadText(path), damaged) << "it is left as it is";
  }
  WriteText(path, whole);
  Restart(Half::kTrainer);
  ExpectSucceeds(job);
  EXPECT_EQ(pair_->Trajectory(job), undisturbed);
}

// The time of day of both daemons, moved by moved_clock.cc.
class MovedClock {
 public:
  explicit MovedClock(const std::string& path)
      : path_(path), file_(::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600)) {
    Jump(absl::ZeroDuration());
  }
  void Jump(absl::Duration by) {
    moved_ += absl::ToInt64Nanoseconds(by);
    EXPECT_EQ(::pwrite(file_.get(), &moved_, sizeof moved_, 0), static_cast<ssize_t>(sizeof moved_));
  }
  DaemonPairOptions options() const {
    DaemonPairOptions options;
    options.preloaded = "libtandem_moved_clock.so";
    options.environment = {"TANDEM_TEST_CLOCK=" + path_};
    return options;
  }

 private:
  const std::string path_;
  const UniqueFd file_;
  std::int64_t moved_ = 0;
};

TEST_F(FaultTest, ATimeOfDayThatJumpsDisturbsNoWait) {
  MovedClock clock(absl::StrCat(::testing::TempDir(), "moved_clock_", ::getpid()));
  MakePair("clock", clock.options());
  StartPair();
  const std::string undisturbed = RunUndisturbed();
  const std::string job = Submit();
  std::uint32_t step = 10;
  for (const absl::Duration jump : {absl::Hours(24), -absl::Hours(48), absl::Seconds(30), -absl::Seconds(30)}) {
    WaitForStep(job, step);
    clock.Jump(jump);
    step += 20;
  }
  // A job that waits for its peer is as patient as before.
  WaitForStep(job, step);
  pair_->Kill(Half::kRollout);
  ASSERT_TRUE(WaitUntil(kSoon, [&] { return !pair_->GetJob(job).value_or(v1::JobStatus()).waiting_for().empty(); }));
  for (const absl::Duration jump : {absl::Hours(72), -absl::Hours(72)}) {
    clock.Jump(jump);
    absl::SleepFor(absl::Milliseconds(500));
    const v1::JobStatus status = pair_->GetJob(job).value_or(v1::JobStatus());
    EXPECT_EQ(status.state(), v1::JOB_STATE_RUNNING) << status.error();
  }
  Restart(Half::kRollout);
  ExpectSucceeds(job);
  EXPECT_EQ(pair_->Trajectory(job), undisturbed);
  for (const Half half : kBoth) EXPECT_THAT(pair_->log(half), Not(HasSubstr("stand still")));
}

}  // namespace
}  // namespace tandem
