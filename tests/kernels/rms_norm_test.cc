#include "kernels/rms_norm/rms_norm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "tests/kernels/kernel_arrays.h"

namespace tandem {
namespace {

constexpr float kEpsilon = 1e-5f;

RmsNormParams Params(const std::vector<float>& input, const std::vector<float>& weight, std::vector<float>* output,
                     std::int64_t width) {
  return {.input = input.data(),
          .weight = weight.data(),
          .output = output->data(),
          .num_rows = static_cast<std::int64_t>(output->size()) / width,
          .width = width,
          .epsilon = kEpsilon};
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

TEST(RmsNormTest, ABf16ResultIsTheFp32OneRoundedOnce) {
  constexpr std::int64_t kRows = 3, kWidth = 17;
  const HostArray weight = HostArray::Random(DType::kBf16, kWidth, 3);
  HostArray wide_weight(DType::kFp32, kWidth), output(DType::kBf16, kRows * kWidth);
  for (std::int64_t i = 0; i < kWidth; ++i) wide_weight.Set(i, weight.Get(i));
  const HostArray input = HostArray::Random(DType::kFp32, kRows * kWidth, 1);
  std::vector<float> expected(kRows * kWidth);
  RmsNormParams params{.dtype = DType::kBf16,
                       .input = input.floats(),
                       .weight = weight.data(),
                       .output = output.data(),
                       .num_rows = kRows,
                       .width = kWidth,
                       .epsilon = kEpsilon};
  ASSERT_TRUE(RmsNorm(params, Device::kCpu, nullptr).ok());
  params.dtype = DType::kFp32;
  params.weight = wide_weight.data();
  params.output = expected.data();
  ASSERT_TRUE(RmsNorm(params, Device::kCpu, nullptr).ok());
  for (std::int64_t i = 0; i < output.count(); ++i) {
    EXPECT_EQ(output.Get(i), Bf16ToFloat(FloatToBf16(expected[static_cast<std::size_t>(i)]))) << i;
  }
}

TEST(RmsNormTest, RowsAreGatheredByTheirIndex) {
  constexpr std::int64_t kWidth = 5;
  const std::vector<std::int32_t> rows = {2, 0, 2};
  std::vector<float> input(3 * kWidth), weight(kWidth, 1), all(input.size()), gathered(rows.size() * kWidth);
  for (std::size_t i = 0; i < input.size(); ++i) input[i] = static_cast<float>(RandomUniform(9, i));
  ASSERT_TRUE(RmsNorm(Params(input, weight, &all, kWidth), Device::kCpu, nullptr).ok());
  RmsNormParams params = Params(input, weight, &gathered, kWidth);
  params.rows = rows.data();
  ASSERT_TRUE(RmsNorm(params, Device::kCpu, nullptr).ok());
  for (std::size_t i = 0; i < gathered.size(); ++i) {
    EXPECT_EQ(gathered[i], all[static_cast<std::size_t>(rows[i / kWidth]) * kWidth + i % kWidth]) << i;
  }
}

TEST(RmsNormBackwardTest, IsTheFiniteDifferenceAndIsAdded) {
  constexpr std::int64_t kWidth = 6;
  constexpr double kStep = 1e-4;
  const std::vector<float> weight = {1, 0.5f, -2, 3, 0.25f, 1}, grads = {1, -2, 0.5f, 1, 3, -1};
  std::vector<float> input(2 * kWidth, 7), sum(2 * kWidth, 10);
  for (std::size_t i = 0; i < kWidth; ++i) input[kWidth + i] = static_cast<float>(RandomUniform(4, i) * 2 - 1);
  const std::vector<std::int32_t> rows = {1};
  ASSERT_TRUE(RmsNormBackward({.input = input.data(),
                               .weight = weight.data(),
                               .grad_output = grads.data(),
                               .grad_input = sum.data(),
                               .rows = rows.data(),
                               .num_rows = 1,
                               .width = kWidth,
                               .epsilon = kEpsilon},
                              Device::kCpu, nullptr)
                  .ok());
  const auto objective = [&](std::size_t changed, double change) {
    double squares = 0, total = 0;
    const auto x = [&](std::size_t i) { return static_cast<double>(input[kWidth + i]) + (i == changed ? change : 0); };
    for (std::size_t i = 0; i < kWidth; ++i) squares += x(i) * x(i);
    for (std::size_t i = 0; i < kWidth; ++i) {
      total += static_cast<double>(grads[i]) * static_cast<double>(weight[i]) * x(i) / std::sqrt(squares / kWidth + 1e-5);
    }
    return total;
  };
  for (std::size_t i = 0; i < kWidth; ++i) {
    EXPECT_EQ(sum[i], 10) << "a row that is not named";
    EXPECT_NEAR(sum[kWidth + i] - 10, (objective(i, kStep) - objective(i, -kStep)) / (2 * kStep), 1e-5) << i;
  }
}

TEST(RmsNormTest, ZeroRowsAreNothingAndBadShapesAreRefused) {
  EXPECT_TRUE(RmsNorm({.num_rows = 0, .width = 16}, Device::kCpu, nullptr).ok());
  EXPECT_TRUE(RmsNormBackward({.num_rows = 0, .width = 16}, Device::kCpu, nullptr).ok());
  for (const std::int64_t width : {0, -1, 65537}) {
    EXPECT_TRUE(absl::IsInvalidArgument(RmsNorm({.num_rows = 1, .width = width}, Device::kCpu, nullptr))) << width;
    EXPECT_TRUE(absl::IsInvalidArgument(RmsNormBackward({.num_rows = 1, .width = width}, Device::kCpu, nullptr))) << width;
  }
  EXPECT_TRUE(absl::IsInvalidArgument(RmsNorm({.dtype = DType::kFp8E3m4, .num_rows = 1, .width = 8}, Device::kCpu, nullptr)));
}

}  // namespace
}  // namespace tandem
