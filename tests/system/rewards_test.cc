// Rewards from outside of the trainer, as a user has them: Python functions through real workers, remote services, the Python
// package. Where the sandbox does not start, tests that need it skip and say why.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "common/base/clock.h"
#include "nlohmann/json.hpp"
#include "tests/support/tiny_model.h"
#include "tests/system/daemon_pair.h"
#include "tests/system/system_jobs.h"
#include "trainer_server/sandbox/sandbox.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;

constexpr char kPython[] = "/usr/bin/python3";

class RewardsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto sandbox = Sandbox::Create(kPython);
    if (!sandbox.ok()) GTEST_SKIP() << sandbox.status().message();
    StartPair({});
  }
  void StartPair(const std::vector<std::string>& trainer_flags) {
    pair_.reset();
    directory_ = absl::StrCat(::testing::TempDir(), "/rewards_", ::testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::remove_all(directory_);
    ASSERT_TRUE(WriteTinyModel(directory_ + "_model", SystemModel()).ok());
    DaemonPairOptions options;
    options.directory = directory_;
    options.model = directory_ + "_model";
    options.trainer_flags = trainer_flags;
    pair_ = std::make_unique<DaemonPair>(options);
    for (Half half : {Half::kRollout, Half::kTrainer}) pair_->Start(half);
    for (Half half : {Half::kRollout, Half::kTrainer}) ASSERT_TRUE(pair_->WaitReady(half, absl::Seconds(60))) << pair_->log(half);
    WriteFile("rows.jsonl", TinyRows(16));
  }

  void WriteFile(const std::string& name, const std::string& text) const { std::ofstream(directory_ + "/" + name) << text; }
  // A job of the tiny model over rows.jsonl, without rewards.
  std::string WriteJob(int num_steps, const std::string& more = "") const {
    const std::string text = absl::StrReplaceAll(TinyJob(num_steps, /*seed=*/5, /*checkpoint_interval=*/10),
                                                 {{"rewards { name: \"ended\" weight: 1 ended_by_itself {} }", ""}});
    WriteFile("job.textproto", absl::StrCat(text, " data { path: 'rows.jsonl' } ", more));
    return directory_ + "/job.textproto";
  }
  absl::StatusOr<std::string> Submit(const std::string& job_file, const std::string& words = "") {
    TANDEM_ASSIGN_OR_RETURN(const std::string output, pair_->Client(absl::StrCat("submit ", job_file, " ", words)));
    return nlohmann::json::parse(output)["job"].get<std::string>();
  }
  v1::JobStatus End(const std::string& job, absl::Duration timeout = absl::Seconds(60)) {
    const auto status = pair_->WaitForEnd(job, timeout);
    EXPECT_TRUE(status.ok()) << status.status() << pair_->log(Half::kTrainer);
    return status.ok() ? *status : v1::JobStatus();
  }
  // What a command prints; it must succeed.
  static std::string Run(const std::string& command) {
    FILE* const pipe = ::popen((command + " 2>&1").c_str(), "r");
    std::string output;
    std::array<char, 4096> piece;
    for (std::size_t size = 0; (size = std::fread(piece.data(), 1, piece.size(), pipe)) > 0;) output.append(piece.data(), size);
    EXPECT_EQ(::pclose(pipe), 0) << command << ": " << output;
    return output;
  }
  // Installs the package as a user does, but for what it depends on, which Debian's packages bring. Its folder.
  std::string InstallPackage() const {
    const std::string copy = directory_ + "/source";
    std::filesystem::create_directories(copy + "/client");
    for (const char* part : {"client/python", "proto"}) {
      std::filesystem::copy(absl::StrCat(TANDEM_SOURCE_DIR, "/", part), absl::StrCat(copy, "/", part),
                            std::filesystem::copy_options::recursive);
    }
    Run(absl::StrCat(kPython, " -m pip install --no-index --no-deps --no-build-isolation --target ", directory_, "/packages ",
                     copy, "/client/python"));
    return directory_ + "/packages";
  }

  std::string directory_;
  std::unique_ptr<DaemonPair> pair_;
};

