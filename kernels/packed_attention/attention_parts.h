// What joins two calls of an attention kernel that knows one range of keys a sequence, over rows that see two (their prompt's,
// and their own), and calls over some of the heads: heads and log-sum-exps gathered for a call, a part over other keys merged by
// its log-sum-exps, one call's heads written or added into a wider array. All bf16 but the log-sum-exps, which are fp32.
//
// Device only; all pointers are device memory. `stream` is a cudaStream_t. Errors: UNIMPLEMENTED (no device code in this build),
// INTERNAL (launch).
#pragma once

#include <cstdint>

#include "common/gpu/device.h"

namespace tandem {

// Log-sum-exps of rows and heads in either order.
struct LseArray {
  float* values = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t head_stride = 0;
};

// output row i <- input row rows[i], for each head.
struct GatherLseParams {
  LseArray input;
  const std::int32_t* rows = nullptr;  // [num_rows]; null: row i itself
  LseArray output;
  std::int64_t num_rows = 0;
  std::int64_t num_heads = 0;
};
absl::Status GatherLse(const GatherLseParams& params, void* stream);

// Row rows[i] of `output` and of `lse` <- itself, merged with row i of `part`, which is over other keys.
struct MergeAttentionParams {
  const void* part = nullptr;  // [num_rows, num_heads, head_dim]
  LseArray part_lse;
  const std::int32_t* rows = nullptr;  // [num_rows], each once
  void* output = nullptr;              // [*, num_heads, head_dim] in rows of output_row_stride elements
  std::int64_t output_row_stride = 0;
  LseArray lse;
  std::int64_t num_rows = 0;
  std::int64_t num_heads = 0;
  std::int64_t head_dim = 0;  // a multiple of 8, and arrays and strides of 16 bytes
};
absl::Status MergeAttention(const MergeAttentionParams& params, void* stream);

// Heads of rows, bf16: of its first one; head_dim elements a head.
struct HeadArray {
  void* values = nullptr;
  std::int64_t row_stride = 0;  // elements
  std::int64_t head_stride = 0;
};

// Row output_rows[i] of `output` <- row input_rows[i] of `input`, added to it in fp32 where is_added. Rows null: row i itself.
struct CopyHeadsParams {
  HeadArray input;
  const std::int32_t* input_rows = nullptr;  // [num_rows]
  HeadArray output;
  const std::int32_t* output_rows = nullptr;  // [num_rows], each once
  std::int64_t num_rows = 0;
  std::int64_t num_heads = 0;
  std::int64_t head_dim = 0;  // a multiple of 8; arrays and strides are of 16 bytes
  bool is_added = false;
};
absl::Status CopyHeads(const CopyHeadsParams& params, void* stream);

// Rows [begin, end) of `output` <- zero.
struct ZeroRowsParams {
  void* output = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t begin = 0, end = 0;
};
absl::Status ZeroRows(const ZeroRowsParams& params, void* stream);

}  // namespace tandem
