// The queue of a real pair, asked by the real command: who goes next, who may change what, and what becomes of jobs that come
// after others.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pwd.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "absl/strings/match.h"
#include "common/base/clock.h"
#include "common/base/hash.h"
#include "common/base/random.h"
#include "nlohmann/json.hpp"
#include "tests/support/certificates.h"
#include "tests/support/tiny_model.h"
#include "tests/system/daemon_pair.h"
#include "tests/system/system_jobs.h"

namespace tandem {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::WritePrivate;

class QueueTest : public ::testing::Test {
 protected:
  void SetUp() override {
    directory_ = absl::StrCat(::testing::TempDir(), "/queue_", ::testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::remove_all(File(""));
    std::filesystem::create_directories(File(""));
    ASSERT_TRUE(WriteTinyModel(directory_ + "_model", SystemModel()).ok());
    std::ofstream(File("rows.jsonl")) << TinyRows(16);
    std::ofstream(File("job.textproto")) << TinyJob(4, /*seed=*/5, /*checkpoint_interval=*/2)
                                         << " data { path: 'rows.jsonl' } evaluation { path: 'rows.jsonl' interval_steps: 2 }";
  }
  void StartPair(const std::vector<std::string>& trainer_flags = {}) {
    DaemonPairOptions options;
    options.directory = directory_;
    options.model = directory_ + "_model";
    options.trainer_flags = trainer_flags;
    // Trajectories are compared bit for bit.
    if (TestDevice() == Device::kCuda) options.trainer_flags.push_back("--deterministic_attention");
    options.meets_in_run_dir = true;
    pair_ = std::make_unique<DaemonPair>(std::move(options));
    for (Half half : {Half::kRollout, Half::kTrainer}) pair_->Start(half);
    for (Half half : {Half::kRollout, Half::kTrainer}) ASSERT_TRUE(pair_->WaitReady(half, absl::Seconds(60))) << pair_->log(half);
  }
  // Of the one who submits.
  std::string File(const std::string& name) const { return directory_ + "_files/" + name; }
  static std::string Login() { return ::getpwuid(::geteuid())->pw_name; }

  // The job's id. `fields`: laid over the job file, a field of the text format each.
  std::string Submit(const std::vector<std::string>& fields, const std::string& flags = "") {
    std::string set;
    for (const std::string& field : fields) absl::StrAppend(&set, set.empty() ? "" : ",", field);
    const auto said = pair_->Client(absl::StrCat(flags, " submit ", File("job.textproto"), " --set='", set, "'"));
    EXPECT_TRUE(said.ok()) << said.status();
    const nlohmann::json answer = said.ok() ? nlohmann::json::parse(*said, nullptr, false) : nlohmann::json();
    return answer.is_object() ? answer.value("job", "") : "";
  }
  // What the command says where it fails.
  std::string Refusal(const std::string& words) {
    const auto said = pair_->Client(words);
    EXPECT_FALSE(said.ok()) << words << ": " << said.value_or("");
    return std::string(said.status().message());
  }
  std::map<std::string, nlohmann::json> Jobs(const std::string& flags = "") {
    std::map<std::string, nlohmann::json> jobs;
    std::istringstream lines(pair_->Client(flags + " jobs").value_or(""));
    for (std::string line; std::getline(lines, line);) {
      const nlohmann::json job = nlohmann::json::parse(line);
      jobs[job["job"]] = job;
    }
    return jobs;
  }
  v1::JobStatus WaitForStep(const std::string& job, std::uint32_t step) {
    v1::JobStatus status;
    EXPECT_TRUE(WaitUntil(absl::Seconds(60), [&] {
      status = pair_->GetJob(job).value_or(status);
      return status.step() >= step && status.state() == v1::JOB_STATE_RUNNING;
    })) << status.ShortDebugString();
    return status;
  }
  v1::JobStatus WaitForEnd(const std::string& job) {
    if (job.empty()) return {};  // its submission failed
    const auto status = pair_->WaitForEnd(job, absl::Seconds(120));
    EXPECT_TRUE(status.ok()) << status.status() << pair_->log(Half::kTrainer);
    return status.value_or(v1::JobStatus());
  }
  // The jobs that began, in their order.
  std::vector<std::string> Begun() {
    std::vector<std::string> jobs;
    std::istringstream log(pair_->log(Half::kTrainer));
    for (std::string line; std::getline(log, line);) {
      const std::string mark = " job: begins job=";
      const std::size_t at = line.find(mark);
      if (at == std::string::npos) continue;
      const std::size_t begin = at + mark.size();
      jobs.push_back(line.substr(begin, line.find(' ', begin) - begin));
    }
    return jobs;
  }

  std::string directory_;
  std::unique_ptr<DaemonPair> pair_;
};

TEST_F(QueueTest, JobsRunByPriorityAndBehindThoseThatTheyComeAfter) {
  StartPair();
  const std::string running = Submit({"num_steps: 100000"});
  WaitForStep(running, 1);
  const std::string low = Submit({"name: \"low\"", "priority: -5"}), plain = Submit({"name: \"plain\""});
  const std::string high = Submit({"name: \"high\"", "priority: 5"});
  const std::string child = Submit({"name: \"child\"", "adapter { start_job: \"plain\" }", "priority: 50"});
  std::map<std::string, nlohmann::json> jobs = Jobs();
  ASSERT_EQ(jobs.size(), 5u);
  EXPECT_EQ(jobs[high]["queue_position"], 1);
  EXPECT_EQ(jobs[high]["waiting_for"], "1 job before it");
  EXPECT_EQ(jobs[plain]["queue_position"], 2);
  EXPECT_EQ(jobs[low]["queue_position"], 3);
  EXPECT_EQ(jobs[low]["waiting_for"], "3 jobs before it");
  EXPECT_EQ(jobs[low]["priority"], -5);
  EXPECT_EQ(jobs[low]["submitter"], Login());
  EXPECT_EQ(jobs[child]["queue_position"], 0);
  EXPECT_EQ(jobs[child]["waiting_for"], absl::StrCat("job ", plain, " (queued)"));
  EXPECT_EQ(jobs[child]["after"], nlohmann::json::array({plain}));

  EXPECT_TRUE(pair_->Client("priority " + low + " 100").ok());
  EXPECT_TRUE(pair_->Client("priority " + plain + " -8").ok());
  EXPECT_TRUE(pair_->Client("priority " + plain + " -- -7").ok());
  jobs = Jobs("--state=queued");
  EXPECT_EQ(jobs.size(), 4u);
  EXPECT_EQ(jobs[low]["queue_position"], 1);
  EXPECT_EQ(jobs[plain]["queue_position"], 3);
  EXPECT_EQ(jobs[plain]["priority"], -7);
  EXPECT_EQ(Jobs("--limit=2").size(), 2u);
  EXPECT_THAT(Refusal("priority " + low + " 101"), HasSubstr("priority: 101; must be -100 to 100"));
  EXPECT_THAT(Refusal("priority " + low + " high"), HasSubstr("usage: tandem priority JOB NUMBER"));
  EXPECT_THAT(Refusal("priority " + running + " 1"), HasSubstr("is running and cannot be given another priority"));
  EXPECT_THAT(Refusal("jobs --state=waiting"), HasSubstr("--state: 'waiting'; must be queued, running, paused"));
  const std::string file = File("job.textproto");
  EXPECT_THAT(Refusal("submit " + file + " --set='after: \"absent-1\"'"),
              HasSubstr("after: 'absent-1'; must be the id of a job of this trainer, or the name of one of your own"));
  EXPECT_THAT(Refusal("submit " + file + " --set='priority: 1000'"), HasSubstr("priority: 1000; must be -100 to 100"));
  const std::string table = pair_->Client("--nojson jobs").value_or("");
  EXPECT_THAT(table, HasSubstr("place  priority"));
  EXPECT_THAT(table, HasSubstr("waits for job " + plain + " (queued)"));
  const std::string shown = pair_->Client("--nojson show " + child).value_or("");
  EXPECT_THAT(shown, ::testing::ContainsRegex("submitter +" + Login()));
  EXPECT_THAT(shown, ::testing::ContainsRegex("after +" + plain));
  EXPECT_THAT(shown, HasSubstr("start_job: \"" + plain + "\""));

  EXPECT_TRUE(pair_->Client("cancel " + running).ok());
  for (const std::string& job : {low, high, plain, child}) EXPECT_EQ(WaitForEnd(job).state(), v1::JOB_STATE_SUCCEEDED) << job;
  EXPECT_THAT(Begun(), ElementsAre(running, low, high, plain, child));
}

// One fails while its rewards are computed, one is cancelled there: what is next does not tell.
TEST_F(QueueTest, JobThatFailsOrIsCancelledLeavesTheNextAsItIsAlone) {
  StartPair();
  std::ofstream(File("mine.py")) << "import time\n"
                                    "def broken(completions, **kwargs):\n    raise RuntimeError('no such luck')\n"
                                    "def slow(completions, **kwargs):\n    time.sleep(600)\n";
  const std::string rewards = "--rewards=" + File("mine.py") + ":";
  const auto plan = pair_->Client(absl::StrCat(rewards, "broken plan ", File("job.textproto")));
  if (!plan.ok() && absl::StrContains(plan.status().message(), "bubblewrap")) GTEST_SKIP() << plan.status().message();
  const std::string alone = Submit({"seed: 9"});
  EXPECT_EQ(WaitForEnd(alone).state(), v1::JOB_STATE_SUCCEEDED);
  const std::string failing = Submit({}, rewards + "broken"), behind = Submit({"name: \"behind\"", "after: \"tiny\""});
  const std::string next = Submit({"seed: 9"});
  const v1::JobStatus failed = WaitForEnd(failing);
  EXPECT_EQ(failed.state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(failed.error(), HasSubstr("no such luck"));
  EXPECT_EQ(WaitForEnd(next).state(), v1::JOB_STATE_SUCCEEDED);
  EXPECT_EQ(pair_->Trajectory(next), pair_->Trajectory(alone));
  const v1::JobStatus never = WaitForEnd(behind);
  EXPECT_EQ(never.state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(never.error(), HasSubstr("it comes after others: job " + failing + " failed: "));

  const std::string slow = Submit({}, rewards + "slow"), last = Submit({"seed: 9"});
  EXPECT_TRUE(WaitUntil(absl::Seconds(60),
                        [&] { return pair_->GetJob(slow).value_or(v1::JobStatus()).state() == v1::JOB_STATE_RUNNING; }));
  absl::SleepFor(absl::Seconds(2));  // by now its rewards are computed
  const MonotonicTime asked = MonotonicTime::Now();
  EXPECT_TRUE(pair_->Client("cancel " + slow).ok());
  EXPECT_EQ(WaitForEnd(slow).state(), v1::JOB_STATE_CANCELLED);
  EXPECT_LT(MonotonicTime::Now() - asked, absl::Seconds(15));
  EXPECT_EQ(WaitForEnd(last).state(), v1::JOB_STATE_SUCCEEDED);
  EXPECT_EQ(pair_->Trajectory(last), pair_->Trajectory(alone));
}

TEST_F(QueueTest, JobIsCancelledOrPausedWheneverItIsAsked) {
  StartPair();
  const std::string alone = Submit({"seed: 9"});
  EXPECT_EQ(WaitForEnd(alone).state(), v1::JOB_STATE_SUCCEEDED);
  constexpr int kRounds = 6;
  for (std::uint64_t round = 0; round < kRounds; ++round) {
    SCOPED_TRACE(absl::StrCat("round ", round));
    const auto sleep = [&](std::uint64_t part) { absl::SleepFor(absl::Milliseconds(RandomBelow(71, 2 * round + part, 500))); };
    const std::string cancelled = Submit({"num_steps: 100000"}), paused = Submit({"seed: 9"});
    sleep(0);
    const MonotonicTime asked = MonotonicTime::Now();
    EXPECT_TRUE(pair_->Client("cancel " + cancelled).ok());
    EXPECT_EQ(WaitForEnd(cancelled).state(), v1::JOB_STATE_CANCELLED);
    EXPECT_LT(MonotonicTime::Now() - asked, absl::Seconds(10));
    sleep(1);
    if (pair_->Client("pause " + paused).ok()) {  // else it has succeeded
      EXPECT_TRUE(WaitUntil(absl::Seconds(60), [&] {
        const auto state = pair_->GetJob(paused).value_or(v1::JobStatus()).state();
        return state == v1::JOB_STATE_PAUSED || state == v1::JOB_STATE_SUCCEEDED;
      }));
      pair_->Client("resume " + paused).IgnoreError();
    }
    EXPECT_EQ(WaitForEnd(paused).state(), v1::JOB_STATE_SUCCEEDED);
    EXPECT_EQ(pair_->Trajectory(paused), pair_->Trajectory(alone));
  }
}

TEST_F(QueueTest, QueueAndChainsOutliveAKilledTrainer) {
  StartPair();
  const auto submit_chain = [&] {
    std::vector<std::string> chain = {Submit({"name: \"one\"", "num_steps: 6"})};
    chain.push_back(Submit(
        {"name: \"two\"", "num_steps: 6", absl::StrCat("adapter { start_job: \"", chain[0], "\" }"), "loss { beta: 0.1 }"}));
    chain.push_back(Submit({"name: \"three\"", absl::StrCat("after: \"", chain[1], "\"")}));
    return chain;
  };
  const std::vector<std::string> undisturbed = submit_chain();
  for (const std::string& job : undisturbed) EXPECT_EQ(WaitForEnd(job).state(), v1::JOB_STATE_SUCCEEDED);

  const std::vector<std::string> chain = submit_chain();
  const std::string paused = Submit({"name: \"paused\"", "priority: 9"});
  EXPECT_TRUE(pair_->Client("pause " + paused).ok());
  const std::string behind = Submit({"name: \"behind\"", "after: \"paused\"", "priority: 3"});
  for (int kill = 0; kill < 4; ++kill) {
    absl::SleepFor(absl::Milliseconds(100 + RandomBelow(72, static_cast<std::uint64_t>(kill), 600)));
    pair_->Kill(Half::kTrainer);
    pair_->Start(Half::kTrainer);
    ASSERT_TRUE(pair_->WaitReady(Half::kTrainer, absl::Seconds(30))) << pair_->log(Half::kTrainer);
  }
  for (std::size_t i = 0; i < chain.size(); ++i) {
    EXPECT_EQ(WaitForEnd(chain[i]).state(), v1::JOB_STATE_SUCCEEDED) << pair_->log(Half::kTrainer);
    EXPECT_EQ(pair_->Trajectory(chain[i]), pair_->Trajectory(undisturbed[i])) << i;
  }
  std::map<std::string, nlohmann::json> jobs = Jobs();
  EXPECT_EQ(jobs[paused]["state"], "JOB_STATE_PAUSED");
  EXPECT_EQ(jobs[paused]["priority"], 9);
  EXPECT_EQ(jobs[behind]["waiting_for"], absl::StrCat("job ", paused, " (paused)"));
  EXPECT_EQ(jobs[behind]["submitter"], Login());
  EXPECT_GT(jobs[chain[1]]["device_seconds"], 0);
  EXPECT_TRUE(pair_->Client("resume " + paused).ok());
  EXPECT_EQ(WaitForEnd(behind).state(), v1::JOB_STATE_SUCCEEDED);
}

TEST_F(QueueTest, SubmittersShareTheDeviceAndChangeOnlyTheirOwnJobs) {
  testing::MakeAuthority(File(""), "ca");
  testing::MakeCertificate(File(""), "ca", "server");
  std::string tokens;
  for (const std::string role : {"submit ada", "submit bob", "view vera", "administer olga"}) {
    const std::string name = role.substr(role.find(' ') + 1);
    WritePrivate(File(name), "token-of-" + name + "\n");
    absl::StrAppend(&tokens, Sha256Hex("token-of-" + name), " ", role, "\n");
  }
  WritePrivate(File("tokens"), tokens);
  const std::string address = absl::StrCat("127.0.0.1:", FreePorts(1)[0]);
  StartPair({"--listen=" + address, "--tls_cert=" + File("server.pem"), "--tls_key=" + File("server.key"),
             "--tokens_file=" + File("tokens"), "--max_queued_jobs_of_submitter=4"});
  const auto as = [&](const std::string& name) {
    return absl::StrCat("--trainer=", address, " --ca=", File("ca.pem"), " --token_file=", File(name), " ");
  };
  const std::string running = Submit({"num_steps: 100000"}, as("ada"));
  WaitForStep(running, 1);
  std::vector<std::string> adas, bobs;
  for (int i = 0; i < 3; ++i) adas.push_back(Submit({"num_steps: 2"}, as("ada")));
  for (int i = 0; i < 2; ++i) bobs.push_back(Submit({"num_steps: 2"}, as("bob")));
  adas.push_back(Submit({"num_steps: 2"}, as("ada")));
  EXPECT_THAT(
      Refusal(as("ada") + "submit " + File("job.textproto")),
      HasSubstr("the queue holds 4 jobs of ada that are queued or paused; the limit is 4 (--max_queued_jobs_of_submitter)"));
  std::map<std::string, nlohmann::json> jobs = Jobs(as("vera"));
  EXPECT_EQ(jobs[running]["submitter"], "ada");
  EXPECT_EQ(jobs[bobs[0]]["submitter"], "bob");
  EXPECT_EQ(jobs[bobs[0]]["queue_position"], 1) << "ada's job has held the device";

  for (const std::string words : {"cancel ", "pause ", "resume "}) {
    EXPECT_THAT(Refusal(as("bob") + words + running), HasSubstr("job " + running +
                                                                " was submitted by ada; bob has the role submit, and "
                                                                "others' jobs need the role administer"));
    EXPECT_THAT(Refusal(as("vera") + words + running), HasSubstr("needs the role submit; vera has the role view"));
  }
  EXPECT_THAT(Refusal(as("bob") + "priority " + adas[0] + " -1"), HasSubstr("was submitted by ada"));
  EXPECT_THAT(Refusal(as("vera") + "priority " + adas[0] + " -1"), HasSubstr("needs the role submit"));
  EXPECT_TRUE(pair_->Client(as("ada") + "priority " + adas[3] + " 1").ok());
  EXPECT_TRUE(pair_->Client(as("ada") + "pause " + adas[2]).ok());
  EXPECT_TRUE(pair_->Client(as("olga") + "resume " + adas[2]).ok());
  EXPECT_TRUE(pair_->Client(as("bob") + "cancel " + bobs[1]).ok());
  // A name means one's own; another's job is named by its id.
  EXPECT_THAT(Refusal(as("olga") + "submit " + File("job.textproto") + " --set='name: \"after\",after: \"tiny\"'"),
              HasSubstr("after: 'tiny'"));
  const std::string of_node = Submit({"name: \"node\"", absl::StrCat("after: \"", bobs[0], "\"")});
  EXPECT_EQ(Jobs()[of_node]["submitter"], Login());
  EXPECT_TRUE(pair_->Client(as("olga") + "cancel " + running).ok());
  for (const std::string& job : {adas[0], adas[1], adas[2], adas[3], bobs[0], of_node})
    EXPECT_EQ(WaitForEnd(job).state(), v1::JOB_STATE_SUCCEEDED);
  const std::vector<std::string> begun = Begun();
  ASSERT_EQ(begun.size(), 7u);
  EXPECT_EQ(begun[1], adas[3]) << "of the highest priority";
  EXPECT_EQ(begun[2], bobs[0]) << "who has used less";
  EXPECT_EQ(begun[3], of_node) << "of one who has used nothing";
  EXPECT_THAT(std::vector<std::string>(begun.begin() + 4, begun.end()), ElementsAre(adas[0], adas[1], adas[2]));

  const std::string log = pair_->log(Half::kTrainer);
  for (const std::string& line :
       {"audit: name=bob role=submit certificate='' peer=ipv4:127.0.0.1:[0-9]+ rpc=JobService.Cancel job='" + running +
            "' result=PERMISSION_DENIED",
        "audit: name=ada role=submit certificate='' peer=ipv4:127.0.0.1:[0-9]+ rpc=JobService.SetPriority job='" + adas[3] +
            "' result=OK",
        "audit: name=olga role=administer certificate='' peer=ipv4:127.0.0.1:[0-9]+ rpc=JobService.Cancel job='" + running +
            "' result=OK",
        "audit: name=" + Login() + " role=operator certificate='' peer=unix:.* rpc=JobService.Submit job='" + of_node +
            "' result=OK",
        std::string("audit: refused name=vera role=view certificate='' rpc=JobService.Cancel result=PERMISSION_DENIED")}) {
    EXPECT_THAT(log, ::testing::ContainsRegex(line));
  }
}

}  // namespace
}  // namespace tandem