// A server that runs until its owner goes; it says where it listens.
class ExampleServer {
 public:
  explicit ExampleServer(const std::string& command) : pipe_(::popen(("echo $$; exec " + command).c_str(), "r")) {
    pid_ = std::atoi(Line().c_str());
    const std::string line = Line();
    address_ = line.substr(line.rfind(' ') + 1);
  }
  ~ExampleServer() {
    if (pid_ > 0) ::kill(pid_, SIGKILL);
    ::pclose(pipe_);
  }
  const std::string& address() const { return address_; }

 private:
  std::string Line() {
    std::array<char, 512> line{};
    if (std::fgets(line.data(), line.size(), pipe_) == nullptr) return "";
    return std::string(absl::StripAsciiWhitespace(line.data()));
  }
  FILE* const pipe_;
  pid_t pid_ = -1;
  std::string address_;
};

TEST_F(RewardsTest, ThePythonPackageSubmitsWatchesReadsAndExports) {
  WriteJob(3);
  const std::string said = Run(absl::StrCat("PYTHONPATH=", InstallPackage(), " ", kPython, " ", TANDEM_SOURCE_DIR,
                                            "/tests/system/python_client.py ", pair_->address(Half::kTrainer), " ", directory_));
  EXPECT_THAT(said, ::testing::EndsWith("ok\n"));
}

TEST_F(RewardsTest, ExampleServersInBothLanguagesScoreAlike) {
  const std::string bin = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  const ExampleServer cpp(bin + "/reward_server_example 127.0.0.1:0");
  const ExampleServer python(absl::StrCat("env PYTHONPATH=", InstallPackage(), " ", kPython, " ", TANDEM_SOURCE_DIR,
                                          "/client/examples/reward_server.py 127.0.0.1:0"));
  std::string trajectories[2];
  const std::string addresses[] = {cpp.address(), python.address()};
  for (std::size_t i = 0; i < 2; ++i) {
    const auto job =
        Submit(WriteJob(3, absl::StrCat("rewards { weight: 1 remote { address: '", addresses[i], "' function: 'brevity' } }")));
    ASSERT_TRUE(job.ok()) << job.status();
    EXPECT_EQ(End(*job).state(), v1::JOB_STATE_SUCCEEDED) << End(*job).error();
    trajectories[i] = pair_->Trajectory(*job);
    EXPECT_THAT(trajectories[i], HasSubstr("rewards/brevity/mean"));
  }
  EXPECT_EQ(trajectories[0], trajectories[1]);
  const auto lost = Submit(
      WriteJob(3, absl::StrCat("rewards { weight: 1 remote { address: '127.0.0.1:1' function: 'brevity' max_attempts: 2 } }")));
  ASSERT_TRUE(lost.ok());
  EXPECT_THAT(End(*lost).error(), HasSubstr("reward function 'brevity': brevity at 127.0.0.1:1: failed to connect"));
}

constexpr char kHonest[] = R"(
def brief(completions, **kwargs):
    return [1.0 / (1 + len(text)) for text in completions]
)";
// The same values from a process that is killed, hangs, floods or answers nonsense in a fifth of its calls.
constexpr char kUnruly[] = R"(
import os, random, signal, time
chance = random.SystemRandom()
def brief(completions, **kwargs):
    if chance.random() < 0.2:
        deed = chance.randrange(6)
        if deed == 0: os.kill(os.getpid(), signal.SIGKILL)
        if deed == 1: time.sleep(1000)
        if deed == 2:
            while True: print('flood' * 1000)
        if deed == 3:
            for fd in reversed(range(3, 20)):
                try: os.write(fd, b'\x00\x00\x00\x05{"a":')
                except OSError: pass
            os._exit(0)
        if deed == 4:
            for fd in reversed(range(3, 20)):
                try:
                    while True: os.write(fd, os.urandom(65536))
                except OSError: pass
        if deed == 5: os._exit(chance.randrange(256))
    return [1.0 / (1 + len(text)) for text in completions]
)";

// Kills a worker of the trainer from outside now and then.
class WorkerKiller {
 public:
  explicit WorkerKiller(pid_t trainer)
      : thread_([this, trainer] {
          for (int round = 0; !is_stopping_; ++round) {
            absl::SleepFor(absl::Milliseconds(20));
            if (round % 25 != 0) continue;
            for (const auto& task : std::filesystem::directory_iterator(absl::StrCat("/proc/", trainer, "/task"))) {
              std::ifstream children(task.path() / "children");
              for (pid_t child = 0; children >> child;) num_killed_ += ::kill(child, SIGKILL) == 0 ? 1 : 0;
            }
          }
        }) {}
  ~WorkerKiller() { Stop(); }
  int Stop() {
    is_stopping_ = true;
    if (thread_.joinable()) thread_.join();
    return num_killed_;
  }

