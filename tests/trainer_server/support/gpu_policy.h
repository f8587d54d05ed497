// Policies on the GPU and on the CPU over the same tiny model, for tests that compare them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/gpu/stream.h"
#include "common/model/weight_codecs.h"
#include "common/torch/arena_allocator.h"
#include "gtest/gtest.h"
#include "tests/support/device_bytes.h"
#include "tests/support/naive_transformer.h"
#include "tests/support/quantized_weights.h"
#include "tests/trainer_server/support/packed_groups.h"
#include "trainer_server/policy/policy_model.h"

namespace tandem::testing {

// SmolLM2's sizes, of so many layers: several tiles of the vocabulary, heads of 64 in groups of three.
inline ModelConfig SmolLm2Config(int num_layers) {
  ModelConfig config = TinyConfig();
  config.num_layers = num_layers;
  config.hidden_size = 576;
  config.intermediate_size = 1536;
  config.num_heads = 9;
  config.num_kv_heads = 3;
  config.head_dim = 64;
  config.vocab_size = 49152;
  config.rope_theta = 100000;
  return config;
}

// The model with its weights rounded to bf16, as fp32 values.
inline void RoundWeights(const TinyModel& model) {
  float* values = model.weights->floats();
  for (std::uint64_t i = 0; i < model.weights->span().size() / sizeof(float); ++i) {
    values[i] = Bf16ToFloat(FloatToBf16(values[i]));
  }
}

// Every matrix times `factor`: wider models have smaller weights.
inline void ScaleMatrices(const TinyModel& model, float factor) {
  for (const TensorPlace* place : model.layout.Tensors()) {
    if (place->shape.size() != 2) continue;
    float* values = model.Weight(*place);
    for (std::uint64_t i = 0; i < place->size_bytes / sizeof(float); ++i) values[i] *= factor;
  }
}

// The same weights in another format's layout.
inline std::vector<std::byte> InFormat(const TinyModel& model, const WeightLayout& layout) {
  if (layout.format != StorageFormat::kFp32) { return EncodedWeights(model.layout, model.weights->data(), layout).bytes(); }
  const std::span<const std::byte> bytes = model.weights->span();
  return {bytes.begin(), bytes.end()};
}

inline double Cosine(const std::vector<double>& a, const std::vector<double>& b) {
  double product = 0, of_a = 0, of_b = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    product += a[i] * b[i];
    of_a += a[i] * a[i];
    of_b += b[i] * b[i];
  }
  return product / std::sqrt(of_a * of_b);
}

inline double LargestDifference(const std::vector<double>& a, const std::vector<double>& b) {
  double largest = a.size() == b.size() ? 0 : INFINITY;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    const double difference = std::abs(a[i] - b[i]);
    largest = std::isnan(difference) ? NAN : std::max(largest, difference);
    if (std::isnan(largest)) break;
  }
  return largest;
}

struct Result {
  HeadScores scores;
  std::vector<double> gradient;
};

// Forward and backward passes of a policy whose adapter memory is read by `read`.
inline Result RunPasses(PolicyModel* model, const std::vector<MicroBatch>& batches, bool with_entropy,
                        const std::function<std::vector<double>()>& read) {
  Result result;
  EXPECT_TRUE(model->ZeroGradients().ok());
  for (const MicroBatch& batch : batches) {
    const auto scores = model->Forward(batch, with_entropy, 3);
    EXPECT_TRUE(scores.ok()) << scores.status();
    if (!scores.ok()) return result;
    result.scores.logprobs.insert(result.scores.logprobs.end(), scores->logprobs.begin(), scores->logprobs.end());
    result.scores.entropies.insert(result.scores.entropies.end(), scores->entropies.begin(), scores->entropies.end());
    const absl::Status status =
        model->Backward(RowGradients(batch, 1), with_entropy ? RowGradients(batch, 2) : std::vector<double>());
    EXPECT_TRUE(status.ok()) << status;
  }
  result.gradient = read();
  return result;
}

inline std::vector<double> Widen(const float* values, std::size_t count) { return {values, values + count}; }

