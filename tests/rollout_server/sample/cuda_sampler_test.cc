// The GPU's sampler against the CPU's, and against the definition in double where the CPU's draws walk in another order.
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>

#include "common/base/random.h"
#include "common/gpu/stream.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "rollout_server/sample/sampler.h"
#include "tests/support/device_bytes.h"

namespace tandem {
namespace {

using testing::DeviceBytes;
using ::testing::HasSubstr;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

using Rows = std::vector<std::vector<float>>;

// Rows of one width, drawn on the GPU at once.
class GpuSampler {
 public:
  GpuSampler(int vocab_size, int max_rows) : stream_(*Stream::Create(Device::kCuda)) {
    SamplerOptions options = {.device = Device::kCuda, .vocab_size = vocab_size, .max_rows = max_rows};
    memory_ = std::make_unique<DeviceBytes>(Sampler::WorkspaceBytes(options));
    options.workspace = memory_->span();
    auto created = Sampler::Create(options);
    EXPECT_TRUE(created.ok()) << created.status();
    sampler_ = *std::move(created);
  }
  void Upload(const Rows& rows) {
    const std::size_t width = rows.front().size();
    logits_ = std::make_unique<DeviceBytes>(rows.size() * width * sizeof(float));
    for (std::size_t i = 0; i < rows.size(); ++i) {
      EXPECT_EQ(CopyFromHost(Device::kCuda, logits_->data() + i * width * sizeof(float), rows[i].data(), width * sizeof(float)),
                absl::OkStatus());
    }
    view_ = {.data = reinterpret_cast<const float*>(logits_->data()),
             .num_rows = static_cast<std::int64_t>(rows.size()),
             .vocab_size = static_cast<std::int64_t>(width),
             .device = Device::kCuda,
             .stream = stream_->handle()};
  }
  std::vector<absl::StatusOr<DrawnToken>> Draw(const std::vector<DrawInput>& inputs) { return sampler_->Draw(view_, inputs); }
  Sampler& sampler() const { return *sampler_; }
  const Logits& logits() const { return view_; }

 private:
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<DeviceBytes> memory_, logits_;
  std::unique_ptr<Sampler> sampler_;
  Logits view_;
};

absl::StatusOr<DrawnToken> DrawOnCpu(const std::vector<float>& row, const DrawInput& input) {
  static const std::unique_ptr<Sampler> sampler = *Sampler::Create({});
  return sampler->Draw({.data = row.data(), .num_rows = 1, .vocab_size = static_cast<std::int64_t>(row.size())}, {&input, 1})[0];
}

// The distribution as the header defines it, in double.
struct Distribution {
  std::vector<double> probabilities;
  double kept_mass = 1;
};
Distribution Define(std::vector<double> logits, const SamplingParams& params) {
  const double top = *std::max_element(logits.begin(), logits.end());
  std::vector<std::size_t> order(logits.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return logits[a] > logits[b]; });
  double total = 0;
  for (double& logit : logits) total += logit = std::exp((logit - top) / params.temperature);
  std::size_t kept = params.top_k == 0 ? order.size() : std::min<std::size_t>(params.top_k, order.size());
  double mass = 0;
  for (std::size_t i = 0; i < kept; ++i) mass += logits[order[i]];
  if (params.top_p < 1) {
    double before = 0;
    std::size_t i = 0;
    while (i < kept && (i == 0 || before < params.top_p * mass)) before += logits[order[i++]];
    kept = i;
  }
  while (kept > 1 && logits[order[kept - 1]] < params.min_p) --kept;
  mass = 0;
  for (std::size_t i = 0; i < kept; ++i) mass += logits[order[i]];
  Distribution result;
  result.probabilities.resize(logits.size());
  for (std::size_t i = 0; i < kept; ++i) result.probabilities[order[i]] = logits[order[i]] / mass;
  result.kept_mass = mass / total;
  return result;
}

class CudaSamplerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!HasCudaDevice()) GTEST_SKIP() << "no CUDA device";
  }
};

Rows RandomRows(std::size_t num_rows, std::size_t width, double spread) {
  Rows rows(num_rows, std::vector<float>(width));
  for (std::size_t r = 0; r < num_rows; ++r) {
    for (std::size_t i = 0; i < width; ++i) {
      const double u = RandomUniform(r + 1, i) + RandomUniform(r + 77, i) + RandomUniform(r + 991, i) - 1.5;
      rows[r][i] = static_cast<float>(spread * u);
    }
  }
  return rows;
}

