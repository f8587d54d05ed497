// The pair under requests from outside: streams across phase switches and versions, damage in the shared weights, half
// characters.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <thread>

#include "common/base/unique_fd.h"
#include "nlohmann/json.hpp"
#include "tests/support/tiny_model.h"
#include "tests/system/daemon_pair.h"
#include "tests/system/system_jobs.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;

std::unique_ptr<DaemonPair> StartPair(const std::string& name, const TinyModelOptions& model = SystemModel()) {
  DaemonPairOptions options;
  options.directory = ::testing::TempDir() + "/" + name;
  options.model = ::testing::TempDir() + "/" + name + "_model";
  std::filesystem::remove_all(options.model);
  EXPECT_TRUE(WriteTinyModel(options.model, model).ok());
  auto pair = std::make_unique<DaemonPair>(options);
  for (Half half : {Half::kRollout, Half::kTrainer}) pair->Start(half);
  for (Half half : {Half::kRollout, Half::kTrainer}) EXPECT_TRUE(pair->WaitReady(half, absl::Seconds(60))) << pair->log(half);
  return pair;
}

v1::SamplingParams Sampling(std::uint32_t max_tokens, std::uint64_t seed) {
  v1::SamplingParams sampling;
  sampling.set_temperature(1);
  sampling.set_max_tokens(max_tokens);
  sampling.set_seed(seed);
  sampling.set_ignore_end_tokens(true);
  return sampling;
}

// The bytes of one row of the embedding as the model file has them (fp32).
std::string EmbeddingRow(const std::string& model, std::uint32_t token) {
  std::ifstream file(model + "/model.safetensors", std::ios::binary);
  std::uint64_t header_bytes = 0;
  file.read(reinterpret_cast<char*>(&header_bytes), 8);
  std::string header(header_bytes, '\0');
  file.read(header.data(), static_cast<std::streamsize>(header_bytes));
  const auto entry = nlohmann::json::parse(header)["model.embed_tokens.weight"];
  const auto width = entry["shape"][1].get<std::uint64_t>();
  file.seekg(static_cast<std::streamoff>(8 + header_bytes + entry["data_offsets"][0].get<std::uint64_t>() + token * width * 4));
  std::string row(width * 4, '\0');
  file.read(row.data(), static_cast<std::streamsize>(row.size()));
  return row;
}

