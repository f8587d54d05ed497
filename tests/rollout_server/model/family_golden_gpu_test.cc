#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "rollout_server/model/decoder_model.h"
#include "tests/kernels/device_array.h"
#include "tests/rollout_server/model/family_steps.h"
#include "tests/support/family_golden.h"

namespace tandem {
namespace {

using testing::FamilyGolden;

std::unique_ptr<DeviceArray> OnDevice(std::span<const std::byte> bytes) {
  return std::make_unique<DeviceArray>(std::vector<std::byte>(bytes.begin(), bytes.end()));
}

// The golden weights are bf16 numbers, so only activations are rounded: 2^-9 of what each operation gives. Logits have a standard
// deviation of about 2; a bias, norm or rotation left out moves them by as much.
constexpr double kMeanTolerance = 0.03, kMostTolerance = 0.25;

void ExpectClose(DecoderModel* decoder, const Logits& logits, const std::vector<std::vector<float>>& expected,
                 const std::string& what) {
  ASSERT_EQ(logits.device, Device::kCuda);
  ASSERT_EQ(static_cast<std::size_t>(logits.num_rows), expected.size());
  ASSERT_EQ(decoder->Fence(), absl::OkStatus());
  const auto vocab_size = static_cast<std::size_t>(logits.vocab_size);
  std::vector<float> values(expected.size() * vocab_size);
  ASSERT_EQ(CopyToHost(Device::kCuda, values.data(), logits.data, values.size() * sizeof(float)), absl::OkStatus());
  double sum = 0, most = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double error = std::abs(static_cast<double>(values[i]) - static_cast<double>(expected[i / vocab_size][i % vocab_size]));
    ASSERT_TRUE(std::isfinite(error)) << what << " row " << i / vocab_size << " token " << i % vocab_size << " is " << values[i];
    sum += error;
    most = std::max(most, error);
  }
  const double mean = sum / static_cast<double>(values.size());
  std::printf("%s: mean absolute error %.4f, largest %.4f, of %zu logits\n", what.c_str(), mean, most, values.size());
  EXPECT_LE(mean, kMeanTolerance) << what;
  EXPECT_LE(most, kMostTolerance) << what;
}

TEST(FamilyGoldenGpuTest, PrefillAndDecodeGiveTheLogitsOfTransformers) {
  if (!HasCudaDevice()) GTEST_SKIP() << "no CUDA device";
  for (const char* family : testing::kGoldenFamilies) {
    SCOPED_TRACE(family);
    const FamilyGolden golden = testing::LoadFamilyGolden(family, StorageFormat::kBf16);
    DecoderModelOptions options{.device = Device::kCuda,
                                .weight_format = StorageFormat::kBf16,
                                .kv_dtype = DType::kBf16,
                                .block_tokens = 16,
                                .num_blocks = 4};
    const std::vector<std::byte> cache_bytes(4 * DecoderModel::BlockBytes(golden.config, 16, DType::kBf16));
    const std::vector<std::byte> workspace_bytes(DecoderModel::WorkspaceBytes(golden.config, options));
    const auto weights = OnDevice(golden.weights->span()), cache = OnDevice(cache_bytes), workspace = OnDevice(workspace_bytes);
    options.workspace = {static_cast<std::byte*>(workspace->data()), workspace_bytes.size()};
    const auto decoder = DecoderModel::Create(golden.config, golden.layout, static_cast<const std::byte*>(weights->data()),
                                              {static_cast<std::byte*>(cache->data()), cache_bytes.size()}, options);
    ASSERT_TRUE(decoder.ok()) << decoder.status();
    const auto prefill = (*decoder)->Run(testing::PrefillStep(golden));
    ASSERT_TRUE(prefill.ok()) << prefill.status();
    ExpectClose(decoder->get(), *prefill, golden.prefill_logits, absl::StrCat(family, " prefill"));
    const auto decode = (*decoder)->Run(testing::DecodeStep(golden));
    ASSERT_TRUE(decode.ok()) << decode.status();
    ExpectClose(decoder->get(), *decode, {golden.decode_logits}, absl::StrCat(family, " decode"));
    cache->Read(absl::StrCat(family, " cache"));
    workspace->Read(absl::StrCat(family, " workspace"));
  }
}

}  // namespace
}  // namespace tandem
