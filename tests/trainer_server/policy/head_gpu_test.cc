// The head operator on the GPU at sizes where logits in full would not be built.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "common/base/random.h"
#include "common/model/weight_codecs.h"
#include "gtest/gtest.h"
#include "kernels/base/elements.h"
#include "tests/trainer_server/support/gpu_policy.h"
#include "trainer_server/loss/loss.h"
#include "trainer_server/policy/cuda_backend.h"
#include "trainer_server/policy/linear_logprob.h"
#include "trainer_server/policy/policy_memory.h"

namespace tandem {
namespace {

using testing::DeviceBytes;
using testing::PolicyGpuTest;

class HeadGpuTest : public PolicyGpuTest {
 protected:
  HeadGpuTest() : PolicyGpuTest(std::uint64_t{2} << 30) {}
};

std::vector<double> Random(std::int64_t count, std::uint64_t seed, double amplitude) {
  std::vector<double> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto value = static_cast<float>((2 * RandomUniform(seed, i) - 1) * amplitude);
    values[i] = static_cast<double>(Bf16ToFloat(FloatToBf16(value)));
  }
  return values;
}

template <typename T>
std::vector<T> As(const std::vector<double>& values) {
  std::vector<T> elements;
  for (const double value : values) elements.push_back(FromFloat<T>(static_cast<float>(value)));
  return elements;
}

constexpr int kSequences = 8, kTokens = 12;

// The policy's log-probs and what the loss wants beside them, as a function of the row.
LossResult LossOf(const LossOptions& options, const LinearLogprobs& policy) {
  static const std::vector<std::uint8_t> kMask = {1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1};
  std::vector<std::vector<double>> old, ref, rollout, advantages;
  std::vector<LossSequence> sequences;
  for (std::uint64_t s = 0; s < kSequences; ++s) {
    for (auto* arrays : {&old, &ref, &rollout}) arrays->emplace_back();
    // Far from any policy's log-prob by amounts that reach every branch; the same for both sides.
    for (std::uint64_t t = 0; t < kTokens; ++t) {
      const double base = -10.6 + 0.3 * RandomUniform(s, t);
      old.back().push_back(base);
      ref.back().push_back(base + 0.4 * RandomUniform(s + 100, t) - 0.2);
      rollout.back().push_back(base + 0.3 * RandomUniform(s + 200, t) - 0.15);
    }
    advantages.push_back({s % 2 == 0 ? 0.8 : -1.1});
  }
  for (std::size_t s = 0; s < kSequences; ++s) {
    LossSequence sequence;
    sequence.policy_logprobs = std::span(policy.logprobs).subspan(s * kTokens, kTokens);
    sequence.entropies = std::span(policy.entropies).subspan(s * kTokens, kTokens);
    sequence.old_logprobs = old[s];
    sequence.ref_logprobs = ref[s];
    sequence.rollout_logprobs = rollout[s];
    sequence.loss_mask = kMask;
    sequence.advantages = advantages[s];
    sequences.push_back(sequence);
  }
  const auto result = EvaluateLoss(options, ComputeStepTotals(options, sequences, 1), sequences);
  EXPECT_TRUE(result.ok()) << result.status();
  return result.ok() ? *result : LossResult();
}

// CASES C21: loss with clip, KL, mask and rollout correction, at all three ratio levels, over the tiled head on the GPU against
// logits in full in double.
template <typename T>
void CompareWithLogitsInFull(const PolicyDevice& device, double most_gradient_error) {
  constexpr std::int64_t kRows = kSequences * kTokens, kWidth = 128, kVocab = 40000;
  ModelConfig config = testing::TinyConfig();
  config.hidden_size = kWidth;
  config.vocab_size = kVocab;
  const std::vector<double> weight = Random(kVocab * kWidth, 1, 0.25), hidden = Random(kRows * kWidth, 2, 0.5);
  LinearHead<double> full;
  full.weight = weight.data();
  full.vocab_size = kVocab;
  full.width = kWidth;
  full.temperature = 0.9;
  full.logit_scale = 1.1;
  full.softcap = 20;
  full.row_tile = kRows;
  full.vocab_tile = kVocab;
  MicroBatch batch;
  for (std::int64_t n = 0; n < kRows; ++n) {
    batch.token_ids.push_back(0);
    batch.positions.push_back(0);
    batch.head_rows.push_back(n);
    batch.head_targets.push_back(static_cast<std::int64_t>(RandomBelow(7, static_cast<std::uint64_t>(n), kVocab)));
  }
  std::vector<double> exact_unit(hidden.size());
  const LinearLogprobs exact = LinearLogprobForward(full, hidden.data(), batch.head_targets, exact_unit.data());

  const std::vector<T> weight_elements = As<T>(weight), hidden_elements = As<T>(hidden);
  DeviceBytes device_weight(weight.size() * sizeof(T)), device_hidden(hidden.size() * sizeof(T)),
      device_unit(hidden.size() * sizeof(T));
  ASSERT_TRUE(device_weight.Upload(weight_elements.data(), weight.size() * sizeof(T)).ok());
  ASSERT_TRUE(device_hidden.Upload(hidden_elements.data(), hidden.size() * sizeof(T)).ok());
  LinearHead<T> head;
  head.weight = reinterpret_cast<const T*>(device_weight.data());
  head.vocab_size = kVocab;
  head.width = kWidth;
  head.temperature = full.temperature;
  head.logit_scale = full.logit_scale;
  head.softcap = full.softcap;
  head.row_tile = 50;  // three tiles of columns, two of rows
  CudaBackend<T> backend(config, sizeof(T) == 4 ? StorageFormat::kFp32 : StorageFormat::kBf16, head, device, nullptr);
  const auto plan = backend.MakePlan(batch);
  const LinearLogprobs tiled =
      backend.HeadForward(plan.get(), reinterpret_cast<const T*>(device_hidden.data()), reinterpret_cast<T*>(device_unit.data()));
  backend.Fence();
  std::vector<T> unit(hidden.size());
  ASSERT_TRUE(CopyToHost(Device::kCuda, unit.data(), device_unit.data(), unit.size() * sizeof(T)).ok());

  for (const RatioLevel level : {RatioLevel::kToken, RatioLevel::kSequence, RatioLevel::kSequenceToken}) {
    LossOptions options;
    options.ratio_level = level;
    options.beta = 0.05;
    options.rollout_correction = RolloutCorrectionMode::kTokenTruncate;
    options.correction_max = 1.1;
    const LossResult of_full = LossOf(options, exact), of_tiles = LossOf(options, tiled);
    double difference = 0, norm = 0;
    for (std::size_t n = 0; n < static_cast<std::size_t>(kRows); ++n) {
      const double g = of_full.grad_logprobs[n / kTokens][n % kTokens],
                   tiled_g = of_tiles.grad_logprobs[n / kTokens][n % kTokens];
      for (std::size_t i = n * kWidth; i < (n + 1) * kWidth; ++i) {
        difference += std::pow(tiled_g * static_cast<double>(ToFloat(unit[i])) - g * exact_unit[i], 2);
        norm += std::pow(g * exact_unit[i], 2);
      }
    }
    const double error = std::sqrt(difference / norm);
    std::printf("%s, ratio level %d: loss %.9f, off by %.1e; gradient of hidden states %.1e relative\n",
                sizeof(T) == 4 ? "fp32" : "bf16", static_cast<int>(level), of_full.loss, std::abs(of_tiles.loss - of_full.loss),
                error);
    ASSERT_GT(norm, 0);
    EXPECT_NEAR(of_tiles.loss, of_full.loss, 1e-6);
    EXPECT_LT(error, most_gradient_error);
    EXPECT_GT(of_full.metrics.clip_low + of_full.metrics.clip_high, 0);  // the branches are reached
    EXPECT_GT(of_full.metrics.rollout_clipped, 0);
    EXPECT_GT(of_full.metrics.kl_sum, 0);
  }
}

TEST_F(HeadGpuTest, C21LossOverTheTiledHeadEqualsLogitsInFull) {
  CompareWithLogitsInFull<float>(device(), 1e-5);
  CompareWithLogitsInFull<Bf16>(device(), 4e-3);
}

// CASES C38: 20,480 tokens, and twice as many, over a vocabulary of 128,256, whose logits in full would be 9.8 GiB in fp32:
// scratch as planned and the same at both sizes, and no step of fifty takes more than the second.
TEST_F(HeadGpuTest, C38ScratchStaysWhatItIsWhateverTheContext) {
  constexpr std::int64_t kWidth = 256, kVocab = 128256;
  ModelConfig config = testing::TinyConfig();
  config.hidden_size = kWidth;
  config.vocab_size = kVocab;
  const std::vector<Bf16> weight = As<Bf16>(Random(kVocab * kWidth, 1, 0.05));
  DeviceBytes device_weight(weight.size() * 2);
  ASSERT_TRUE(device_weight.Upload(weight.data(), weight.size() * 2).ok());
  LinearHead<Bf16> head;
  head.weight = reinterpret_cast<const Bf16*>(device_weight.data());
  head.vocab_size = kVocab;
  head.width = kWidth;
  head.row_tile = 0;  // chosen
  CudaBackend<Bf16> backend(config, StorageFormat::kBf16, head, device(), nullptr);
  std::vector<std::uint64_t> scratch;
  for (const std::int64_t rows : {20480, 40960}) {
    MicroBatch batch;
    for (std::int64_t n = 0; n < rows; ++n) {
      batch.token_ids.push_back(0);
      batch.positions.push_back(0);
      batch.head_rows.push_back(n);
      batch.head_targets.push_back(n % kVocab);
    }
    const std::vector<Bf16> hidden = As<Bf16>(Random(rows * kWidth, 2, 0.5));
    DeviceBytes device_hidden(hidden.size() * 2);
    std::vector<std::uint64_t> peaks;
    for (int step = 1; step <= (rows == 20480 ? 50 : 3); ++step) {
      ASSERT_TRUE(device_hidden.Upload(hidden.data(), hidden.size() * 2).ok());
      const ArenaScope scope(arena_->span(), "activations", Device::kCuda);
      const auto plan = backend.MakePlan(batch);
      const std::uint64_t before = scope.used_bytes();
      Bf16* const in_place = reinterpret_cast<Bf16*>(device_hidden.data());
      const LinearLogprobs logprobs = backend.HeadForward(plan.get(), in_place, in_place);
      ASSERT_EQ(logprobs.logprobs.size(), static_cast<std::size_t>(rows));
      ASSERT_TRUE(std::isfinite(logprobs.logprobs[0]));
      peaks.push_back(scope.peak_bytes() - before);
    }
    const HeadTile tile = ChooseHeadTile(config, 2, 0, rows);
    const std::uint64_t results = 24 * static_cast<std::uint64_t>(rows);  // three doubles a row
    std::printf("%lld rows: scratch %.1f MiB, planned %.1f\n", static_cast<long long>(rows),
                static_cast<double>(peaks[1] - results) / (1 << 20), static_cast<double>(tile.scratch_bytes) / (1 << 20));
    EXPECT_LE(peaks[1] - results, kMaxHeadScratchBytes);
    EXPECT_LE(peaks[1] - results, tile.scratch_bytes + 4096);
    EXPECT_EQ(peaks.back(), peaks[1]);
    scratch.push_back(peaks[1] - results);
  }
  EXPECT_NEAR(static_cast<double>(scratch[0]), static_cast<double>(scratch[1]), 4096);
}

}  // namespace
}  // namespace tandem
