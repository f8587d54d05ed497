// Between the qkv product and attention: bias and norm of queries and keys where the family has them, queries and keys rotated,
// keys and values written into their pages; and the table of cosines and sines that this reads. Both daemons use it, the trainer
// with rows for pages, so that both round alike.
//
// A page of the bf16 cache is one piece, [num_layers, 2 (keys, values), page_tokens, num_kv_heads, head_dim]: a block is copied
// at once, and the cache can grow and shrink at one end.
#pragma once

#include <cstdint>
#include <span>

#include "common/gpu/device.h"
#include "common/gpu/dtype.h"

namespace tandem {

struct RopeTableParams {
  const double* frequencies = nullptr;  // [half], host: radians a position (Su et al., 2021, arXiv 2104.09864); copied by value
  std::int64_t half = 0;                // head_dim / 2, at most 128
  std::int64_t num_positions = 0;
  float* cosines = nullptr;  // [num_positions, half]
  float* sines = nullptr;
};
// Angles in double, rounded once.
absl::Status FillRopeTable(const RopeTableParams& params, Device device, void* stream);

struct RopeAndCacheParams {
  DType dtype = DType::kBf16;  // of all but qkv
  // The product, [num_rows, (num_heads + 2 num_kv_heads) head_dim]. Half-split pairs (i, i + head_dim / 2).
  const float* qkv = nullptr;
  void* queries = nullptr;            // row r at queries + r query_row_stride; in fp32 all results may take qkv's place
  std::int64_t query_row_stride = 0;  // in elements
  void* unnormed = nullptr;      // null, or [num_rows, num_heads + num_kv_heads, head_dim]: queries and keys before their norms
  const void* bias = nullptr;    // null, or [(num_heads + 2 num_kv_heads) head_dim], added first
  const void* q_norm = nullptr;  // null, or [head_dim]: RMSNorm of each query head before its rotation
  const void* k_norm = nullptr;  // null, or [head_dim]: of each key head
  float epsilon = 0;
  std::int64_t num_rows = 0;
  int num_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;                         // even, at most 256
  const std::int32_t* positions = nullptr;  // [num_rows]
  const float* cosines = nullptr;           // [max_positions, head_dim / 2]
  const float* sines = nullptr;
  // [num_rows]: page * page_tokens + offset; below 0: the row is padding, its keys and values are not written. Null: row i goes
  // to slot i.
  const std::int32_t* slots = nullptr;
  void* keys = nullptr;          // page p: [page_tokens, num_kv_heads, head_dim] at keys + p page_stride
  void* values = nullptr;        // as keys
  std::int64_t page_stride = 0;  // in elements
  int page_tokens = 0;
  // Null, or [2 (keys, values), num_kv_heads]: keys and values become what they are once they have been in a cache in fp8 under
  // these scales (fp8_kv.h).
  const float* kv_scales = nullptr;
};
// Computed in fp32, rounded once; with kv_scales keys and values once more. Errors: INVALID_ARGUMENT (shape), UNIMPLEMENTED (no
// device code), INTERNAL (launch).
absl::Status RopeAndCache(const RopeAndCacheParams& params, Device device, void* stream);

// output[r, c] <- bf16(input[r, c]), rounded to nearest even: a part of a wider matrix.
struct RoundBlockParams {
  const float* input = nullptr;  // [num_rows, num_columns]
  void* output = nullptr;        // bf16, row r at output + r output_row_stride
  std::int64_t num_rows = 0;
  std::int64_t num_columns = 0;
  std::int64_t output_row_stride = 0;  // in elements
};
// Any number of them, 64 a launch. Fewer than 2^31 elements each. Errors: INVALID_ARGUMENT (shape), INTERNAL (launch).
absl::Status RoundBlocks(std::span<const RoundBlockParams> blocks, Device device, void* stream);

namespace internal {
absl::Status FillRopeTableCuda(const RopeTableParams& params, void* stream);
absl::Status RopeAndCacheCuda(const RopeAndCacheParams& params, void* stream);
absl::Status RoundBlocksCuda(std::span<const RoundBlockParams> blocks, void* stream);
}  // namespace internal

}  // namespace tandem