TEST_F(CudaSamplerTest, WithoutTruncationGivesTheCpusTokens) {
  for (const std::size_t width : {std::size_t{1}, std::size_t{33}, std::size_t{1000}, std::size_t{49155}, std::size_t{128256}}) {
    const Rows rows = RandomRows(64, width, 12);
    GpuSampler gpu(static_cast<int>(width), 64);
    gpu.Upload(rows);
    const std::vector<std::uint32_t> prompt = {0, static_cast<std::uint32_t>(width / 2)},
                                     completion = {static_cast<std::uint32_t>(width - 1), 0, 0};
    std::vector<SamplingParams> kinds(6);
    kinds[1].temperature = 0;
    kinds[2].temperature = 0.6;
    kinds[3].repetition_penalty = 1.3;
    kinds[3].presence_penalty = 0.5;
    kinds[4].temperature = 0;
    kinds[4].repetition_penalty = 2;
    kinds[5].temperature = 5;
    std::vector<DrawInput> inputs;
    for (std::uint32_t r = 0; r < rows.size(); ++r) {
      inputs.push_back(
          {.params = &kinds[r % kinds.size()], .seed = r, .position = r * 3, .prompt = prompt, .completion = completion});
    }
    const auto drawn = gpu.Draw(inputs);
    int num_equal = 0;
    double worst_raw = 0, worst_rollout = 0;
    for (std::size_t r = 0; r < rows.size(); ++r) {
      const auto expected = DrawOnCpu(rows[r], inputs[r]);
      ASSERT_TRUE(drawn[r].ok() && expected.ok()) << r << ": " << drawn[r].status() << " " << expected.status();
      if (drawn[r]->id != expected->id) continue;
      ++num_equal;
      worst_raw = std::max<double>(worst_raw, std::abs(drawn[r]->raw_logprob - expected->raw_logprob));
      worst_rollout = std::max<double>(worst_rollout, std::abs(drawn[r]->rollout_logprob - expected->rollout_logprob));
      EXPECT_EQ(drawn[r]->kept_mass, 1);
    }
    EXPECT_GE(num_equal, 62) << "of 64, vocabulary " << width;
    EXPECT_LE(worst_raw, 1e-5) << width;
    EXPECT_LE(worst_rollout, 1e-5) << width;
  }
}

TEST_F(CudaSamplerTest, TruncatesAsDefined) {
  std::vector<SamplingParams> kinds;
  for (const std::uint32_t top_k : {0u, 1u, 40u, 20000u}) {
    for (const double top_p : {1.0, 0.95, 0.3}) {
      for (const double min_p : {0.0, 0.02}) {
        for (const double temperature : {1.0, 2.5}) {
          SamplingParams params;
          params.top_k = top_k, params.top_p = top_p, params.min_p = min_p, params.temperature = temperature;
          kinds.push_back(params);
        }
      }
    }
  }
  // A spread of 0.001 leaves nearly every token in the nucleus: the search has to narrow first.
  for (const double spread : {30.0, 6.0, 0.001}) {
    const std::size_t width = 50257;
    const Rows rows = RandomRows(kinds.size(), width, spread);
    GpuSampler gpu(static_cast<int>(width), static_cast<int>(kinds.size()));
    gpu.Upload(rows);
    std::vector<DrawInput> inputs;
    for (std::uint32_t r = 0; r < rows.size(); ++r) inputs.push_back({.params = &kinds[r], .seed = r, .position = r});
    const auto drawn = gpu.Draw(inputs);
    int num_equal = 0;
    for (std::size_t r = 0; r < rows.size(); ++r) {
      const SamplingParams& p = kinds[r];
      const std::string what = absl::StrCat("spread ", spread, " top_k ", p.top_k, " top_p ", p.top_p, " min_p ", p.min_p,
                                            " temperature ", p.temperature);
      ASSERT_TRUE(drawn[r].ok()) << what << ": " << drawn[r].status();
      const Distribution defined = Define({rows[r].begin(), rows[r].end()}, p);
      // The edge of the nucleus may move by a token or two of 50,257 where weights are all but equal.
      EXPECT_NEAR(drawn[r]->kept_mass, defined.kept_mass, 1e-4 * defined.kept_mass) << what;
      const double probability = defined.probabilities[drawn[r]->id];
      EXPECT_GT(probability, 0) << what << " drew " << drawn[r]->id;
      if (probability > 0) { EXPECT_NEAR(drawn[r]->rollout_logprob, std::log(probability), 1e-4) << what; }
      double below = 0;
      std::uint32_t id = 0;
      for (const double u = RandomUniform(r, r); id + 1 < width; ++id) {
        if ((below += defined.probabilities[id]) > u) break;
      }
      num_equal += id == drawn[r]->id;
    }
    EXPECT_GE(num_equal, static_cast<int>(kinds.size()) - (spread < 1 ? 12 : 3)) << "spread " << spread;
  }
}

