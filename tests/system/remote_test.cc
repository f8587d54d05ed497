// A job from elsewhere: a client in another network namespace, over mutual TLS and with a token, against a real pair.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "common/base/hash.h"
#include "nlohmann/json.hpp"
#include "tests/support/certificates.h"
#include "tests/support/tiny_model.h"
#include "tests/system/daemon_pair.h"
#include "tests/system/system_jobs.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;
using testing::WritePrivate;

struct Output {
  int status = -1;
  std::string text;
};
Output RunShell(const std::string& command) {
  FILE* const pipe = ::popen(("{ " + command + "; } 2>&1").c_str(), "r");
  Output output;
  std::array<char, 4096> piece;
  for (std::size_t size = 0; (size = std::fread(piece.data(), 1, piece.size(), pipe)) > 0;)
    output.text.append(piece.data(), size);
  output.status = ::pclose(pipe);
  return output;
}

// A namespace with one link to this one; addresses of 10.213.77.0/30.
class NetworkNamespace {
 public:
  NetworkNamespace() {
    const Output made =
        RunShell(absl::StrCat("ip netns add ", name_, " && ip link add ", link_, " type veth peer name eth0 netns ", name_,
                              " && ip address add 10.213.77.1/30 dev ", link_, " && ip link set ", link_, " up && ip netns exec ",
                              name_, " ip address add 10.213.77.2/30 dev eth0 && ip netns exec ", name_, " ip link set eth0 up"));
    exists_ = made.status == 0;
    why_ = made.text;
  }
  ~NetworkNamespace() { RunShell(absl::StrCat("ip link del ", link_, "; ip netns del ", name_)); }
  bool exists() const { return exists_; }
  const std::string& why() const { return why_; }
  std::string prefix() const { return absl::StrCat("ip netns exec ", name_, " "); }

 private:
  const std::string name_ = absl::StrCat("tandem", ::getpid()), link_ = absl::StrCat("tdm", ::getpid());
  bool exists_ = false;
  std::string why_;
};

class RemoteTest : public ::testing::Test {
 protected:
  void SetUp() override {
    directory_ = absl::StrCat(::testing::TempDir(), "/remote_", ::testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::remove_all(directory_ + "_laptop");
    std::filesystem::create_directories(directory_ + "_laptop");
    if (!network_.exists())
      std::printf("without a second network namespace, over the loopback device: %s\n", network_.why().c_str());
    const std::string host = network_.exists() ? "10.213.77.1" : "127.0.0.1";
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
    const std::string address = absl::StrCat(host, ":", 20000 + ::getpid() % 20000);
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
  Output There(const std::string& command) const {
    return RunShell(
        absl::StrCat(network_.exists() ? network_.prefix() : "", "env TANDEM_CONFIG=", laptop(), "/config.json ", command));
  }
  std::string Tandem() const {
    return std::filesystem::read_symlink("/proc/self/exe").parent_path().string() + "/tandem --json ";
  }
  std::string JobFile() const { return laptop() + "/job.textproto"; }
  std::string TrajectoryOf(const Output& submitted) {
    EXPECT_EQ(submitted.status, 0) << submitted.text;
    const nlohmann::json answer = nlohmann::json::parse(submitted.text, nullptr, false);
    const std::string job = answer.is_object() ? answer.value("job", "") : "";
    const auto end = pair_->WaitForEnd(job, absl::Seconds(60));
    EXPECT_TRUE(end.ok() && end->state() == v1::JOB_STATE_SUCCEEDED) << submitted.text << pair_->log(Half::kTrainer);
    return pair_->Trajectory(job);
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

  NetworkNamespace network_;
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
  const Output installed =
      RunShell(absl::StrCat("mkdir -p ", directory_, "/source/client && cp -r ", TANDEM_SOURCE_DIR, "/client/python ", directory_,
                            "/source/client/ && cp -r ", TANDEM_SOURCE_DIR, "/proto ", directory_,
                            "/source/ && /usr/bin/python3 -m pip install --no-index --no-deps --no-build-isolation --target ",
                            packages, " ", directory_, "/source/client/python"));
  ASSERT_EQ(installed.status, 0) << installed.text;
  const Output python = There(absl::StrCat(
      "PYTHONPATH=", packages, " /usr/bin/python3 -c 'import json, tandem; client = tandem.Client(); job = client.submit(\"",
      JobFile(), "\"); print(json.dumps({\"job\": job}))'"));
  EXPECT_EQ(TrajectoryOf(python), trajectory);

  const std::string log = pair_->log(Half::kTrainer);
  EXPECT_THAT(log, HasSubstr("audit: name=(local) role=operator certificate='' peer=unix:"));
  EXPECT_THAT(log, ::testing::ContainsRegex(absl::StrCat("audit: name=ada role=submit certificate='laptop' peer=ipv4:",
                                                         network_.exists() ? "10.213.77.2" : "127.0.0.1",
                                                         ":[0-9]+ rpc=JobService.Submit job='tiny-")));
}

// The trainer is killed while the file is under way.
TEST_F(RemoteTest, AnUploadGoesOnAfterTheTrainerWasKilled) {
  std::string rows;
  for (int i = 0; rows.size() < (96 << 20); ++i)
    absl::StrAppend(&rows, "{\"prompt\": \"", i, "\", \"unused\": \"", std::string(4000, 'x'), "\"}\n");
  std::ofstream(laptop() + "/rows.jsonl") << rows;
  const std::string content = pair_->data_dir(Half::kTrainer) + "/content";
  Output submitted;
  std::thread client([&] { submitted = There(Tandem() + "submit " + JobFile()); });
  std::uintmax_t partial_bytes = 0;
  const absl::Time deadline = absl::Now() + absl::Seconds(30);
  while (partial_bytes < (8 << 20) && absl::Now() < deadline) {
    absl::SleepFor(absl::Milliseconds(1));
    partial_bytes = PartialBytes(content);
  }
  pair_->Kill(Half::kTrainer);
  partial_bytes = PartialBytes(content);
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

TEST_F(RemoteTest, WhatIsNotAllowedIsRefusedInWords) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {Tandem() + "cancel tiny-1", "JobService.Cancel needs the role administer; ada has the role submit"},
      {"TANDEM_TOKEN=wrong " + Tandem() + "jobs", "this server does not know the token"},
      {Tandem() + "jobs --token_file=" + laptop() + "/absent", "token_file: cannot read"},
      {Tandem() + "jobs --context=plain", "no agreement on TLS"},
      {Tandem() + "jobs --ca=" + laptop() + "/laptop.pem", "no agreement on TLS"},
      {Tandem() + "jobs --context=absent", "no context 'absent'; there are: node, plain"}};
  for (const auto& [command, part] : cases) {
    const Output output = There(command);
    EXPECT_NE(output.status, 0) << command;
    EXPECT_THAT(output.text, HasSubstr(part)) << command;
  }
  EXPECT_EQ(There(Tandem() + "jobs").status, 0);
}

}  // namespace
}  // namespace tandem
