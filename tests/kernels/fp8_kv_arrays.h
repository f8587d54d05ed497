// Keys and values of a few rows, and pages for their codes; and products that RopeAndCache makes such rows of.
#pragma once

#include "kernels/kv_cache/fp8_kv.h"
#include "kernels/kv_cache/kv_cache.h"
#include "tests/kernels/kernel_arrays.h"

namespace tandem {

struct Fp8KvArrays {
  int num_kv_heads, head_dim;
  std::int64_t num_rows;
  HostArray keys, values, queries;
  std::vector<std::int32_t> slots;
  std::vector<float> scales;
  std::vector<std::uint8_t> pages;  // [num_pages, 2, page_tokens, num_kv_heads, head_dim]

  static constexpr int kPageTokens = 16, kNumPages = 5, kQuerySize = 24;
  std::int64_t row_size() const { return std::int64_t{num_kv_heads} * head_dim; }
  std::int64_t page_stride() const { return 2 * kPageTokens * row_size(); }

  Fp8KvArrays(int num_kv_heads_in, int head_dim_in, std::int64_t num_rows_in)
      : num_kv_heads(num_kv_heads_in),
        head_dim(head_dim_in),
        num_rows(num_rows_in),
        keys(HostArray::Random(DType::kBf16, num_rows * row_size(), 1, 40)),
        values(HostArray::Random(DType::kBf16, num_rows * row_size(), 2, 0.3)),
        queries(HostArray::Random(DType::kBf16, num_rows * kQuerySize, 3)),
        scales(2 * static_cast<std::size_t>(num_kv_heads)),
        pages(static_cast<std::size_t>(kNumPages * page_stride()), 0xee) {
    for (std::int64_t row = 0; row < num_rows; ++row) {
      slots.push_back(row % 7 == 3 ? -1 : static_cast<std::int32_t>(row * 11 % (kPageTokens * kNumPages)));
    }
    // Larger by heads, and where a row is padding larger than all: it must not count.
    for (std::int64_t i = 0; i < keys.count(); ++i) {
      const std::int64_t head = i / head_dim % num_kv_heads;
      const bool is_padding = slots[static_cast<std::size_t>(i / row_size())] < 0;
      keys.Set(i, keys.Get(i) * static_cast<float>(head + 1) * (is_padding ? 100.f : 1.f));
    }
  }
  Fp8KvParams Params() {
    return {.keys = keys.data(),
            .values = values.data(),
            .num_rows = num_rows,
            .num_kv_heads = num_kv_heads,
            .head_dim = head_dim,
            .slots = slots.data(),
            .scales = scales.data(),
            .queries = queries.data(),
            .query_row_stride = kQuerySize,
            .key_pages = pages.data(),
            .value_pages = pages.data() + kPageTokens * row_size(),
            .page_stride = page_stride(),
            .page_tokens = kPageTokens};
  }
};

// As the trainer calls RopeAndCache: rows of queries, keys and values in one array.
struct QkvRows {
  static constexpr std::int64_t kRows = 19;
  DType dtype;
  int num_heads, num_kv_heads, head_dim;
  HostArray product, cosines, sines;
  std::vector<std::int32_t> positions;

  QkvRows(DType dtype_in, int num_heads_in, int num_kv_heads_in, int head_dim_in)
      : dtype(dtype_in),
        num_heads(num_heads_in),
        num_kv_heads(num_kv_heads_in),
        head_dim(head_dim_in),
        product(HostArray::Random(DType::kFp32, kRows * width(), 7, 3)),
        cosines(HostArray::Random(DType::kFp32, kRows * head_dim / 2, 8)),
        sines(HostArray::Random(DType::kFp32, kRows * head_dim / 2, 9)) {
    for (std::int32_t row = 0; row < kRows; ++row) positions.push_back(kRows - 1 - row);
  }
  std::int64_t width() const { return (std::int64_t{num_heads} + 2 * num_kv_heads) * head_dim; }
  std::int64_t kv_size() const { return std::int64_t{num_kv_heads} * head_dim; }
  // Null scales: none.
  RopeAndCacheParams Params(void* rows, const float* kv_scales) const {
    auto* const bytes = static_cast<std::byte*>(rows);
    const auto element_bytes = static_cast<std::int64_t>(ElementBytes(dtype));
    return {.dtype = dtype,
            .qkv = product.floats(),
            .queries = rows,
            .query_row_stride = width(),
            .num_rows = kRows,
            .num_heads = num_heads,
            .num_kv_heads = num_kv_heads,
            .head_dim = head_dim,
            .positions = positions.data(),
            .cosines = cosines.floats(),
            .sines = sines.floats(),
            .keys = bytes + num_heads * head_dim * element_bytes,
            .values = bytes + (num_heads * head_dim + kv_size()) * element_bytes,
            .page_stride = width(),
            .page_tokens = 1,
            .kv_scales = kv_scales};
  }
  // [2 (keys, values), num_kv_heads]: from far below to above what 3 needs, so that some values saturate and some are small.
  std::vector<float> Scales() const {
    std::vector<float> scales;
    for (int i = 0; i < 2 * num_kv_heads; ++i) scales.push_back(std::ldexp(i % 2 == 0 ? 1.f : 1.25f, i % 5 - 7));
    return scales;
  }
  // `rows` are those without scales: what the cache would give back of them is what is in `rounded`, to the bit.
  void ExpectRoundedAsTheCacheDoes(const HostArray& rows, const HostArray& rounded, const std::vector<float>& scales,
                                   const std::string& what) const {
    ASSERT_EQ(rows.count(), rounded.count());
    std::int64_t num_wrong = 0, num_changed = 0, num_saturated = 0, first_wrong = -1;
    for (std::int64_t i = 0; i < rows.count(); ++i) {
      const std::int64_t kv_head = i % width() / head_dim - num_heads;
      float expected = rows.Get(i);
      if (kv_head >= 0) {
        const float scale = scales[static_cast<std::size_t>(kv_head)];
        expected = Fp8KvNumber(ToFp8KvCode(expected, scale)) * scale;
        num_saturated += std::abs(rows.Get(i)) > kFp8KvMax * scale ? 1 : 0;
      }
      num_changed += expected != rows.Get(i) ? 1 : 0;
      if (rounded.Get(i) == expected) continue;
      if (num_wrong++ == 0) first_wrong = i;
    }
    EXPECT_EQ(num_wrong, 0) << what << ": of " << rows.count() << "; the first is element " << first_wrong << ", "
                            << rounded.Get(first_wrong) << " of " << rows.Get(first_wrong);
    EXPECT_GT(num_changed, kRows * kv_size()) << what;
    EXPECT_GT(num_saturated, 0) << what;
  }
};

}  // namespace tandem