class CpuPolicy {
 public:
  CpuPolicy(const TinyModel& base, const PolicyOptions& options, const TinyAdapter& start)
      : masters_(start.layout.total_bytes), gradients_(start.layout.total_bytes) {
    std::memcpy(masters_.data(), start.slot->data(), start.layout.total_bytes);
    model_ = PolicyModel::Create(base.config, base.layout, base.weights->data(), {masters_.span(), gradients_.span()}, options)
                 .value();
  }
  PolicyModel* model() { return model_.get(); }
  Result Run(const std::vector<MicroBatch>& batches, bool with_entropy) {
    return RunPasses(model_.get(), batches, with_entropy,
                     [&] { return Widen(gradients_.floats(), gradients_.span().size() / sizeof(float)); });
  }

 private:
  AlignedBytes masters_, gradients_;
  std::unique_ptr<PolicyModel> model_;
};

class PolicyGpuTest : public ::testing::Test {
 protected:
  static constexpr std::uint64_t kDefaultArenaBytes = std::uint64_t{256} << 20;
  explicit PolicyGpuTest(std::uint64_t arena_bytes = kDefaultArenaBytes) : arena_bytes_(arena_bytes) {}

  void SetUp() override {
    if (!HasCudaDevice()) GTEST_SKIP() << "no GPU is visible";
    arena_ = std::make_unique<DeviceBytes>(arena_bytes_);
    arena_->Fill(0xff);  // NaN: nothing may read what it did not write
    workspace_ = std::make_unique<DeviceBytes>(kGemmWorkspaceBytes);
    stream_ = Stream::Create(Device::kCuda).value();
    gemm_ = Gemm::Create(Device::kCuda, workspace_->span()).value();
    scope_ = std::make_unique<ArenaScope>(arena_->span(), "activations", Device::kCuda);
  }
  PolicyDevice device() const { return {Device::kCuda, stream_.get(), gemm_.get()}; }

  const std::uint64_t arena_bytes_;
  std::unique_ptr<DeviceBytes> arena_, workspace_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Gemm> gemm_;
  std::unique_ptr<ArenaScope> scope_;
};

class GpuPolicy {
 public:
  GpuPolicy(const TinyModel& base, StorageFormat format, const PolicyOptions& options, const TinyAdapter& start,
            const PolicyDevice& device)
      : layout_(WeightLayout::Create(base.config, format)),
        weights_(layout_.total_bytes),
        masters_(start.layout.total_bytes),
        gradients_(start.layout.total_bytes) {
    const std::vector<std::byte> bytes = InFormat(base, layout_);
    EXPECT_TRUE(weights_.Upload(bytes.data(), bytes.size()).ok());
    EXPECT_TRUE(masters_.Upload(start.slot->data(), start.layout.total_bytes).ok());
    auto model =
        PolicyModel::Create(base.config, layout_, weights_.data(), {masters_.span(), gradients_.span()}, options, device);
    EXPECT_TRUE(model.ok()) << model.status();
    model_ = *std::move(model);
  }
  PolicyModel* model() { return model_.get(); }
  std::vector<double> Gradients() const {
    std::vector<float> values(gradients_.span().size() / sizeof(float));
    EXPECT_TRUE(CopyToHost(Device::kCuda, values.data(), gradients_.data(), gradients_.span().size()).ok());
    return Widen(values.data(), values.size());
  }
  Result Run(const std::vector<MicroBatch>& batches, bool with_entropy) {
    return RunPasses(model_.get(), batches, with_entropy, [&] { return Gradients(); });
  }
  std::vector<double> Score(const MicroBatch& batch, PolicyKind kind = PolicyKind::kPolicy) {
    auto scores = model_->Score(batch, kind);
    EXPECT_TRUE(scores.ok()) << scores.status();
    return scores.ok() ? scores->logprobs : std::vector<double>();
  }

 private:
  WeightLayout layout_;
  DeviceBytes weights_, masters_, gradients_;
  std::unique_ptr<PolicyModel> model_;
};

}  // namespace tandem::testing
