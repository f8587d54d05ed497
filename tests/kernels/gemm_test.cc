#include "kernels/gemm/gemm.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "tests/kernels/kernel_arrays.h"

namespace tandem {
namespace {

MatrixView View(const std::vector<float>& values, std::int64_t rows, std::int64_t columns) {
  return {.data = values.data(), .rows = rows, .columns = columns, .row_stride = columns};
}

TEST(GemmTest, EqualsHandComputedNumbersInEveryOrderOfMemory) {
  const std::vector<float> a = {1, 2, 3, 4, 5, 6}, a_columns = {1, 4, 2, 5, 3, 6};  // [2, 3]
  const std::vector<float> b = {1, 0, -1, 2, 0.5f, 3}, b_columns = {1, -1, 0.5f, 0, 2, 3};
  const std::vector<float> expected = {1 - 2 + 1.5f, 4 + 9, 4 - 5 + 3, 10 + 18};
  const auto gemm = Gemm::Create(Device::kCpu, {}).value();
  for (const bool is_a_transposed : {false, true}) {
    for (const bool is_b_transposed : {false, true}) {
      std::vector<float> c(4, std::numeric_limits<float>::quiet_NaN());  // not read when beta is 0
      GemmParams params{.a = is_a_transposed ? View(a_columns, 3, 2).Transposed() : View(a, 2, 3),
                        .b = is_b_transposed ? View(b_columns, 2, 3).Transposed() : View(b, 3, 2),
                        .c = View(c, 2, 2)};
      ASSERT_EQ(gemm->Run(params, nullptr), absl::OkStatus());
      EXPECT_EQ(c, expected) << is_a_transposed << is_b_transposed;
      params.alpha = 2;
      params.beta = -1;
      ASSERT_EQ(gemm->Run(params, nullptr), absl::OkStatus());
      EXPECT_EQ(c, expected) << "2 x - x is x";
    }
  }
}

TEST(GemmTest, Bf16ResultsAreRoundedOnceAndGapsBetweenRowsStay) {
  constexpr std::int64_t kRows = 3, kInner = 40, kColumns = 5, kStride = 7;
  const HostArray a = HostArray::Random(DType::kBf16, kRows * kInner, 1),
                  b = HostArray::Random(DType::kBf16, kInner * kColumns, 2);
  HostArray c(DType::kBf16, kRows * kStride);
  for (std::int64_t i = 0; i < c.count(); ++i) c.Set(i, 99);
  const auto gemm = Gemm::Create(Device::kCpu, {}).value();
  ASSERT_EQ(gemm->Run({.a = {a.data(), DType::kBf16, kRows, kInner, kInner},
                       .b = {b.data(), DType::kBf16, kInner, kColumns, kColumns},
                       .c = {c.data(), DType::kBf16, kRows, kColumns, kStride}},
                      nullptr),
            absl::OkStatus());
  for (std::int64_t i = 0; i < kRows; ++i) {
    for (std::int64_t j = 0; j < kStride; ++j) {
      double sum = 0;
      for (std::int64_t p = 0; p < kInner; ++p) sum += double{a.Get(i * kInner + p)} * double{b.Get(p * kColumns + j % kColumns)};
      EXPECT_EQ(c.Get(i * kStride + j), j < kColumns ? Bf16ToFloat(FloatToBf16(static_cast<float>(sum))) : 99) << i << " " << j;
    }
  }
}

TEST(GemmTest, RefusesWhatDoesNotGoTogether) {
  const std::vector<float> values(64);
  const auto view = [&](std::int64_t rows, std::int64_t columns) { return View(values, rows, columns); };
  const auto gemm = Gemm::Create(Device::kCpu, {}).value();
  const auto refuses = [&](const GemmParams& params) { return absl::IsInvalidArgument(gemm->Run(params, nullptr)); };
  const GemmParams good{.a = view(2, 3), .b = view(3, 4), .c = view(2, 4)};
  EXPECT_FALSE(refuses(good));
  GemmParams bad = good;
  bad.b = view(2, 4);
  EXPECT_TRUE(refuses(bad)) << "k of a and b";
  bad = good;
  bad.c = view(4, 2);
  EXPECT_TRUE(refuses(bad)) << "c is the transpose";
  bad = good;
  bad.c = view(4, 2).Transposed();
  EXPECT_TRUE(refuses(bad)) << "c by columns";
  bad = good;
  bad.b.dtype = DType::kBf16;
  EXPECT_TRUE(refuses(bad)) << "mixed factors";
  bad = good;
  bad.c.dtype = DType::kBf16;
  EXPECT_TRUE(refuses(bad)) << "bf16 from fp32";
  bad = good;
  bad.a.row_stride = 2;
  EXPECT_TRUE(refuses(bad)) << "overlapping rows";
  bad = good;
  bad.a.column_stride = 2;
  EXPECT_TRUE(refuses(bad)) << "no stride is 1";
  EXPECT_TRUE(refuses({.a = view(2, 0), .b = view(0, 4), .c = view(2, 4)})) << "k is 0";
  EXPECT_FALSE(refuses({.a = view(0, 3), .b = view(3, 4), .c = view(0, 4)})) << "nothing to do";
}

}  // namespace
}  // namespace tandem