TEST_F(CudaSamplerTest, CutsTiesInOrderOfIds) {
  for (const std::size_t width : {std::size_t{1000}, std::size_t{100000}}) {
    const Rows rows(3, std::vector<float>(width, 2.5f));
    GpuSampler gpu(static_cast<int>(width), 3);
    gpu.Upload(rows);
    std::vector<SamplingParams> kinds(3);
    kinds[0].top_k = 5;
    kinds[1].top_p = 0.25;
    kinds[2].top_k = 100, kinds[2].top_p = 0.5;
    const std::vector<double> kept = {5, static_cast<double>(width) / 4, 50};
    std::vector<std::uint32_t> largest(3, 0);
    for (std::uint32_t t = 0; t < 300; ++t) {
      std::vector<DrawInput> inputs;
      for (std::size_t r = 0; r < 3; ++r) inputs.push_back({.params = &kinds[r], .seed = r, .position = t});
      const auto drawn = gpu.Draw(inputs);
      for (std::size_t r = 0; r < 3; ++r) {
        ASSERT_TRUE(drawn[r].ok()) << drawn[r].status();
        ASSERT_LT(drawn[r]->id, kept[r]) << "row " << r << " of " << width;
        EXPECT_NEAR(drawn[r]->kept_mass, kept[r] / static_cast<double>(width), 1e-6);
        EXPECT_NEAR(drawn[r]->rollout_logprob, -std::log(kept[r]), 1e-5);
        largest[r] = std::max(largest[r], drawn[r]->id);
      }
    }
    EXPECT_EQ(largest[0], 4u);
    EXPECT_GT(largest[1], 0.9 * kept[1]);
    EXPECT_GT(largest[2], 40u);
  }
}

TEST_F(CudaSamplerTest, DrawsFollowTheProbabilities) {
  constexpr std::size_t kWidth = 40, kRows = 256, kDraws = 200;
  const std::vector<float> row = RandomRows(1, kWidth, 3)[0];
  GpuSampler gpu(kWidth, kRows);
  gpu.Upload(Rows(kRows, row));
  std::vector<SamplingParams> kinds(3);
  kinds[1].temperature = 0.7, kinds[1].top_k = 12;
  kinds[2].top_p = 0.8, kinds[2].min_p = 0.05;
  for (const SamplingParams& params : kinds) {
    std::vector<double> counts(kWidth, 0);
    for (std::uint32_t t = 0; t < kDraws; ++t) {
      std::vector<DrawInput> inputs;
      for (std::uint32_t r = 0; r < kRows; ++r) inputs.push_back({.params = &params, .seed = r, .position = t});
      for (const auto& drawn : gpu.Draw(inputs)) ++counts[drawn->id];
    }
    const Distribution defined = Define({row.begin(), row.end()}, params);
    double chi_square = 0;
    int num_kept = 0;
    for (std::size_t i = 0; i < kWidth; ++i) {
      const double expected = defined.probabilities[i] * kRows * kDraws;
      if (expected == 0) {
        EXPECT_EQ(counts[i], 0) << i;
        continue;
      }
      ++num_kept;
      chi_square += (counts[i] - expected) * (counts[i] - expected) / expected;
    }
    // Mean n, deviation sqrt(2 n): five of them.
    const double freedom = num_kept - 1;
    EXPECT_LE(chi_square, freedom + 5 * std::sqrt(2 * freedom)) << num_kept << " tokens";
  }
}

TEST_F(CudaSamplerTest, RepeatsBitForBit) {
  const Rows rows = RandomRows(8, 128256, 10);
  GpuSampler gpu(128256, 8);
  gpu.Upload(rows);
  SamplingParams params;
  params.top_k = 5000, params.top_p = 0.9, params.repetition_penalty = 1.1;
  const std::vector<std::uint32_t> completion = {1, 2, 3};
  std::vector<DrawInput> inputs;
  for (std::uint32_t r = 0; r < 8; ++r) inputs.push_back({.params = &params, .seed = r, .position = r, .completion = completion});
  const auto first = gpu.Draw(inputs);
  for (int repeat = 0; repeat < 20; ++repeat) {
    const auto again = gpu.Draw(inputs);
    for (std::size_t r = 0; r < 8; ++r) {
      EXPECT_EQ(again[r]->id, first[r]->id);
      EXPECT_EQ(again[r]->rollout_logprob, first[r]->rollout_logprob);
      EXPECT_EQ(again[r]->raw_logprob, first[r]->raw_logprob);
      EXPECT_EQ(again[r]->kept_mass, first[r]->kept_mass);
    }
  }
}

