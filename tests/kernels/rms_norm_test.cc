#include "kernels/rms_norm/rms_norm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "common/base/random.h"

namespace tandem {
namespace {

RmsNormParams Params(const std::vector<float>& input, const std::vector<float>& weight, std::vector<float>* output,
                     std::int64_t width) {
  return {input.data(), weight.data(), output->data(), static_cast<std::int64_t>(input.size()) / width, width, 1e-5f};
}

TEST(RmsNormTest, EqualsAHandComputedRow) {
  const std::vector<float> input = {3, -4}, weight = {1, 2};
  std::vector<float> output(2);
  ASSERT_TRUE(RmsNorm(Params(input, weight, &output, 2), Device::kCpu, nullptr).ok());
  const double scale = 1 / std::sqrt(12.5 + 1e-5);
  EXPECT_NEAR(output[0], 3 * scale, 1e-6);
  EXPECT_NEAR(output[1], -8 * scale, 1e-6);
}

TEST(RmsNormTest, RowsHaveUnitMeanSquareAndDoNotDependOnTheirScale) {
  constexpr std::int64_t kWidth = 97, kRows = 5;
  std::vector<float> input(kWidth * kRows), scaled, weight(kWidth, 1), output(input.size()), scaled_output(input.size());
  for (std::size_t i = 0; i < input.size(); ++i) input[i] = static_cast<float>(RandomUniform(1, i) - 0.5) * 100;
  for (float x : input) scaled.push_back(x * 64);
  ASSERT_TRUE(RmsNorm(Params(input, weight, &output, kWidth), Device::kCpu, nullptr).ok());
  ASSERT_TRUE(RmsNorm(Params(scaled, weight, &scaled_output, kWidth), Device::kCpu, nullptr).ok());
  for (std::int64_t row = 0; row < kRows; ++row) {
    double sum = 0;
    for (std::int64_t i = 0; i < kWidth; ++i) sum += std::pow(output[static_cast<std::size_t>(row * kWidth + i)], 2);
    EXPECT_NEAR(sum / kWidth, 1, 1e-5);
  }
  for (std::size_t i = 0; i < output.size(); ++i) EXPECT_NEAR(scaled_output[i], output[i], 1e-5);
}

TEST(RmsNormTest, ZeroRowsAreNothingAndBadWidthsAreRefused) {
  EXPECT_TRUE(RmsNorm({nullptr, nullptr, nullptr, 0, 16, 0}, Device::kCpu, nullptr).ok());
  for (std::int64_t width : {0, -1, 65537}) {
    EXPECT_TRUE(absl::IsInvalidArgument(RmsNorm({nullptr, nullptr, nullptr, 1, width, 0}, Device::kCpu, nullptr))) << width;
  }
}

}  // namespace
}  // namespace tandem
