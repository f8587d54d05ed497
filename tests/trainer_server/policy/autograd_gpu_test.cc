// Gradients on the GPU against LibTorch's autograd: fp32 the same, bf16 no worse than PyTorch's own bf16.
#include <cstdio>
#include <vector>

#include "gtest/gtest.h"
#include "tests/trainer_server/support/autograd_reference.h"
#include "tests/trainer_server/support/gpu_policy.h"

namespace tandem {
namespace {

using testing::AllLayers;
using testing::AutogradResult;
using testing::Cosine;
using testing::GpuPolicy;
using testing::LargestDifference;
using testing::Pack;
using testing::PolicyGpuTest;
using testing::RandomIds;
using testing::RelativeError;
using testing::Result;
using testing::RowGradients;
using testing::RunAutograd;
using testing::TinyAdapter;
using testing::TinyModel;

// The reference itself, without a GPU.
TEST(AutogradTest, EqualsTheCpusPolicy) {
  const TinyModel base;
  const TinyAdapter adapter(base.config, 4, testing::AllLinearKinds(), 0.5f, 3);
  const PolicyOptions options = AllLayers();
  const std::vector<MicroBatch> batches = Pack({{RandomIds(1, 20), {RandomIds(2, 30)}}});
  const AutogradResult exact = RunAutograd(base, options, adapter, batches[0], RowGradients(batches[0], 1), false);
  const Result ours = testing::CpuPolicy(base, options, adapter).Run(batches, false);
  EXPECT_LT(LargestDifference(exact.logprobs, ours.scores.logprobs), 1e-4);
  EXPECT_GE(Cosine(exact.gradient, ours.gradient), 0.99999);
  EXPECT_LT(RelativeError(ours.gradient, exact.gradient), 1e-3);
}

class AutogradGpuTest : public PolicyGpuTest {
 protected:
  AutogradGpuTest() : PolicyGpuTest(std::uint64_t{3} << 30) {}

  void Compare(const char* name, const ModelConfig& config, float matrix_scale, int rank, std::size_t prompt,
               std::size_t completion, double least_bf16_cosine = 0.999) {
    const TinyModel base(config);
    testing::ScaleMatrices(base, matrix_scale);
    testing::RoundWeights(base);
    const TinyAdapter adapter(config, rank, testing::AllLinearKinds(), 0.05f, 3);
    const PolicyOptions options = AllLayers(rank, 0.05f);
    const std::vector<MicroBatch> batches = Pack({{RandomIds(1, prompt), {RandomIds(2, completion)}}});
    const std::vector<double> grads = RowGradients(batches[0], 1);
    const AutogradResult exact = RunAutograd(base, options, adapter, batches[0], grads, false),
                         rounded = RunAutograd(base, options, adapter, batches[0], grads, true);
    const double torch_cosine = Cosine(exact.gradient, rounded.gradient);
    for (const StorageFormat format : {StorageFormat::kFp32, StorageFormat::kBf16}) {
      const Result ours = GpuPolicy(base, format, options, adapter, device()).Run(batches, false);
      const double cosine = Cosine(exact.gradient, ours.gradient);
      std::printf(
          "%s %s: log-probs off by %.2e (PyTorch's bf16 %.2e), gradient cosine 1 - %.2e (PyTorch's bf16 1 - %.2e), relative "
          "%.2e\n",
          name, StorageFormatName(format), LargestDifference(exact.logprobs, ours.scores.logprobs),
          LargestDifference(exact.logprobs, rounded.logprobs), 1 - cosine, 1 - torch_cosine,
          RelativeError(ours.gradient, exact.gradient));
      if (format == StorageFormat::kFp32) {
        EXPECT_GE(cosine, 0.99999) << name;
      } else {
        EXPECT_GE(cosine, least_bf16_cosine) << name;
        EXPECT_LE(1 - cosine, 1.05 * (1 - torch_cosine)) << name;
      }
    }
  }
};

TEST_F(AutogradGpuTest, ATinyModel) { Compare("tiny", testing::TinyConfig(), 1, 4, 40, 90); }

TEST_F(AutogradGpuTest, TheShapeOfSmolLm2) {
  // Random weights of so many layers multiply rounding errors as trained ones do not.
  Compare("SmolLM2's shape", testing::SmolLm2Config(30), 1.f / 3, 8, 60, 140, 0.997);
}

TEST_F(AutogradGpuTest, OneLayerOfLlama8B) {
  ModelConfig config = testing::TinyConfig(/*is_embedding_tied=*/false);
  config.num_layers = 1;
  config.hidden_size = 4096;
  config.intermediate_size = 14336;
  config.num_heads = 32;
  config.num_kv_heads = 8;
  config.head_dim = 128;
  config.vocab_size = 4096;
  config.rope_theta = 500000;
  Compare("one layer of Llama-3.1-8B", config, 0.125f, 16, 100, 400);
}

}  // namespace
}  // namespace tandem