 private:
  std::atomic<bool> is_stopping_ = false;
  std::atomic<int> num_killed_ = 0;
  std::thread thread_;
};

TEST_F(RewardsTest, WorkersThatMisbehaveAtRandomCostTimeAndNothingElse) {
  const int num_steps = IsLongTest() ? 200 : 25;
  std::string trajectories[2];
  int num_killed = 0;
  for (std::size_t i = 0; i < 2; ++i) {
    WriteFile("mine.py", i == 0 ? kHonest : kUnruly);
    const auto job = Submit(WriteJob(
        num_steps,
        "rewards { weight: 1 python_function { path: 'mine.py' function: 'brief' time_limit_seconds: 0.5 max_attempts: 50 } }"));
    ASSERT_TRUE(job.ok()) << job.status();
    WorkerKiller killer(i == 0 ? ::getpid() : pair_->pid(Half::kTrainer));
    if (i == 0) killer.Stop();
    EXPECT_EQ(End(*job, absl::Minutes(8)).state(), v1::JOB_STATE_SUCCEEDED) << End(*job).error();
    num_killed = killer.Stop();
    trajectories[i] = pair_->Trajectory(*job);
  }
  EXPECT_EQ(trajectories[0], trajectories[1]);
  const std::string log = pair_->log(Half::kTrainer);
  std::size_t num_lost = 0;
  for (std::size_t at = log.find("worker lost"); at != std::string::npos; at = log.find("worker lost", at + 1)) ++num_lost;
  EXPECT_GT(num_lost, static_cast<std::size_t>(num_steps) / 5);
  RecordProperty("workers_lost", static_cast<int>(num_lost));
  RecordProperty("workers_killed_from_outside", num_killed);
}

TEST_F(RewardsTest, AKilledTrainerLeavesNoWorkerAndItsJobGoesOn) {
  ASSERT_EQ(::prctl(PR_SET_CHILD_SUBREAPER, 1), 0);  // orphans become children of this process
  WriteFile("mine.py",
            "import time\ndef brief(completions, **kwargs):\n    time.sleep(0.1)\n    return [1.0 / (1 + len(t)) for t in "
            "completions]\n");
  const auto job = Submit(WriteJob(4, "rewards { weight: 1 python_function { path: 'mine.py' function: 'brief' } }"));
  ASSERT_TRUE(job.ok()) << job.status();
  for (int i = 0; i < 1000 && pair_->GetJob(*job)->step() < 1; ++i) absl::SleepFor(absl::Milliseconds(10));
  pair_->Kill(Half::kTrainer);
  // Whoever is left but the rollout server.
  const auto count_others = [&] {
    std::ifstream children(absl::StrCat("/proc/self/task/", ::getpid(), "/children"));
    int count = 0;
    for (pid_t child = 0; children >> child;) {
      if (child != pair_->pid(Half::kRollout) && ::waitpid(child, nullptr, WNOHANG) == 0) ++count;
    }
    return count;
  };
  const MonotonicTime limit = MonotonicTime::Now() + absl::Seconds(10);
  while (count_others() > 0) {
    ASSERT_LT(MonotonicTime::Now(), limit) << "workers are left";
    absl::SleepFor(absl::Milliseconds(10));
  }
  pair_->Start(Half::kTrainer);
  ASSERT_TRUE(pair_->WaitReady(Half::kTrainer, absl::Seconds(60)));
  EXPECT_EQ(End(*job).state(), v1::JOB_STATE_SUCCEEDED) << End(*job).error();
}

