// Keys and values in fp8 on the CPU: what the device's kernels are compared with.
#include "gmock/gmock.h"
#include "kernels/attention/paged_attention.h"
#include "tests/kernels/fp8_kv_arrays.h"

namespace tandem {
namespace {

TEST(Fp8Kv, AScaleIsOfItsHeadAlone) {
  Fp8KvArrays arrays(2, 8, 2);
  for (std::int64_t i = 0; i < arrays.keys.count(); ++i) {
    arrays.keys.Set(i, i == 5 ? -7.f : 0.25f);
    arrays.values.Set(i, 0);
  }
  ASSERT_EQ(MeasureFp8KvScales(arrays.Params(), Device::kCpu, nullptr), absl::OkStatus());
  EXPECT_THAT(arrays.scales, ::testing::ElementsAre(0.5f, 0x1.4p-6f, 0x1.4p-4f, 0x1.4p-4f));
}

TEST(Fp8Kv, AScaleHasThreeBitsAndRoom) {
  for (const float largest : {1e-30f, 0.1f, 1.f, 6.99f, 7.f, 7.01f, 333.f, 1e37f}) {
    const float scale = Fp8KvScale(largest);
    int exponent = 0;
    const float eighths = std::frexp(scale, &exponent) * 8;
    EXPECT_EQ(eighths, std::floor(eighths)) << largest;
    EXPECT_GE(scale * kFp8KvMax, kFp8KvMargin * largest * (1 - 0x1p-22f)) << largest;
    EXPECT_LE(scale * kFp8KvMax, kFp8KvMargin * largest * 1.25f * (1 + 0x1p-22f)) << largest;
  }
  EXPECT_EQ(Fp8KvScale(0), Fp8KvScale(1));
}

TEST(Fp8Kv, CodesAreTheNearestNumber) {
  std::vector<float> numbers;
  for (int code = 0; code < 128; ++code) {
    numbers.push_back(Fp8KvNumber(static_cast<std::uint8_t>(code)));
    EXPECT_EQ(Fp8KvNumber(static_cast<std::uint8_t>(code | 128)), -numbers.back());
    EXPECT_EQ(ToFp8KvCode(numbers.back(), 1), code);
    EXPECT_EQ(ToFp8KvCode(-numbers.back(), 1), code | 128);
    if (code == 0) continue;
    EXPECT_GT(numbers[static_cast<std::size_t>(code)], numbers[static_cast<std::size_t>(code - 1)]);
    const float middle = (numbers[static_cast<std::size_t>(code)] + numbers[static_cast<std::size_t>(code - 1)]) / 2;
    EXPECT_EQ(ToFp8KvCode(middle, 1), code % 2 == 0 ? code : code - 1) << "a tie";
    EXPECT_EQ(ToFp8KvCode(std::nextafter(middle, 0.f), 1), code - 1);
    EXPECT_EQ(ToFp8KvCode(std::nextafter(middle, 99.f), 1), code);
  }
  EXPECT_EQ(numbers[1], 0x1p-6f);
  EXPECT_EQ(numbers[16], 0x1p-2f);
  EXPECT_EQ(numbers[127], kFp8KvMax);
  EXPECT_EQ(ToFp8KvCode(-3.f, 1.25f), ToFp8KvCode(-2.4f, 1));
}

// Under every scale with three bits.
TEST(Fp8Kv, Bf16HoldsWhatACodeStandsFor) {
  for (const float scale : {1.f, 1.25f, 1.5f, 1.75f, 0x1p-20f, 0x1.8p30f}) {
    for (int code = 0; code < 256; ++code) {
      const float value = Fp8KvNumber(static_cast<std::uint8_t>(code)) * scale;
      EXPECT_EQ(Bf16ToFloat(FloatToBf16(value)), value) << code << " * " << scale;
    }
  }
}

// Of a head whose every row is broken there is nothing to measure.
TEST(Fp8Kv, RowsWithInfinityOrNanDoNotCount) {
  Fp8KvArrays arrays(2, 8, 3);
  for (std::int64_t i = 0; i < arrays.keys.count(); ++i) arrays.keys.Set(i, i / 16 == 0 ? 100.f : 0.25f);
  arrays.keys.Set(9, NAN);             // row 0, head 1
  arrays.keys.Set(16 + 3, -INFINITY);  // row 1, head 0
  ASSERT_EQ(MeasureFp8KvScales(arrays.Params(), Device::kCpu, nullptr), absl::OkStatus());
  EXPECT_EQ(arrays.scales[0], Fp8KvScale(100));
  EXPECT_EQ(arrays.scales[1], Fp8KvScale(0.25f));
  for (const std::int64_t row : {1, 2}) arrays.keys.Set(row * 16 + 15, INFINITY);
  ASSERT_EQ(MeasureFp8KvScales(arrays.Params(), Device::kCpu, nullptr), absl::OkStatus());
  EXPECT_EQ(arrays.scales[0], Fp8KvScale(100));
  EXPECT_TRUE(std::isnan(arrays.scales[1])) << arrays.scales[1];
}

TEST(Fp8Kv, RowsWithInfinityOrNanGetQueriesOfNan) {
  Fp8KvArrays arrays(2, 8, 3);
  arrays.scales.assign(4, 1.f);
  arrays.keys.Set(9, NAN);
  arrays.values.Set(2 * 16 + 15, INFINITY);
  HostArray expected = arrays.queries;
  for (const std::int64_t row : {0, 2}) expected.Set(row * Fp8KvArrays::kQuerySize, NAN);
  ASSERT_EQ(StoreFp8Kv(arrays.Params(), Device::kCpu, nullptr), absl::OkStatus());
  ExpectClose(arrays.queries, expected, 0, 1e-30, "queries");
}

TEST(Fp8Kv, RopeAndCacheRoundsAsTheCacheDoes) {
  for (const DType dtype : {DType::kBf16, DType::kFp32}) {
    const QkvRows qkv(dtype, 5, 2, 6);
    const std::vector<float> scales = qkv.Scales();
    HostArray rows(dtype, QkvRows::kRows * qkv.width()), rounded = rows;
    ASSERT_EQ(RopeAndCache(qkv.Params(rows.data(), nullptr), Device::kCpu, nullptr), absl::OkStatus());
    ASSERT_EQ(RopeAndCache(qkv.Params(rounded.data(), scales.data()), Device::kCpu, nullptr), absl::OkStatus());
    qkv.ExpectRoundedAsTheCacheDoes(rows, rounded, scales, DTypeName(dtype));
  }
}

TEST(Fp8Kv, InfinityAndNanAreNotRounded) {
  EXPECT_EQ(RoundToFp8Kv(INFINITY, 0.5f), INFINITY);
  EXPECT_EQ(RoundToFp8Kv(-INFINITY, 0.5f), -INFINITY);
  EXPECT_TRUE(std::isnan(RoundToFp8Kv(NAN, 0.5f)));
  EXPECT_EQ(RoundToFp8Kv(3e38f, 0.5f), 15.5f);
  EXPECT_EQ(RoundToFp8Kv(-1.03f, 0.5f), -1);
  EXPECT_EQ(RoundToFp8Kv(1.04f, 0.5f), 1.0625f);
}

TEST(Fp8Kv, CodesLieInTheirPagesAndComeBackWithinTheirRounding) {
  Fp8KvArrays arrays(3, 16, 20);
  const Fp8KvParams params = arrays.Params();
  ASSERT_EQ(MeasureFp8KvScales(params, Device::kCpu, nullptr), absl::OkStatus());
  ASSERT_EQ(StoreFp8Kv(params, Device::kCpu, nullptr), absl::OkStatus());
  std::size_t num_written = 0;
  for (const std::uint8_t code : arrays.pages) num_written += code != 0xee ? 1 : 0;
  EXPECT_GE(num_written, 17 * 2 * 48 * 9 / 10);
  EXPECT_LE(num_written, 17 * 2 * 48);
  for (std::int64_t row = 0; row < 20; ++row) {
    const std::int32_t slot = arrays.slots[static_cast<std::size_t>(row)];
    if (slot < 0) continue;
    for (std::int64_t i = 0; i < 48; ++i) {
      const std::int64_t place = slot / 16 * arrays.page_stride() + slot % 16 * 48 + i;
      const float key = arrays.keys.Get(row * 48 + i), scale = arrays.scales[static_cast<std::size_t>(i / 16)];
      const float back = Fp8KvNumber(arrays.pages[static_cast<std::size_t>(place)]) * scale;
      EXPECT_NEAR(back, key, std::fabs(key) * 0x1p-5f + scale * 0x1p-7f) << "row " << row << " element " << i;
      const float value = arrays.values.Get(row * 48 + i), value_scale = arrays.scales[static_cast<std::size_t>(3 + i / 16)];
      const float value_back = Fp8KvNumber(arrays.pages[static_cast<std::size_t>(place + 16 * 48)]) * value_scale;
      EXPECT_NEAR(value_back, value, std::fabs(value) * 0x1p-5f + value_scale * 0x1p-7f) << "row " << row << " element " << i;
    }
  }
}

TEST(Fp8Kv, WhatIsBeyondTheScaleSaturates) {
  Fp8KvArrays arrays(1, 8, 1);
  arrays.scales = {0.5f, 0.5f};
  for (std::int64_t i = 0; i < 8; ++i) arrays.keys.Set(i, i % 2 == 0 ? 1e6f : -1e6f);
  ASSERT_EQ(StoreFp8Kv(arrays.Params(), Device::kCpu, nullptr), absl::OkStatus());
  EXPECT_EQ(Fp8KvNumber(arrays.pages[0]) * 0.5f, 15.5f);
  EXPECT_EQ(Fp8KvNumber(arrays.pages[1]) * 0.5f, -15.5f);
}

// One query over one key: the output is the value, whatever the score.
TEST(Fp8Kv, AttentionReadsCodesUnderTheirScales) {
  Fp8KvArrays arrays(1, 8, 1);
  const Fp8KvParams params = arrays.Params();
  ASSERT_EQ(MeasureFp8KvScales(params, Device::kCpu, nullptr), absl::OkStatus());
  ASSERT_EQ(StoreFp8Kv(params, Device::kCpu, nullptr), absl::OkStatus());
  const HostArray query = HostArray::Random(DType::kFp32, 8, 3);
  HostArray output(DType::kFp32, 8);
  const std::int32_t query_indptr[] = {0, 1}, page_indptr[] = {0, 1}, page_indices[] = {0}, last_page_tokens[] = {1};
  PagedAttentionParams attention = {.shape = {.dtype = DType::kFp32, .num_heads = 1, .num_kv_heads = 1, .head_dim = 8}};
  attention.shape.page_tokens = Fp8KvArrays::kPageTokens;
  attention.query = query.data();
  attention.query_row_stride = 8;
  attention.keys = params.key_pages;
  attention.values = params.value_pages;
  attention.page_stride = params.page_stride;
  attention.key_scales = arrays.scales.data();
  attention.value_scales = arrays.scales.data() + 1;
  attention.output = output.data();
  attention.query_indptr = query_indptr;
  attention.page_indptr = page_indptr;
  attention.page_indices = page_indices;
  attention.last_page_tokens = last_page_tokens;
  attention.num_sequences = 1;
  ASSERT_EQ(PagedAttention(attention, {}, {}, Device::kCpu, nullptr), absl::OkStatus());
  for (std::int64_t i = 0; i < 8; ++i)
    EXPECT_NEAR(output.Get(i), arrays.values.Get(i), std::fabs(arrays.values.Get(i)) * 0x1p-5f + arrays.scales[1] * 0x1p-7f);
  attention.value_scales = nullptr;
  EXPECT_FALSE(PagedAttention(attention, {}, {}, Device::kCpu, nullptr).ok());
}

}  // namespace
}  // namespace tandem