// Changes a row of the weights where both daemons see it: in the pool's memory, found by its content.
bool ReplaceInPool(pid_t pid, const std::string& old_bytes, const std::string& new_bytes) {
  for (const auto& entry : std::filesystem::directory_iterator(absl::StrCat("/proc/", pid, "/fd"))) {
    std::error_code error;
    if (std::filesystem::read_symlink(entry.path(), error).string().rfind("/memfd:", 0) != 0) continue;
    const UniqueFd fd(::open(entry.path().c_str(), O_RDWR | O_CLOEXEC));
    struct stat status {};
    if (!fd.is_open() || ::fstat(fd.get(), &status) != 0) continue;
    std::string bytes(static_cast<std::size_t>(std::min<off_t>(status.st_size, 64 << 20)), '\0');
    if (::pread(fd.get(), bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) continue;
    const std::size_t at = bytes.find(old_bytes);
    if (at == std::string::npos) continue;
    return ::pwrite(fd.get(), new_bytes.data(), new_bytes.size(), static_cast<off_t>(at)) ==
           static_cast<ssize_t>(new_bytes.size());
  }
  return false;
}

bool IsWholeUtf8(const std::string& text) {
  for (std::size_t i = 0; i < text.size();) {
    const auto lead = static_cast<unsigned char>(text[i]);
    const std::size_t length = lead < 0x80 ? 1 : lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : lead >= 0xC2 ? 2 : 0;
    if (length == 0 || i + length > text.size()) return false;
    for (std::size_t k = 1; k < length; ++k) {
      if ((static_cast<unsigned char>(text[i + k]) & 0xC0) != 0x80) return false;
    }
    i += length;
  }
  return true;
}

// CASES C04
TEST(ServingTest, EveryMessageHoldsWholeCharactersAndArraysOfOneLength) {
  auto pair = StartPair("characters");
  const GenerateResult result = GenerateText(pair->Rollout().get(), "hello", Sampling(64, 3), 8);
  ASSERT_TRUE(result.status.ok()) << result.status.error_message();
  for (const v1::GenerateResponse& response : result.responses) {
    EXPECT_TRUE(IsWholeUtf8(response.tokens().text()));
    EXPECT_TRUE(IsWholeUtf8(response.finished().text()));
    EXPECT_EQ(response.tokens().ids_size(), response.tokens().rollout_logprobs_size());
    EXPECT_EQ(response.tokens().ids_size(), response.tokens().raw_logprobs_size());
  }
  for (const auto& ids : result.ids) EXPECT_EQ(ids.size(), 64u);
}

// CASES C16: one tensor in the pool is embedding and head of both daemons.
TEST(ServingTest, ARowWrittenToTheSharedEmbeddingChangesLogitsAtOnce) {
  if (TestDevice() == Device::kCuda) GTEST_SKIP() << "writes to the pool's pages as files: host memory only";
  auto pair = StartPair("embedding");
  const std::string model = pair->directory() + "_model";
  const GenerateResult before = GenerateText(pair->Rollout().get(), "abc", Sampling(8, 4), 1);
  ASSERT_TRUE(before.status.ok());
  const std::uint32_t token = before.ids[0][0];
  const std::string row = EmbeddingRow(model, token);
  std::string changed = row;
  for (std::size_t i = 0; i < changed.size(); i += 4) {
    float value = 0;
    std::memcpy(&value, &changed[i], 4);
    value += 1;
    std::memcpy(&changed[i], &value, 4);
  }
  ASSERT_TRUE(ReplaceInPool(pair->pid(Half::kTrainer), row, changed)) << "the row was not found in the pool";
  const GenerateResult after = GenerateText(pair->Rollout().get(), "abc", Sampling(8, 4), 1);
  ASSERT_TRUE(after.status.ok());
  const bool is_same = after.ids[0] == before.ids[0] && after.rollout_logprobs[0] == before.rollout_logprobs[0];
  EXPECT_FALSE(is_same);
}

// CASES C06: a row that turns to NaN ends the sequence that meets it, names the step, and nothing else.
TEST(ServingTest, NanInOneSequenceEndsThatSequenceAlone) {
  if (TestDevice() == Device::kCuda) GTEST_SKIP() << "writes to the pool's pages as files: host memory only";
  TinyModelOptions model;
  model.tie_embeddings = false;
  auto pair = StartPair("nan", model);
  const GenerateResult before = GenerateText(pair->Rollout().get(), "abc", Sampling(8, 4), 1);
  ASSERT_TRUE(before.status.ok());
  const std::string row = EmbeddingRow(pair->directory() + "_model", kTinyFirstByte + '~');
  std::string poisoned = row;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::memcpy(poisoned.data(), &nan, 4);
  ASSERT_TRUE(ReplaceInPool(pair->pid(Half::kRollout), row, poisoned));
  const GenerateResult bad = GenerateText(pair->Rollout().get(), "x~", Sampling(8, 4), 1);
  ASSERT_FALSE(bad.responses.empty());
  ASSERT_TRUE(bad.responses.back().has_finished());
  EXPECT_EQ(bad.responses.back().finished().reason(), v1::FINISH_REASON_ERROR);
  EXPECT_THAT(bad.responses.back().finished().error(), HasSubstr("NaN"));
  const GenerateResult after = GenerateText(pair->Rollout().get(), "abc", Sampling(8, 4), 1);
  ASSERT_TRUE(after.status.ok());
  EXPECT_EQ(after.ids, before.ids);

  // A training step that meets it is refused; both daemons go on serving.
  const auto job =
      pair->Submit(TinyJob(2, 1), "{\"prompt\": \"~\"}\n{\"prompt\": \"~~\"}\n{\"prompt\": \"~a\"}\n{\"prompt\": \"b~\"}\n");
  ASSERT_TRUE(job.ok()) << job.status();
  const auto end = pair->WaitForEnd(*job, absl::Seconds(60));
  ASSERT_TRUE(end.ok()) << end.status();
  EXPECT_EQ(end->state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(end->error(), HasSubstr("NaN"));
  EXPECT_TRUE(GenerateText(pair->Rollout().get(), "abc", Sampling(8, 4), 1).status.ok());
}

// CASES C35, C09, C43: requests stream while a job switches phase and publishes at every step. None is lost or doubled, the base
// model's completions are those of a quiet server, and spans of versions cover each completion exactly.
TEST(ServingTest, StreamsSurvivePhaseSwitchesAndPublishes) {
  auto pair = StartPair("streams");
  std::vector<GenerateResult> quiet;
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    quiet.push_back(GenerateText(pair->Rollout().get(), absl::StrCat("prompt ", seed), Sampling(200, seed), 1));
    ASSERT_TRUE(quiet.back().status.ok());
  }
  const auto job = pair->Submit(TinyJob(12, 5), TinyRows(16));
  ASSERT_TRUE(job.ok()) << job.status();
  std::vector<GenerateResult> busy(8);
  std::vector<std::jthread> callers;
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    callers.emplace_back(
        [&, seed] { busy[seed] = GenerateText(pair->Rollout().get(), absl::StrCat("prompt ", seed), Sampling(200, seed), 1); });
  }
  // One more, given up in the middle.
  std::jthread cancelled([&] {
    const GenerateResult result =
        GenerateText(pair->Rollout().get(), "given up", Sampling(900, 99), 1, "", absl::Milliseconds(40));
    EXPECT_FALSE(result.status.ok());
  });
  cancelled.join();
  for (std::jthread& caller : callers) caller.join();
  int num_equal = 0;
  std::size_t shortest = 200;
  const float tolerance = TestDevice() == Device::kCpu ? 1e-4f : 0.05f;
  for (std::size_t i = 0; i < 8; ++i) {
    ASSERT_TRUE(busy[i].status.ok()) << busy[i].status.error_message();
    ASSERT_EQ(busy[i].ids[0].size(), 200u);
    std::size_t same = 0;
    for (; same < 200 && busy[i].ids[0][same] == quiet[i].ids[0][same]; ++same) {
      ASSERT_NEAR(busy[i].rollout_logprobs[0][same], quiet[i].rollout_logprobs[0][same], tolerance)
          << "request " << i << " token " << same;
    }
    num_equal += same == 200 ? 1 : 0;
    shortest = std::min(shortest, same);
  }
  // Other company in the batch rounds a product differently, and now and then a draw falls on the other side of a boundary: in
  // bf16 more often.
  std::printf("%d of 8 equal to those of a quiet server, the shortest for %zu tokens\n", num_equal, shortest);
  if (TestDevice() == Device::kCpu) { EXPECT_GE(num_equal, 5); }

  // Requests of the job itself, while versions go by.
  std::set<std::uint64_t> versions;
  while (true) {
    const auto status = pair->GetJob(*job);
    ASSERT_TRUE(status.ok()) << status.status();
    if (status->state() != v1::JOB_STATE_RUNNING) break;
    const GenerateResult result = GenerateText(pair->Rollout().get(), "of the job", Sampling(40, 7), 1, *job);
    if (!result.status.ok()) continue;  // the job may end, and its adapter with it, at any moment
    std::uint32_t covered = 0;
    std::uint64_t last_version = 0;
    for (const v1::GenerateResponse& response : result.responses) {
      for (const v1::VersionSpan& span : response.tokens().version_spans()) {
        EXPECT_EQ(span.begin(), covered);
        EXPECT_GE(span.weight_version(), last_version);
        covered = span.end();
        last_version = span.weight_version();
      }
    }
    EXPECT_EQ(covered, 40u);
    versions.insert(last_version);
  }
  EXPECT_EQ(pair->WaitForEnd(*job, absl::Seconds(60))->state(), v1::JOB_STATE_SUCCEEDED) << pair->log(Half::kTrainer);
  EXPECT_GE(versions.size(), 2u) << "no publish was seen";
}

}  // namespace
}  // namespace tandem