TEST_F(RewardsTest, FailuresFailTheJobOrCountAsNoneAsItsPolicySays) {
  WriteFile("mine.py",
            "def brief(completions, answer, **kwargs):\n"
            "    rewards = [1.0 / (1 + len(text)) for text in completions]\n"
            "    if answer[0] == 7: rewards[2] = float('nan')\n"
            "    if answer[0] == 3: raise ValueError('no %d' % answer[0])\n"
            "    return rewards\n");
  const std::string brief = "rewards { weight: 1 python_function { path: 'mine.py' function: 'brief' } ";
  const auto failed = Submit(WriteJob(8, brief + "}"));
  ASSERT_TRUE(failed.ok()) << failed.status();
  const std::string error = End(*failed).error();
  EXPECT_THAT(error, HasSubstr("data set row "));
  EXPECT_THAT(error,
              ::testing::AnyOf(
                  HasSubstr("row 7: reward function 'brief': completion 2: returned nan"),
                  HasSubstr("row 3: reward function 'brief': mine.py:brief: raised ValueError: no 3\n  mine.py:4 in brief")));
  const auto counted = Submit(WriteJob(8, brief + "on_failure: REWARD_FAILURE_POLICY_COUNT_AS_NONE }"));
  ASSERT_TRUE(counted.ok()) << counted.status();
  EXPECT_EQ(End(*counted).state(), v1::JOB_STATE_SUCCEEDED) << End(*counted).error();
  const std::string log = pair_->log(Half::kTrainer);
  EXPECT_THAT(log,
              HasSubstr("because=data set row 7: reward function 'brief': completion 2: returned nan, must be finite or None"));
  EXPECT_THAT(log, HasSubstr("because=data set row 3: reward function 'brief': mine.py:brief: raised ValueError: no 3"));
}

TEST_F(RewardsTest, ThePlanShowsALimitThatWasNotGiven) {
  WriteFile("mine.py", kHonest);
  const auto plan = pair_->Client(absl::StrCat("plan ", WriteJob(1), " --rewards=", directory_, "/mine.py:brief"));
  ASSERT_TRUE(plan.ok()) << plan.status();
  for (const char* words :
       {"time_limit_seconds: 30", "memory_limit_mib: 2048", "max_attempts: 3", "REWARD_FAILURE_POLICY_FAIL_JOB"}) {
    EXPECT_THAT(*plan, HasSubstr(words));
  }
}

TEST_F(RewardsTest, AFileThatCannotBeUsedIsRefusedAtSubmit) {
  WriteFile("mine.py", "import absent\n");
  const auto refused = Submit(WriteJob(1), absl::StrCat("--rewards=", directory_, "/mine.py:brief,length"));
  EXPECT_THAT(std::string(refused.status().message()),
              HasSubstr("rewards[0] 'brief': mine.py cannot be imported: ModuleNotFoundError: No module named 'absent'"));
  const auto absent = Submit(WriteJob(1), "--rewards=absent.py:brief");
  EXPECT_THAT(std::string(absent.status().message()), HasSubstr("absent.py"));
}

TEST_F(RewardsTest, ANodeWithoutPythonSaysSoToTheJobsThatNeedIt) {
  StartPair({"--reward_python=/absent/python3"});
  WriteFile("mine.py", kHonest);
  for (const char* reward : {"python_function { path: 'mine.py' function: 'brief' }", "code_tests { tests_field: 'answer' }"}) {
    const auto refused = Submit(WriteJob(1, absl::StrCat("rewards { weight: 1 ", reward, " }")));
    EXPECT_THAT(
        std::string(refused.status().message()),
        HasSubstr("--reward_python: '/absent/python3' is no program that can be run; give the absolute path of a Python"));
  }
  const auto job = Submit(WriteJob(1, "rewards { weight: 1 ended_by_itself {} }"));
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(End(*job).state(), v1::JOB_STATE_SUCCEEDED);
}

TEST_F(RewardsTest, CodeAndSchemaRewardsRunInAJob) {
  WriteFile("rows.jsonl", "{\"prompt\": \"say\", \"tests\": [{\"input\": \"\", \"output\": \"x\"}, \"assert True\"]}\n");
  const auto job = Submit(WriteJob(2,
                                   "rewards { weight: 1 code_tests { tests_field: 'tests' } } "
                                   "rewards { weight: 1 json_schema { schema: '{\"type\": \"object\"}' } }"));
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(End(*job).state(), v1::JOB_STATE_SUCCEEDED) << End(*job).error();
  EXPECT_THAT(pair_->Trajectory(*job), HasSubstr("rewards/code_tests/mean\":0.0"));
}

}  // namespace
}  // namespace tandem
