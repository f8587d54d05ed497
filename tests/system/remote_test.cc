// A job from elsewhere: a client in another network namespace, over mutual TLS and with a token, against a real pair.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "common/base/clock.h"
#include "common/base/hash.h"
#include "common/rpc/channel.h"
#include "nlohmann/json.hpp"
#include "tests/support/certificates.h"
#include "tests/support/tiny_model.h"
#include "tests/system/daemon_pair.h"
#include "tests/system/network_link.h"
#include "tests/system/system_jobs.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;
using testing::WritePrivate;

class RemoteTest : public ::testing::Test {
 protected:
  void SetUp() override {
    directory_ = absl::StrCat(::testing::TempDir(), "remote_", ::testing::UnitTest::GetInstance()->current_test_info()->line());
    std::filesystem::remove_all(directory_ + "_laptop");
    std::filesystem::create_directories(directory_ + "_laptop");
    absl::StatusOr<std::unique_ptr<NetworkLink>> link = NetworkLink::Create();
    if (link.ok()) {
      link_ = *std::move(link);
    } else {
      std::printf("without a second network namespace, over the loopback device: %s\n", link.status().ToString().c_str());
    }
    const std::string host = link_ != nullptr ? NetworkLink::kHere : "127.0.0.1";
    testing::MakeAuthority(laptop(), "ca");
    testing::MakeCertificate(laptop(), "ca", "server", 2, "IP:10.213.77.1");
    testing::MakeCertificate(laptop(), "ca", "laptop");
    WritePrivate(laptop() + "/token", "a-token\n");
    WritePrivate(laptop() + "/tokens", Sha256Hex("a-token") + " submit ada\n");

    ASSERT_TRUE(WriteTinyModel(directory_ + "_model", SystemModel()).ok());
    DaemonPairOptions options;
    options.directory = directory_;
    options.model = directory_ + "_model";
    options.meets_in_run_dir = true;
    const std::string address = absl::StrCat(host, ":", FreePorts(1)[0]);
    options.trainer_flags = {"--listen=" + address, "--tls_cert=" + laptop() + "/server.pem",
                             "--tls_key=" + laptop() + "/server.key", "--tls_client_ca=" + laptop() + "/ca.pem",
                             "--tokens_file=" + laptop() + "/tokens"};
    pair_ = std::make_unique<DaemonPair>(options);
    for (Half half : {Half::kRollout, Half::kTrainer}) pair_->Start(half);
    for (Half half : {Half::kRollout, Half::kTrainer}) ASSERT_TRUE(pair_->WaitReady(half, absl::Seconds(60))) << pair_->log(half);
    std::ofstream(laptop() + "/config.json")
        << R"({"context": "node", "contexts": {"node": {"trainer": ")" << address
        << R"(", "ca": "ca.pem", "cert": "laptop.pem", "key": "laptop.key", "token_file": "token"}, "plain": {"trainer": ")"
        << address << "\"}}}";
    std::ofstream(laptop() + "/rows.jsonl") << TinyRows(16);
    std::ofstream(laptop() + "/job.textproto")
        << TinyJob(4, /*seed=*/5, /*checkpoint_interval=*/10) << " data { path: 'rows.jsonl' }";
  }
  std::string laptop() const { return directory_ + "_laptop"; }
  // A command on the other side.
  ShellOutput There(const std::string& command) const {
    return RunShell(
        absl::StrCat(link_ != nullptr ? link_->prefix() : "", "env TANDEM_CONFIG=", laptop(), "/config.json ", command));
  }
  std::string Tandem() const {
    return std::filesystem::read_symlink("/proc/self/exe").parent_path().string() + "/tandem --json ";
  }
  std::string JobFile() const { return laptop() + "/job.textproto"; }
  std::string TrajectoryOf(const ShellOutput& submitted) {
    EXPECT_EQ(submitted.status, 0) << submitted.text;
    const nlohmann::json answer = nlohmann::json::parse(submitted.text, nullptr, false);
    const std::string job = answer.is_object() ? answer.value("job", "") : "";
    const auto end = pair_->WaitForEnd(job, absl::Seconds(60));
    EXPECT_TRUE(end.ok() && end->state() == v1::JOB_STATE_SUCCEEDED) << submitted.text << pair_->log(Half::kTrainer);
    return pair_->Trajectory(job);
  }

  // The steps that `watch --json` told of.
  static std::vector<int> StepsOf(const std::string& text) {
    std::vector<int> steps;
    for (const absl::string_view line : absl::StrSplit(text, '\n')) {
      const nlohmann::json event = nlohmann::json::parse(line, nullptr, false);
      if (event.is_object() && event.contains("step") && event["step"].is_object())
        steps.push_back(event["step"].value("step", 0));
    }
    return steps;
  }
  static std::uintmax_t PartialBytes(const std::string& content) {
    std::uintmax_t bytes = 0;
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(content, error)) {
      std::error_code gone;
      const std::uintmax_t size = entry.file_size(gone);
      if (!gone && entry.path().filename().string().starts_with("partial-")) bytes += size;
    }
    return bytes;
  }

  std::unique_ptr<NetworkLink> link_;  // null: there is none, "there" is here
  std::string directory_;
  std::unique_ptr<DaemonPair> pair_;
};