// Draws with penalties among them, whose maps all draws share; the ids lie on the device before they are collected.
TEST_F(CudaSamplerTest, PendingDrawsKeepTheirTokensApart) {
  const Rows rows = RandomRows(8, 5000, 12);
  GpuSampler gpu(5000, 8);
  gpu.Upload(rows);
  std::vector<SamplingParams> kinds(4);
  kinds[1].repetition_penalty = 1.7;
  kinds[2].top_p = 0.8;
  kinds[3].presence_penalty = 0.9, kinds[3].temperature = 0.6;
  const std::vector<std::uint32_t> completion = {1, 2, 3, 70, 4999};
  std::vector<std::vector<DrawInput>> inputs;
  for (std::uint32_t i = 0; i < kinds.size(); ++i) {
    inputs.emplace_back();
    for (std::uint32_t r = 0; r < 8; ++r) {
      inputs[i].push_back({.params = &kinds[i], .seed = 10 * i + r, .position = r, .completion = completion});
    }
  }
  std::vector<std::vector<absl::StatusOr<DrawnToken>>> expected;
  for (const auto& input : inputs) expected.push_back(gpu.Draw(input));
  for (int repeat = 0; repeat < 3; ++repeat) {
    std::vector<PendingDraw> draws;
    for (const auto& input : inputs) draws.push_back(*gpu.sampler().Start(gpu.logits(), input));
    EXPECT_EQ(gpu.sampler().Start(gpu.logits(), inputs[0]).status().code(), absl::StatusCode::kFailedPrecondition);
    for (const std::size_t i : {2, 0, 3, 1}) {
      const auto drawn = gpu.sampler().Collect(draws[i]);
      ASSERT_EQ(drawn.size(), 8u);
      for (std::size_t r = 0; r < 8; ++r) {
        ASSERT_TRUE(drawn[r].ok() && expected[i][r].ok()) << drawn[r].status();
        EXPECT_EQ(drawn[r]->id, expected[i][r]->id);
        EXPECT_EQ(drawn[r]->rollout_logprob, expected[i][r]->rollout_logprob);
        std::uint32_t id = 0;
        EXPECT_EQ(CopyToHost(Device::kCuda, &id, draws[i].place(static_cast<std::int64_t>(r)), sizeof(id)), absl::OkStatus());
        EXPECT_EQ(id, drawn[r]->id);
      }
    }
  }
}

// CASES C06
TEST_F(CudaSamplerTest, RefusesLogitsThatAreNoNumbersRowByRow) {
  Rows rows(6, std::vector<float>(700, 1.0f));
  rows[1][699] = kNan;
  rows[2][0] = kInfinity;
  rows[3].assign(700, -kInfinity);
  rows[4].assign(700, -kInfinity);
  rows[4][50] = -3;
  GpuSampler gpu(700, 6);
  gpu.Upload(rows);
  const SamplingParams params;
  const auto drawn = gpu.Draw(std::vector<DrawInput>(6, DrawInput{.params = &params, .position = 17}));
  EXPECT_TRUE(drawn[0].ok() && drawn[5].ok());
  EXPECT_THAT(std::string(drawn[1].status().message()), HasSubstr("NaN logits at completion position 17"));
  EXPECT_THAT(std::string(drawn[2].status().message()), HasSubstr("largest value inf"));
  EXPECT_THAT(std::string(drawn[3].status().message()), HasSubstr("largest value -inf"));
  ASSERT_TRUE(drawn[4].ok()) << drawn[4].status();
  EXPECT_EQ(drawn[4]->id, 50u);
  EXPECT_NEAR(drawn[4]->raw_logprob, 0, 1e-6);
}

// CASES C01
TEST_F(CudaSamplerTest, ReturnsLogprobsOfTheDistributionDrawnFromAndOfTheRawPolicy) {
  GpuSampler gpu(3, 64);
  gpu.Upload(Rows(64, {2, 1, 0}));
  SamplingParams params;
  params.temperature = 0.5;
  std::vector<DrawInput> inputs;
  for (std::uint32_t r = 0; r < 64; ++r) inputs.push_back({.params = &params, .seed = r});
  int num_first = 0;
  for (const auto& drawn : gpu.Draw(inputs)) {
    ASSERT_TRUE(drawn.ok()) << drawn.status();
    if (drawn->id != 0) continue;
    ++num_first;
    EXPECT_NEAR(drawn->rollout_logprob, -0.142932, 1e-6);
    EXPECT_NEAR(drawn->raw_logprob, -0.407606, 1e-6);
  }
  EXPECT_GT(num_first, 0);
}

}  // namespace
}  // namespace tandem
