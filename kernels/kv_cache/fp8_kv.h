// Keys and values as E4M3 codes in the pages of the cache, one fp32 scale for each KV head and for keys and values: value = code
// * scale. Scales are measured once and then stand as long as a page that was written under them.
#pragma once

#include <cstdint>

#include "common/gpu/device.h"

namespace tandem {

// A scale leaves room for values so many times as large as the largest that was measured; what is larger saturates. E4M3 rounds
// alike over its whole range, so the room costs small values alone.
inline constexpr float kFp8KvMargin = 4;

struct Fp8KvParams {
  const void* keys = nullptr;    // bf16 [num_rows, num_kv_heads, head_dim], finished: normed, rotated
  const void* values = nullptr;  // as keys
  std::int64_t num_rows = 0;
  int num_kv_heads = 0;
  int head_dim = 0;                     // a multiple of 8
  const std::int32_t* slots = nullptr;  // [num_rows]: page * page_tokens + offset; below 0: the row is padding
  float* scales = nullptr;              // [2 (keys, values), num_kv_heads]
  void* key_pages = nullptr;            // page p: uint8 [page_tokens, num_kv_heads, head_dim] at key_pages + p page_stride
  void* value_pages = nullptr;
  std::int64_t page_stride = 0;
  int page_tokens = 0;
};
// scales <- kFp8KvMargin * the largest magnitude of each head in the rows that are no padding / 448; NaN where there is a NaN;
// where all are zero, as if the largest were 1. Pages are not touched.
absl::Status MeasureFp8KvScales(const Fp8KvParams& params, Device device, void* stream);
// Codes into their pages, to the nearest, ties to even.
absl::Status StoreFp8Kv(const Fp8KvParams& params, Device device, void* stream);

namespace internal {
absl::Status MeasureFp8KvScalesCuda(const Fp8KvParams& params, void* stream);
absl::Status StoreFp8KvCuda(const Fp8KvParams& params, void* stream);
}  // namespace internal

}  // namespace tandem