TEST_F(RemoteTest, TheSameJobFromTheNodeFromElsewhereAndFromPythonIsTheSame) {
  const auto local = pair_->Client("submit " + JobFile());
  ASSERT_TRUE(local.ok()) << local.status();
  const std::string trajectory = TrajectoryOf({0, *local});
  EXPECT_EQ(std::count(trajectory.begin(), trajectory.end(), '\n'), 5) << trajectory;  // the data, four steps
  EXPECT_EQ(TrajectoryOf(There(Tandem() + "submit " + JobFile())), trajectory);

  const std::string packages = directory_ + "/packages";
  const ShellOutput installed =
      RunShell(absl::StrCat("mkdir -p ", directory_, "/source/client && cp -r ", TANDEM_SOURCE_DIR, "/client/python ", directory_,
                            "/source/client/ && cp -r ", TANDEM_SOURCE_DIR, "/proto ", directory_,
                            "/source/ && /usr/bin/python3 -m pip install --no-index --no-deps --no-build-isolation --target ",
                            packages, " ", directory_, "/source/client/python"));
  ASSERT_EQ(installed.status, 0) << installed.text;
  const ShellOutput python = There(absl::StrCat(
      "PYTHONPATH=", packages, " /usr/bin/python3 -c 'import json, tandem; client = tandem.Client(); job = client.submit(\"",
      JobFile(), "\"); print(json.dumps({\"job\": job}))'"));
  EXPECT_EQ(TrajectoryOf(python), trajectory);

  const std::string log = pair_->log(Half::kTrainer);
  EXPECT_THAT(log, ::testing::ContainsRegex("audit: name=[A-Za-z0-9._@-]+ role=operator certificate='' peer=unix:"));
  EXPECT_THAT(log, ::testing::ContainsRegex(absl::StrCat("audit: name=ada role=submit certificate='laptop' peer=ipv4:",
                                                         link_ != nullptr ? NetworkLink::kThere : "127.0.0.1",
                                                         ":[0-9]+ rpc=JobService.Submit job='tiny-")));
}

// The trainer is killed while the file is under way.
TEST_F(RemoteTest, AnUploadGoesOnAfterTheTrainerWasKilled) {
  std::string rows;
  for (int i = 0; rows.size() < (96 << 20); ++i)
    absl::StrAppend(&rows, "{\"prompt\": \"", i, "\", \"unused\": \"", std::string(4000, 'x'), "\"}\n");
  std::ofstream(laptop() + "/rows.jsonl") << rows;
  const std::string content = pair_->data_dir(Half::kTrainer) + "/content";
  ShellOutput submitted;
  std::jthread client([&] { submitted = There(Tandem() + "submit " + JobFile()); });
  EXPECT_TRUE(WaitUntil(absl::Seconds(30), [&] { return PartialBytes(content) >= (8 << 20); }));
  pair_->Kill(Half::kTrainer);
  const std::uintmax_t partial_bytes = PartialBytes(content);
  EXPECT_GE(partial_bytes, 8u << 20);
  EXPECT_LT(partial_bytes, rows.size());
  pair_->Start(Half::kTrainer);
  client.join();
  EXPECT_EQ(submitted.status, 0) << submitted.text;
  EXPECT_TRUE(std::filesystem::exists(content + "/" + Sha256Hex(rows)));
  EXPECT_EQ(PartialBytes(content), 0u);
  // What was there was not sent again.
  const std::string log = pair_->log(Half::kTrainer);
  EXPECT_THAT(log, HasSubstr(absl::StrCat("upload goes on sha256=", Sha256Hex(rows), " at_bytes=", partial_bytes))) << log;
}

