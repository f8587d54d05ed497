// rope, swiglu and embedding on the CPU.
#include <gtest/gtest.h>

#include <cmath>
#include <complex>
#include <vector>

#include "kernels/embedding/embedding.h"
#include "kernels/rope/rope.h"
#include "kernels/swiglu/swiglu.h"
#include "tests/kernels/kernel_arrays.h"

namespace tandem {
namespace {

TEST(RopeTest, TurnsPairsAsComplexNumbersAndBack) {
  constexpr std::int64_t kHeadDim = 6, kHalf = 3, kHeads = 2, kStride = 15, kRows = 2;
  const std::vector<std::int32_t> positions = {3, 1};
  std::vector<float> cosines, sines;
  const auto angle = [](std::int64_t position, std::int64_t i) { return static_cast<double>(position) / std::pow(10.0, i); };
  for (std::int64_t position = 0; position < 4; ++position) {
    for (std::int64_t i = 0; i < kHalf; ++i) {
      cosines.push_back(static_cast<float>(std::cos(angle(position, i))));
      sines.push_back(static_cast<float>(std::sin(angle(position, i))));
    }
  }
  HostArray x = HostArray::Random(DType::kFp32, kRows * kStride, 1);
  const HostArray before = x;
  RopeParams params{.x = x.data(), .num_rows = kRows, .row_stride = kStride, .num_heads = kHeads, .head_dim = kHeadDim};
  params.positions = positions.data();
  params.cosines = cosines.data();
  params.sines = sines.data();
  ASSERT_EQ(Rope(params, Device::kCpu, nullptr), absl::OkStatus());
  for (std::int64_t row = 0; row < kRows; ++row) {
    for (std::int64_t i = 0; i < kStride; ++i) {
      const std::int64_t at = row * kStride + i;
      if (i >= kHeads * kHeadDim) {
        EXPECT_EQ(x.Get(at), before.Get(at)) << "behind the heads";
      } else if (i % kHeadDim < kHalf) {
        const std::complex<double> turned = std::complex<double>(before.Get(at), before.Get(at + kHalf)) *
                                            std::polar(1.0, angle(positions[static_cast<std::size_t>(row)], i % kHeadDim));
        EXPECT_NEAR(x.Get(at), turned.real(), 1e-6) << at;
        EXPECT_NEAR(x.Get(at + kHalf), turned.imag(), 1e-6) << at;
      }
    }
  }
  params.sign = -1;
  ASSERT_EQ(Rope(params, Device::kCpu, nullptr), absl::OkStatus());
  ExpectClose(x, before, 1e-6, 1e-6, "there and back");
}

TEST(RopeTest, RefusesHeadsThatDoNotFit) {
  const RopeParams good{.num_rows = 0, .row_stride = 12, .num_heads = 2, .head_dim = 6};
  EXPECT_EQ(Rope(good, Device::kCpu, nullptr), absl::OkStatus());
  const auto refuses = [](const RopeParams& params) { return absl::IsInvalidArgument(Rope(params, Device::kCpu, nullptr)); };
  EXPECT_TRUE(refuses({.num_rows = 0, .row_stride = 12, .num_heads = 3, .head_dim = 6}));
  EXPECT_TRUE(refuses({.num_rows = 0, .row_stride = 12, .num_heads = 2, .head_dim = 5}));
  EXPECT_TRUE(refuses({.num_rows = 0, .row_stride = 12, .num_heads = 0, .head_dim = 6}));
  EXPECT_TRUE(refuses({.num_rows = -1, .row_stride = 12, .num_heads = 2, .head_dim = 6}));
}

double Silu(double x) { return x / (1 + std::exp(-x)); }

TEST(SwigluTest, EqualsTheFormulaAndItsGradientTheFiniteDifference) {
  constexpr std::int64_t kRows = 2, kWidth = 5;
  constexpr double kStep = 1e-5;
  HostArray gate_up = HostArray::Random(DType::kFp32, kRows * 2 * kWidth, 1, 3), output(DType::kFp32, kRows * kWidth);
  ASSERT_EQ(
      Swiglu({.gate_up = gate_up.floats(), .output = output.data(), .num_rows = kRows, .width = kWidth}, Device::kCpu, nullptr),
      absl::OkStatus());
  HostArray gradient = gate_up, output_again(DType::kFp32, kRows * kWidth);
  const HostArray grad_output = HostArray::Random(DType::kFp32, kRows * kWidth, 2);
  ASSERT_EQ(SwigluBackward({.gate_up = gradient.data(),
                            .grad_output = grad_output.data(),
                            .grad_gate_up = gradient.data(),
                            .output = output_again.data(),
                            .num_rows = kRows,
                            .width = kWidth},
                           Device::kCpu, nullptr),
            absl::OkStatus());
  for (std::int64_t row = 0; row < kRows; ++row) {
    for (std::int64_t i = 0; i < kWidth; ++i) {
      const std::int64_t gate_at = row * 2 * kWidth + i, up_at = gate_at + kWidth;
      const double gate = gate_up.Get(gate_at), up = gate_up.Get(up_at), grad = grad_output.Get(row * kWidth + i);
      EXPECT_NEAR(output.Get(row * kWidth + i), Silu(gate) * up, 1e-6);
      EXPECT_EQ(output_again.Get(row * kWidth + i), output.Get(row * kWidth + i));
      EXPECT_NEAR(gradient.Get(gate_at), grad * up * (Silu(gate + kStep) - Silu(gate - kStep)) / (2 * kStep), 1e-6);
      EXPECT_NEAR(gradient.Get(up_at), grad * Silu(gate), 1e-6);
    }
  }
}

TEST(EmbeddingTest, WidensRowsOfEitherType) {
  constexpr std::int64_t kVocab = 7, kWidth = 3;
  const std::vector<std::uint32_t> token_ids = {6, 0, 6, 2};
  for (const DType dtype : {DType::kFp32, DType::kBf16}) {
    const HostArray table = HostArray::Random(dtype, kVocab * kWidth, 1);
    HostArray output(DType::kFp32, static_cast<std::int64_t>(token_ids.size()) * kWidth);
    EmbeddingParams params{.dtype = dtype, .table = table.data(), .token_ids = token_ids.data(), .output = output.floats()};
    params.num_rows = static_cast<std::int64_t>(token_ids.size());
    params.width = kWidth;
    ASSERT_EQ(Embedding(params, Device::kCpu, nullptr), absl::OkStatus());
    for (std::int64_t i = 0; i < output.count(); ++i) {
      EXPECT_EQ(output.Get(i), table.Get(token_ids[static_cast<std::size_t>(i / kWidth)] * kWidth + i % kWidth)) << i;
    }
    const std::uint32_t drawn = 5;
    const std::vector<const std::uint32_t*> places = {nullptr, &drawn, nullptr, &drawn};
    params.token_places = places.data();
    ASSERT_EQ(Embedding(params, Device::kCpu, nullptr), absl::OkStatus());
    for (std::int64_t i = 0; i < output.count(); ++i) {
      const auto row = static_cast<std::size_t>(i / kWidth);
      EXPECT_EQ(output.Get(i), table.Get((row % 2 == 0 ? token_ids[row] : drawn) * kWidth + i % kWidth)) << i;
    }
  }
  EXPECT_TRUE(absl::IsInvalidArgument(Embedding({.num_rows = 1, .width = 0}, Device::kCpu, nullptr)));
}

}  // namespace
}  // namespace tandem
