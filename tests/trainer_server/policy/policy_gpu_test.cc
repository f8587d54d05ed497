#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "common/gpu/stream.h"
#include "common/model/weight_codecs.h"
#include "common/torch/arena_allocator.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/support/device_bytes.h"
#include "tests/support/naive_transformer.h"
#include "tests/support/quantized_weights.h"
#include "tests/trainer_server/support/gpu_policy.h"
#include "tests/trainer_server/support/packed_groups.h"
#include "trainer_server/optim/adamw.h"
#include "trainer_server/policy/cuda_backend.h"
#include "trainer_server/policy/policy_model.h"

namespace tandem {
namespace {

using testing::AllLayers;
using testing::Cosine;
using testing::CpuPolicy;
using testing::DeviceBytes;
using testing::GpuPolicy;
using testing::Group;
using ::testing::HasSubstr;
using testing::Ids;
using testing::LargestDifference;
using testing::Pack;
using testing::PolicyGpuTest;
using testing::RandomIds;
using testing::RelativeError;
using testing::Result;
using testing::RoundWeights;
using testing::RowGradients;
using testing::ScaleMatrices;
using testing::TinyAdapter;
using testing::TinyModel;
using testing::TwoGroups;
using testing::Widen;

TEST_F(PolicyGpuTest, Fp32EqualsTheCpuInEveryFamily) {
  for (const ModelConfig& config : testing::FamilyConfigs()) {
    SCOPED_TRACE(config.family + (config.is_embedding_tied ? " tied" : ""));
    const TinyModel base(config);
    const TinyAdapter adapter(base.config, 4, testing::AllLinearKinds(), 0.5f, 3);
    for (const bool with_entropy : {false, true}) {
      for (const double dropout : {0.0, 0.25}) {
        PolicyOptions options = AllLayers();
        options.temperature = 0.7;
        options.dropout = dropout;
        options.logit_chunk = 50;  // more than one tile of rows
        const std::vector<MicroBatch> batches = Pack(TwoGroups(), 200);
        const Result cpu = CpuPolicy(base, options, adapter).Run(batches, with_entropy);
        const Result gpu = GpuPolicy(base, StorageFormat::kFp32, options, adapter, device()).Run(batches, with_entropy);
        const double logprob = LargestDifference(cpu.scores.logprobs, gpu.scores.logprobs),
                     entropy = LargestDifference(cpu.scores.entropies, gpu.scores.entropies),
                     cosine = Cosine(cpu.gradient, gpu.gradient), relative = RelativeError(gpu.gradient, cpu.gradient);
        std::printf("fp32 %s entropy=%d dropout=%.2f: log-probs %.2e, entropies %.2e, gradient cosine 1 - %.2e, relative %.2e\n",
                    config.family.c_str(), with_entropy, dropout, logprob, entropy, 1 - cosine, relative);
        EXPECT_LT(logprob, 1e-4);
        EXPECT_LT(entropy, 1e-4);
        EXPECT_GE(cosine, 0.99999);
        EXPECT_LT(relative, 1e-3);
      }
    }
  }
}

TEST_F(PolicyGpuTest, Bf16FollowsTheCpuOnTheSameWeights) {
  ModelConfig wide = testing::TinyConfig();
  wide.num_heads = 4;
  wide.num_kv_heads = 2;
  wide.head_dim = 64;
  wide.hidden_size = 256;
  wide.intermediate_size = 384;
  wide.vocab_size = 512;
  for (const ModelConfig& config : {testing::TinyConfig(), wide}) {
    const TinyModel base(config);
    ScaleMatrices(base, 8 / std::sqrt(static_cast<float>(config.hidden_size)));
    RoundWeights(base);
    const TinyAdapter adapter(base.config, 4, testing::AllLinearKinds(), 0.05f, 3);
    for (const bool with_entropy : {false, true}) {
      const PolicyOptions options = AllLayers(4, 0.05f);
      const std::vector<MicroBatch> batches = Pack(TwoGroups());
      const Result cpu = CpuPolicy(base, options, adapter).Run(batches, with_entropy);
      const Result gpu = GpuPolicy(base, StorageFormat::kBf16, options, adapter, device()).Run(batches, with_entropy);
      const double logprob = LargestDifference(cpu.scores.logprobs, gpu.scores.logprobs),
                   cosine = Cosine(cpu.gradient, gpu.gradient);
      double mean = 0;
      for (std::size_t i = 0; i < cpu.scores.logprobs.size(); ++i) {
        mean += std::abs(cpu.scores.logprobs[i] - gpu.scores.logprobs[i]) / static_cast<double>(cpu.scores.logprobs.size());
      }
      std::printf("bf16 d=%d entropy=%d: log-probs largest %.2e mean %.2e, gradient cosine %.6f, relative %.2e\n",
                  config.hidden_size, with_entropy, logprob, mean, cosine, RelativeError(gpu.gradient, cpu.gradient));
      EXPECT_LT(mean, 0.02);
      EXPECT_GE(cosine, 0.999);
    }
  }
}

TEST_F(PolicyGpuTest, FollowsTheCpuInTheShapeOfSmolLm2) {
  const ModelConfig config = testing::SmolLm2Config(4);
  const TinyModel base(config);
  ScaleMatrices(base, 1.f / 3);
  RoundWeights(base);
  const TinyAdapter adapter(base.config, 8, testing::AllLinearKinds(), 0.05f, 3);
  const PolicyOptions options = AllLayers(8, 0.05f);
  const std::vector<MicroBatch> batches = Pack(TwoGroups());
  const Result cpu = CpuPolicy(base, options, adapter).Run(batches, false);
  for (const StorageFormat format : {StorageFormat::kFp32, StorageFormat::kBf16}) {
    const bool is_fp32 = format == StorageFormat::kFp32;
    const Result gpu = GpuPolicy(base, format, options, adapter, device()).Run(batches, false);
    double mean = 0;
    for (std::size_t i = 0; i < cpu.scores.logprobs.size(); ++i) {
      mean += std::abs(cpu.scores.logprobs[i] - gpu.scores.logprobs[i]) / static_cast<double>(cpu.scores.logprobs.size());
    }
    const double logprob = LargestDifference(cpu.scores.logprobs, gpu.scores.logprobs),
                 cosine = Cosine(cpu.gradient, gpu.gradient);
    std::printf("SmolLM2's shape, %s: log-probs largest %.2e mean %.2e, gradient cosine 1 - %.2e, relative %.2e\n",
                StorageFormatName(format), logprob, mean, 1 - cosine, RelativeError(gpu.gradient, cpu.gradient));
    EXPECT_LT(logprob, is_fp32 ? 1e-4 : 0.2);
    EXPECT_LT(mean, is_fp32 ? 1e-5 : 0.02);
    EXPECT_GE(cosine, is_fp32 ? 0.99999 : 0.999);
  }
}

// Codes and the bf16 values that they stand for: the same products, but for the algorithm that cuBLASLt takes for their
// alignment.
TEST_F(PolicyGpuTest, WeightsInCodesTrainAsTheirValuesInBf16) {
  ModelConfig config = testing::TinyConfig();
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = 64;
  config.hidden_size = 256;
  config.intermediate_size = 448;
  for (const StorageFormat format : {StorageFormat::kFp8Row, StorageFormat::kFp8Block, StorageFormat::kNf4}) {
    for (const double dropout : {0.0, 0.25}) {
      const TinyModel base(config), values(config);
      const WeightLayout layout = WeightLayout::Create(config, format);
      testing::EncodedWeights(base.layout, base.weights->data(), layout).Decode(values.weights->data());
      const TinyAdapter adapter(config, 4, testing::AllLinearKinds(), 0.05f, 3);
      PolicyOptions options = AllLayers(4, 0.05f);
      options.dropout = dropout;
      const std::vector<MicroBatch> batches = Pack(TwoGroups());
      const Result codes = GpuPolicy(base, format, options, adapter, device()).Run(batches, true);
      const Result dense = GpuPolicy(values, StorageFormat::kBf16, options, adapter, device()).Run(batches, true);
      const double logprob = LargestDifference(codes.scores.logprobs, dense.scores.logprobs),
                   cosine = Cosine(codes.gradient, dense.gradient);
      std::printf("%s against its values in bf16, dropout=%.2f: log-probs %.2e, gradient cosine 1 - %.2e\n",
                  StorageFormatName(format), dropout, logprob, 1 - cosine);
      EXPECT_LT(logprob, 0.05);
      EXPECT_GE(cosine, 0.9999);
      // The test can fail: the weights before they were encoded are others.
      const Result other = GpuPolicy(base, StorageFormat::kBf16, options, adapter, device()).Run(batches, true);
      EXPECT_GT(LargestDifference(codes.scores.logprobs, other.scores.logprobs), 2 * logprob + 0.01);
    }
  }
}

TEST_F(PolicyGpuTest, ASharedPromptEqualsAPromptOfEachCompletionsOwn) {
  const TinyModel base;
  const TinyAdapter adapter(base.config, 4, testing::AllLinearKinds(), 0.5f, 3);
  const Ids prompt = RandomIds(1, 67);
  const std::vector<Ids> completions = {RandomIds(2, 33), RandomIds(3, 1), RandomIds(4, 70)};
  std::vector<Group> apart;
  for (const Ids& completion : completions) apart.push_back({prompt, {completion}});
  const std::vector<MicroBatch> shared = Pack({{prompt, completions}}), separate = Pack(apart);
  for (const StorageFormat format : {StorageFormat::kFp32, StorageFormat::kBf16}) {
    GpuPolicy policy(base, format, AllLayers(), adapter, device());
    const Result one = policy.Run(shared, false), many = policy.Run(separate, false);
    const double logprob = LargestDifference(one.scores.logprobs, many.scores.logprobs),
                 cosine = Cosine(one.gradient, many.gradient);
    std::printf("%s shared prompt: log-probs %.2e, gradient cosine 1 - %.2e\n", StorageFormatName(format), logprob, 1 - cosine);
    EXPECT_LT(logprob, format == StorageFormat::kFp32 ? 1e-5 : 0.1);
    EXPECT_GE(cosine, format == StorageFormat::kFp32 ? 0.999999 : 0.998);
  }
}

// CASES C25: alone, first, between and last in a pack, beside a long one, with rows after the end.
TEST_F(PolicyGpuTest, NeighboursInThePackDoNotMatter) {
  const TinyModel base;
  const TinyAdapter adapter(base.config, 4, testing::AllLinearKinds(), 0.5f, 3);
  const Group mine{RandomIds(1, 9), {RandomIds(2, 5)}}, small{RandomIds(3, 4), {RandomIds(4, 7), RandomIds(5, 1)}},
      large{RandomIds(6, 1100), {RandomIds(7, 30)}};
  for (const StorageFormat format : {StorageFormat::kFp32, StorageFormat::kBf16}) {
    GpuPolicy policy(base, format, AllLayers(), adapter, device());
    const std::vector<double> alone = policy.Score(Pack({mine}).front());
    ASSERT_EQ(alone.size(), 5u);
    const auto check = [&](const MicroBatch& batch, std::size_t first, const char* where) {
      const std::vector<double> scores = policy.Score(batch);
      ASSERT_GE(scores.size(), first + alone.size());
      for (std::size_t t = 0; t < alone.size(); ++t) {
        EXPECT_NEAR(scores[first + t], alone[t], format == StorageFormat::kFp32 ? 1e-5 : 0.05)
            << where << ", " << StorageFormatName(format);
      }
      for (const double gradient : policy.Run({batch}, false).gradient) {
        ASSERT_TRUE(std::isfinite(gradient)) << where << ", " << StorageFormatName(format);
      }
    };
    check(Pack({mine, small}).front(), 0, "first");
    check(Pack({small, mine, small}).front(), 8, "between");
    check(Pack({small, mine}).front(), 8, "last");
    check(Pack({large, mine}).front(), 30, "beside a long one");
    for (const int extra : {1, 17, 64}) {
      MicroBatch batch = Pack({small, mine}).front();
      batch.token_ids.resize(batch.token_ids.size() + static_cast<std::size_t>(extra), 3);
      batch.positions.resize(batch.token_ids.size(), 0);
      check(batch, 8, "rows after the end");
    }
  }
}

// CASES C23: what lies in memory that no row of the mask owns, NaN here, changes no bit.
TEST_F(PolicyGpuTest, RepeatsBitForBitOverMemoryFullOfNan) {
  const TinyModel base;
  const TinyAdapter adapter(base.config, 4, testing::AllLinearKinds(), 0.5f, 3);
  PolicyOptions options = AllLayers();
  options.dropout = 0.25;
  const std::vector<MicroBatch> batches = Pack(TwoGroups(), 200);
  for (const StorageFormat format : {StorageFormat::kFp32, StorageFormat::kBf16}) {
    GpuPolicy policy(base, format, options, adapter, device());
    const Result first = policy.Run(batches, true);
    arena_->Fill(0);
    const Result second = policy.Run(batches, true);
    EXPECT_EQ(first.scores.logprobs, second.scores.logprobs) << StorageFormatName(format);
    EXPECT_EQ(first.gradient, second.gradient) << StorageFormatName(format);
    for (const double gradient : first.gradient) ASSERT_TRUE(std::isfinite(gradient));
    arena_->Fill(0xff);
  }
}

// CASES C22: where the KL is clamped its gradient is 0, and a row gradient of 0 leaves nothing in the adapter.
TEST_F(PolicyGpuTest, RowsThatNobodyTrainsHaveNoGradient) {
  const TinyModel base;
  const TinyAdapter adapter(base.config, 4, testing::AllLinearKinds(), 0.5f, 3);
  const MicroBatch batch = Pack(TwoGroups()).front();
  for (const StorageFormat format : {StorageFormat::kFp32, StorageFormat::kBf16}) {
    GpuPolicy policy(base, format, AllLayers(), adapter, device());
    ASSERT_TRUE(policy.model()->ZeroGradients().ok());
    ASSERT_TRUE(policy.model()->Forward(batch, false, 0).ok());
    ASSERT_TRUE(policy.model()->Backward(std::vector<double>(batch.head_rows.size(), 0.0), {}).ok());
    for (const double gradient : policy.Gradients()) ASSERT_EQ(gradient, 0) << StorageFormatName(format);
  }
}

TEST_F(PolicyGpuTest, TheReferenceIsTheBaseOrTheStartingAdapter) {
  const TinyModel base;
  const TinyAdapter start(base.config, 3, {LinearKind::kQProj, LinearKind::kDownProj}, 0.5f, 3),
      now(base.config, 4, testing::AllLinearKinds(), 1.f, 4);
  const PolicyOptions as_start{.rank = 3, .scale = 0.5f, .targets = {LinearKind::kQProj, LinearKind::kDownProj}};
  GpuPolicy policy(base, StorageFormat::kBf16, AllLayers(4, 1.f), now, device()),
      as_policy(base, StorageFormat::kBf16, as_start, start, device());
  const MicroBatch batch = Pack(TwoGroups()).front();
  EXPECT_EQ(policy.Score(batch, PolicyKind::kReference), as_policy.Score(batch, PolicyKind::kReference));
  DeviceBytes slot(start.layout.total_bytes);
  ASSERT_TRUE(slot.Upload(start.slot->data(), start.layout.total_bytes).ok());
  ASSERT_TRUE(policy.model()->SetReference(slot.span(), start.layout, start.scale).ok());
  EXPECT_EQ(policy.Score(batch, PolicyKind::kReference), as_policy.Score(batch));
  EXPECT_NE(policy.Score(batch), as_policy.Score(batch));
}

// Some steps of the optimizer on each device: the adapters stay together.
TEST_F(PolicyGpuTest, OptimizerStepsMoveBothAdaptersAlike) {
  const std::size_t count = 5000;
  std::vector<float> cpu[4], gpu(count);
  for (std::vector<float>& array : cpu) array.assign(count, 0);
  for (std::size_t i = 0; i < count; ++i) cpu[0][i] = static_cast<float>(RandomUniform(1, i) - 0.5);
  std::vector<std::unique_ptr<DeviceBytes>> arrays;
  for (const std::vector<float>& array : cpu) {
    arrays.push_back(std::make_unique<DeviceBytes>(count * sizeof(float)));
    ASSERT_TRUE(arrays.back()->Upload(array.data(), count * sizeof(float)).ok());
  }
  const auto floats = [&](int i) {
    return std::span<float>(reinterpret_cast<float*>(arrays[static_cast<std::size_t>(i)]->data()), count);
  };
  const Buffer<double, Device::kCuda> scratch(1 << 16);
  for (std::uint64_t step = 1; step <= 5; ++step) {
    for (std::size_t i = 0; i < count; ++i) cpu[1][i] = static_cast<float>(RandomUniform(step, i) - 0.4);
    ASSERT_TRUE(arrays[1]->Upload(cpu[1].data(), count * sizeof(float)).ok());
    const auto on_cpu = AdamWStep({.weight_decay = 0.1}, 1e-2, step, cpu[0], cpu[1], cpu[2], cpu[3]);
    const auto on_gpu = AdamWStep({.weight_decay = 0.1}, 1e-2, step, floats(0), floats(1), floats(2), floats(3),
                                  {Device::kCuda, stream_.get(), scratch.data()});
    ASSERT_TRUE(on_cpu.ok() && on_gpu.ok()) << on_gpu.status();
    EXPECT_NEAR(on_gpu->grad_norm, on_cpu->grad_norm, 1e-6 * on_cpu->grad_norm);
  }
  ASSERT_TRUE(CopyToHost(Device::kCuda, gpu.data(), arrays[0]->data(), count * sizeof(float)).ok());
  for (std::size_t i = 0; i < count; ++i) ASSERT_NEAR(gpu[i], cpu[0][i], 1e-5) << i;
}

TEST_F(PolicyGpuTest, AMicroBatchBeyondTheLeaseIsResourceExhaustedAndTheNextOneRuns) {
  const TinyModel base;
  const TinyAdapter adapter(base.config, 4, testing::AllLinearKinds(), 0.5f, 3);
  GpuPolicy policy(base, StorageFormat::kBf16, AllLayers(), adapter, device());
  {
    const ArenaScope small(arena_->span().first(256 << 10), "activations", Device::kCuda);
    const auto refused = policy.model()->Forward(Pack(TwoGroups()).front(), false, 0);
    EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted) << refused.status();
    EXPECT_THAT(std::string(refused.status().message()), HasSubstr("activations"));
    EXPECT_THAT(std::string(refused.status().message()), HasSubstr("256.0 KiB"));
    EXPECT_EQ(small.used_bytes(), 0u);
  }
  EXPECT_FALSE(policy.Score(Pack(TwoGroups()).front()).empty());
}

// ------------------------------------------------------------------------------------------------------------------- the head

using Json = nlohmann::json;

std::vector<double> Flat(const Json& rows) {
  std::vector<double> values;
  for (const Json& row : rows) {
    if (row.is_array()) {
      for (const Json& value : row) values.push_back(value.get<double>());
    } else {
      values.push_back(row.get<double>());
    }
  }
  return values;
}

void ExpectNear(const std::vector<double>& values, const Json& expected, double tolerance, const std::string& what) {
  const std::vector<double> wanted = Flat(expected);
  ASSERT_EQ(values.size(), wanted.size()) << what;
  double largest = 1e-3;
  for (const double value : wanted) largest = std::max(largest, std::abs(value));
  for (std::size_t i = 0; i < wanted.size(); ++i) EXPECT_NEAR(values[i], wanted[i], tolerance * largest) << what << " " << i;
}

TEST_F(PolicyGpuTest, TheHeadEqualsTheGoldenCases) {
  const Json cases = Json::parse(std::ifstream(std::string(TANDEM_GOLDEN_DIR) + "/grpo_cases.json")).at("linear_logprob_cases");
  ASSERT_EQ(cases.size(), 7u);
  for (const auto& [row_tile, vocab_tile] : {std::pair{1, 1}, std::pair{2, 3}, std::pair{100, 100}}) {
    for (const Json& golden : cases) {
      SCOPED_TRACE(absl::StrCat(golden.at("name").get<std::string>(), ", tile ", row_tile, " x ", vocab_tile));
      const Json &inputs = golden.at("inputs"), &expected = golden.at("expected");
      const std::vector<double> hidden = Flat(inputs.at("hidden")), weight = Flat(inputs.at("weight")),
                                targets = Flat(inputs.at("targets"));
      ModelConfig config = testing::TinyConfig();
      config.vocab_size = static_cast<int>(inputs.at("weight").size());
      config.hidden_size = static_cast<int>(hidden.size() / targets.size());
      DeviceBytes device_weight(weight.size() * 4), device_hidden(hidden.size() * 4), unit(hidden.size() * 4);
      const std::vector<float> weight_floats(weight.begin(), weight.end()), hidden_floats(hidden.begin(), hidden.end());
      ASSERT_TRUE(device_weight.Upload(weight_floats.data(), weight.size() * 4).ok());
      ASSERT_TRUE(device_hidden.Upload(hidden_floats.data(), hidden.size() * 4).ok());
      LinearHead<float> head;
      head.weight = reinterpret_cast<const float*>(device_weight.data());
      head.vocab_size = config.vocab_size;
      head.width = config.hidden_size;
      head.temperature = inputs.at("temperature");
      head.logit_scale = inputs.at("logit_scale");
      head.softcap = inputs.at("softcap").is_null() ? 0 : inputs.at("softcap").get<double>();
      head.row_tile = row_tile;
      head.vocab_tile = vocab_tile;
      CudaBackend<float> backend(config, StorageFormat::kFp32, head, device(), nullptr);
      MicroBatch batch;
      for (std::size_t n = 0; n < targets.size(); ++n) {
        batch.token_ids.push_back(0);
        batch.positions.push_back(0);
        batch.head_rows.push_back(static_cast<std::int64_t>(n));
        batch.head_targets.push_back(static_cast<std::int64_t>(targets[n]));
      }
      const auto plan = backend.MakePlan(batch);
      const float* const h = reinterpret_cast<const float*>(device_hidden.data());
      float* const out = reinterpret_cast<float*>(unit.data());
      const auto fetch = [&] {
        std::vector<float> values(hidden.size());
        backend.Fence();
        EXPECT_TRUE(CopyToHost(Device::kCuda, values.data(), unit.data(), values.size() * 4).ok());
        return std::vector<double>(values.begin(), values.end());
      };
      const LinearLogprobs forward = backend.HeadForward(plan.get(), h, out);
      ExpectNear(forward.logprobs, expected.at("logprobs"), 1e-5, "logprob");
      ExpectNear(forward.lse, expected.at("lse"), 1e-5, "lse");
      ExpectNear(forward.entropies, expected.at("entropies"), 1e-5, "entropy");
      ExpectNear(fetch(), expected.at("unit_grad_hidden"), 1e-5, "unit gradient");
      EXPECT_EQ(backend.HeadForward(plan.get(), h, nullptr).logprobs, forward.logprobs);
      backend.HeadBackward(plan.get(), h, forward, Flat(inputs.at("grad_logprobs")), Flat(inputs.at("grad_entropies")), out);
      ExpectNear(fetch(), expected.at("grad_hidden"), 1e-5, "hidden gradient");
    }
  }
}

}  // namespace
}  // namespace tandem
