// Keys and values as codes of a byte in the pages of the cache, one fp32 scale for each KV head and for keys and values: value =
// number of the code * scale. Scales are measured once and then stand as long as a page that was written under them.
//
// A code is E3M4: a sign, 3 bits of exponent with bias 3, 4 bits of mantissa; all are numbers, the largest is 31. Half of the
// rounding error of E4M3 where a head's values lie within some binades of each other, as keys and values do. Scales have 3
// significant bits, so a code times its scale is a number that bf16 holds: RopeAndCache (kv_cache.h) writes just these numbers
// for the trainer.
#pragma once

#include <bit>
#include <cstdint>

#include "common/gpu/device.h"

namespace tandem {

// A scale leaves room for values at least so many times as large as the largest that was measured, and at most a quarter more;
// what is larger saturates. What is smaller than about a 124th of the largest has fewer bits.
inline constexpr float kFp8KvMargin = 2;
inline constexpr float kFp8KvMax = 31;

// The least scale under which kFp8KvMargin * `largest` (0: as if it were 1) does not saturate.
constexpr float Fp8KvScale(float largest) {
  const auto least = std::bit_cast<std::uint32_t>((largest == 0 ? 1 : largest) * (kFp8KvMargin / kFp8KvMax));
  return std::bit_cast<float>((least + 0x1fffffU) & 0xffe00000U);
}

// To the nearest, ties to even; infinities and NaN become the largest number. For host and device.
constexpr std::uint8_t ToFp8KvCode(float value, float scale) {
  const auto bits = std::bit_cast<std::uint32_t>(value / scale);
  const std::uint32_t sign = bits >> 24 & 0x80U, magnitude = bits & 0x7fffffffU;
  if (magnitude >= std::bit_cast<std::uint32_t>(kFp8KvMax)) return static_cast<std::uint8_t>(sign | 0x7fU);
  if (magnitude < std::bit_cast<std::uint32_t>(0x1p-2F)) {
    // Multiples of 2^-6. In the binade of 2^17 that is the last bit of an fp32, so adding it rounds.
    return static_cast<std::uint8_t>(sign | (std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0x1p17F) & 0x1fU));
  }
  // The exponent moves from bias 127 to bias 3, 19 bits of mantissa are rounded away.
  const std::uint32_t shifted = magnitude - (124U << 23);
  return static_cast<std::uint8_t>(sign | (shifted + 0x3ffffU + (shifted >> 19 & 1U)) >> 19);
}
constexpr float Fp8KvNumber(std::uint8_t code) {
  const float magnitude = std::bit_cast<float>((code & 0x7fU) << 19) * 0x1p124F;
  return (code & 0x80U) != 0 ? -magnitude : magnitude;
}
// What `value` is once it has been in the cache. Infinities and NaN stay what they are.
constexpr float RoundToFp8Kv(float value, float scale) {
  if ((std::bit_cast<std::uint32_t>(value) & 0x7f800000U) == 0x7f800000U) return value;
  return Fp8KvNumber(ToFp8KvCode(value, scale)) * scale;
}

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
// Codes into their pages. They know no infinity and no NaN: a row with either becomes one whose attention is NaN, by a NaN for
// the first element of its queries.
absl::Status StoreFp8Kv(const Fp8KvParams& params, Device device, void* stream);

namespace internal {
absl::Status MeasureFp8KvScalesCuda(const Fp8KvParams& params, void* stream);
absl::Status StoreFp8KvCuda(const Fp8KvParams& params, void* stream);
}  // namespace internal

}  // namespace tandem