std::string Rows(std::size_t size_bytes) {
  std::string rows;
  for (int i = 0; rows.size() < size_bytes; ++i)
    absl::StrAppend(&rows, "{\"prompt\": \"", i, "\", \"unused\": \"", std::string(4000, 'x'), "\"}\n");
  return rows;
}

TEST_F(RemoteTest, ASlowLinkThatLosesPacketsCarriesTheSameJob) {
  if (link_ == nullptr) GTEST_SKIP() << "needs a second network namespace";
  std::ofstream(laptop() + "/rows.jsonl") << Rows(512 << 10);
  link_->Set({.loss = 0.02, .delay = absl::Milliseconds(40), .bytes_per_second = 1e6, .is_cut = false});
  const MonotonicTime begin = MonotonicTime::Now();
  ShellOutput submitted = There(Tandem() + "submit --watch " + JobFile());
  std::printf("submitted and watched to the end in %s\n", absl::FormatDuration(MonotonicTime::Now() - begin).c_str());
  EXPECT_EQ(StepsOf(submitted.text), (std::vector<int>{1, 2, 3, 4})) << submitted.text;
  submitted.text.resize(submitted.text.find('\n'));
  const std::string trajectory = TrajectoryOf(submitted);
  const auto local = pair_->Client("submit " + JobFile());
  ASSERT_TRUE(local.ok()) << local.status();
  EXPECT_EQ(TrajectoryOf({0, *local}), trajectory);
}

