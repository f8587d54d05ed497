// Keys and values of a few rows, and pages for their codes.
#pragma once

#include "kernels/kv_cache/fp8_kv.h"
#include "tests/kernels/kernel_arrays.h"

namespace tandem {

struct Fp8KvArrays {
  int num_kv_heads, head_dim;
  std::int64_t num_rows;
  HostArray keys, values;
  std::vector<std::int32_t> slots;
  std::vector<float> scales;
  std::vector<std::uint8_t> pages;  // [num_pages, 2, page_tokens, num_kv_heads, head_dim]

  static constexpr int kPageTokens = 16, kNumPages = 5;
  std::int64_t row_size() const { return std::int64_t{num_kv_heads} * head_dim; }
  std::int64_t page_stride() const { return 2 * kPageTokens * row_size(); }

  Fp8KvArrays(int num_kv_heads_in, int head_dim_in, std::int64_t num_rows_in)
      : num_kv_heads(num_kv_heads_in),
        head_dim(head_dim_in),
        num_rows(num_rows_in),
        keys(HostArray::Random(DType::kBf16, num_rows * row_size(), 1, 40)),
        values(HostArray::Random(DType::kBf16, num_rows * row_size(), 2, 0.3)),
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
            .key_pages = pages.data(),
            .value_pages = pages.data() + kPageTokens * row_size(),
            .page_stride = page_stride(),
            .page_tokens = kPageTokens};
  }
};

}  // namespace tandem
