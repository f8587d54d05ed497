// Keys and values as E4M3 codes in the pages of the cache, one fp32 scale for each KV head and for keys and values: value = code
// * scale. Scales are measured once and then stand as long as a page that was written under them. They are powers of two, so a
// code times its scale is a number that bf16 holds: RopeAndCache (kv_cache.h) writes just these numbers for the trainer.
#pragma once

#include <bit>
#include <cstdint>

#include "common/gpu/device.h"

namespace tandem {

// A scale leaves room for values at least so many times as large as the largest that was measured, and less than twice that; what
// is larger saturates. E4M3 rounds alike over its whole range, so the room costs small values alone.
inline constexpr float kFp8KvMargin = 4;
inline constexpr float kFp8Max = 448;

// The least power of two under which kFp8KvMargin * `largest` (0: as if it were 1) does not saturate.
constexpr float Fp8KvScale(float largest) {
  const auto least = std::bit_cast<std::uint32_t>((largest == 0 ? 1 : largest) * (kFp8KvMargin / kFp8Max));
  return std::bit_cast<float>((least + 0x7fffffU) & 0x7f800000U);
}

// What `value` is once it has been in the cache, to the nearest, ties to even. Infinities and NaN stay what they are.
float RoundToFp8Kv(float value, float scale);

struct Fp8KvParams {
  const void* keys = nullptr;    // bf16 [num_rows, num_kv_heads, head_dim], finished: normed, rotated
  const void* values = nullptr;  // as keys
  std::int64_t num_rows = 0;
  int num_kv_heads = 0;
  int head_dim = 0;                     // a multiple of 8
  const std::int32_t* slots = nullptr;  // [num_rows]: page * page_tokens + offset; below 0: the row is padding
  float* scales = nullptr;              // [2 (keys, values), num_kv_heads]
  void* queries = nullptr;              // null, or bf16: row r at queries + r query_row_stride
  std::int64_t query_row_stride = 0;    // in elements
  void* key_pages = nullptr;            // page p: uint8 [page_tokens, num_kv_heads, head_dim] at key_pages + p page_stride
  void* value_pages = nullptr;
  std::int64_t page_stride = 0;
  int page_tokens = 0;
};
// scales <- Fp8KvScale of the largest magnitude of each head, in the rows that are no padding and have finite numbers alone in
// that head; NaN where there is no such row. Pages and queries are not touched.
absl::Status MeasureFp8KvScales(const Fp8KvParams& params, Device device, void* stream);
// Codes into their pages, to the nearest, ties to even. E4M3 has no infinity, and attention reads its NaN as a number: a row with
// either becomes one whose attention is NaN, by a NaN for the first element of its queries.
absl::Status StoreFp8Kv(const Fp8KvParams& params, Device device, void* stream);

namespace internal {
absl::Status MeasureFp8KvScalesCuda(const Fp8KvParams& params, void* stream);
absl::Status StoreFp8KvCuda(const Fp8KvParams& params, void* stream);
}  // namespace internal

}  // namespace tandem