// The link is cut without a word while a file is under way and a job is watched; one watcher dies meanwhile. The trainer lets go
// of all three, and when the link is back the two go on.
TEST_F(RemoteTest, AConnectionThatBreaksWithoutAWordIsFoundByBothEndsAndWorkGoesOn) {
  if (link_ == nullptr) GTEST_SKIP() << "needs a second network namespace";
  // By hand: silence before the cut, so that the pings that find it are not the first.
  const absl::Duration silence = IsLongTest() ? absl::Minutes(3) : absl::ZeroDuration();
  const absl::Duration limit = 2 * absl::Milliseconds(kKeepaliveMs) + absl::Seconds(5);
  std::ofstream(laptop() + "/long.textproto")
      << TinyJob(100'000, /*seed=*/5, /*checkpoint_interval=*/1000) << " data { path: 'rows.jsonl' }";
  const auto answer = pair_->Client("submit " + laptop() + "/long.textproto");
  ASSERT_TRUE(answer.ok()) << answer.status();
  const std::string job = nlohmann::json::parse(*answer)["job"];
  const auto second = pair_->Client("submit " + JobFile());
  ASSERT_TRUE(second.ok()) << second.status();
  const std::string queued = nlohmann::json::parse(*second)["job"];  // its watcher hears nothing
  ASSERT_TRUE(WaitUntil(absl::Seconds(20), [&] { return pair_->GetJob(job).value_or(v1::JobStatus()).step() >= 5; }));
  const pid_t trainer = pair_->pid(Half::kTrainer);
  const std::uint64_t descriptors = NumDescriptors(trainer), threads = NumThreads(trainer);

  ShellOutput watched, uploaded, waited;
  std::jthread watcher([&] { watched = There(Tandem() + "watch " + job); });
  std::jthread waiter([&] { waited = There(Tandem() + "watch " + queued); });
  std::jthread dying(
      [&] { There(absl::StrCat("timeout --signal=KILL ", absl::ToInt64Seconds(silence) + 8, " ", Tandem(), "watch ", job)); });
  ASSERT_TRUE(WaitUntil(absl::Seconds(10), [&] { return NumDescriptors(trainer) >= descriptors + 3; }));
  absl::SleepFor(silence);
  const std::string rows = Rows(32 << 20), content = pair_->data_dir(Half::kTrainer) + "/content";
  std::ofstream(laptop() + "/rows.jsonl") << rows;
  link_->Set({.loss = 0, .delay = {}, .bytes_per_second = 8e6, .is_cut = false});
  std::jthread uploader([&] { uploaded = There(Tandem() + "submit " + JobFile()); });
  EXPECT_TRUE(WaitUntil(absl::Seconds(30), [&] { return PartialBytes(content) >= (4 << 20); }));

  link_->Set({.loss = 0, .delay = {}, .bytes_per_second = 0, .is_cut = true});
  const MonotonicTime cut = MonotonicTime::Now();
  EXPECT_TRUE(WaitUntil(limit, [&] { return NumDescriptors(trainer) <= descriptors + 1; }))
      << NumDescriptors(trainer) << " descriptors; " << descriptors << " before the streams";
  std::printf("four broken connections found after %s\n", absl::FormatDuration(MonotonicTime::Now() - cut).c_str());
  EXPECT_TRUE(WaitUntil(absl::Seconds(20), [&] { return NumThreads(trainer) <= threads + 4; }))
      << NumThreads(trainer) << " threads; " << threads << " before the streams";
  dying.join();
  const std::uintmax_t partial_bytes = PartialBytes(content);
  EXPECT_LT(partial_bytes, rows.size());

  link_->Set({});
  uploader.join();
  EXPECT_EQ(uploaded.status, 0) << uploaded.text;
  EXPECT_THAT(pair_->log(Half::kTrainer),
              HasSubstr(absl::StrCat("upload goes on sha256=", Sha256Hex(rows), " at_bytes=", partial_bytes)));
  const std::uint32_t step = pair_->GetJob(job).value_or(v1::JobStatus()).step();
  EXPECT_TRUE(WaitUntil(absl::Seconds(20), [&] { return pair_->GetJob(job).value_or(v1::JobStatus()).step() > step + 20; }));
  ASSERT_TRUE(pair_->Client("cancel " + job).ok());
  watcher.join();
  waiter.join();
  EXPECT_EQ(waited.status, 0) << waited.text;
  EXPECT_EQ(StepsOf(waited.text), (std::vector<int>{1, 2, 3, 4})) << waited.text;
  const std::vector<int> steps = StepsOf(watched.text);
  std::vector<int> all(pair_->GetJob(job).value_or(v1::JobStatus()).step());
  std::iota(all.begin(), all.end(), 1);
  EXPECT_EQ(steps, all);
  EXPECT_THAT(watched.text, HasSubstr("; tried again for 10 minutes"));
  EXPECT_THAT(watched.text, HasSubstr("JOB_STATE_CANCELLED"));
  EXPECT_TRUE(WaitUntil(limit, [&] { return NumDescriptors(trainer) <= descriptors + 1 && NumThreads(trainer) <= threads + 4; }))
      << NumDescriptors(trainer) << " descriptors and " << NumThreads(trainer) << " threads; before " << descriptors << " and "
      << threads;
}

TEST_F(RemoteTest, WhatIsNotAllowedIsRefusedInWords) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {Tandem() + "cancel tiny-1", "no job 'tiny-1'"},
      {"TANDEM_TOKEN=wrong " + Tandem() + "jobs", "this server does not know the token"},
      {Tandem() + "jobs --token_file=" + laptop() + "/absent", "token_file: cannot read"},
      {Tandem() + "jobs --context=plain", "no agreement on TLS"},
      {Tandem() + "jobs --ca=" + laptop() + "/laptop.pem", "no agreement on TLS"},
      {Tandem() + "jobs --context=absent", "no context 'absent'; there are: node, plain"}};
  for (const auto& [command, part] : cases) {
    const ShellOutput output = There(command);
    EXPECT_NE(output.status, 0) << command;
    EXPECT_THAT(output.text, HasSubstr(part)) << command;
  }
  EXPECT_EQ(There(Tandem() + "jobs").status, 0);
}

}  // namespace
}  // namespace tandem
