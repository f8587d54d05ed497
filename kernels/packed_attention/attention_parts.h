// What joins two calls of an attention kernel that knows one range of keys a sequence, over rows that see two (their prompt's,
// and their own): gather rows for the call over prompts, merge both outputs by their log-sum-exps, add up both gradients. All
// bf16 but the log-sum-exps, which are fp32 [num_heads, rows].
//
// Device only; all pointers are device memory. `stream` is a cudaStream_t. Errors: UNIMPLEMENTED (no device code in this build),
// INTERNAL (launch).
#pragma once

#include <cstdint>

#include "common/gpu/device.h"

namespace tandem {

// output row i <- columns [first_column, first_column + width) of input row rows[i].
struct GatherRowsParams {
  const void* input = nullptr;  // [*, row_stride] bf16
  std::int64_t row_stride = 0;
  std::int64_t first_column = 0;
  const std::int32_t* rows = nullptr;  // [num_rows]
  void* output = nullptr;              // [num_rows, width] bf16
  std::int64_t num_rows = 0;
  std::int64_t width = 0;
};
absl::Status GatherRows(const GatherRowsParams& params, void* stream);

// output [num_heads, num_rows] <- input [num_heads, num_input_rows] at rows[i].
struct GatherLseParams {
  const float* input = nullptr;
  std::int64_t num_input_rows = 0;
  const std::int32_t* rows = nullptr;  // [num_rows]
  float* output = nullptr;
  std::int64_t num_rows = 0;
  std::int64_t num_heads = 0;
};
absl::Status GatherLse(const GatherLseParams& params, void* stream);

// Row r < num_own of `output` <- own row r, merged with prompt row prompt_row_of[r] where that is not -1; rows from num_own on
// become zero.
struct MergeAttentionParams {
  const void* own = nullptr;                    // [num_own, num_heads, head_dim]
  const float* own_lse = nullptr;               // [num_heads, num_own]
  const void* prompt = nullptr;                 // [num_prompt, num_heads, head_dim]: over the prompts' keys
  const float* prompt_lse = nullptr;            // [num_heads, num_prompt]
  const std::int32_t* prompt_row_of = nullptr;  // [num_rows]
  void* output = nullptr;                       // [num_rows, num_heads, head_dim]
  float* lse = nullptr;                         // [num_heads, num_own], of both
  std::int64_t num_rows = 0, num_own = 0, num_prompt = 0;
  std::int64_t num_heads = 0;
  std::int64_t head_dim = 0;
};
absl::Status MergeAttention(const MergeAttentionParams& params, void* stream);

// grad_qkv row r <- [grad_q, grad_k, grad_v] of both calls, added in fp32; rows from num_own on become zero. Row r's queries are
// row query_row_of[r] of the second call, its keys row key_row_of[r]; -1: they are not in it.
struct SumAttentionGradientsParams {
  const void* own_q = nullptr;  // [num_own, q_size]
  const void* own_k = nullptr;  // [num_own, kv_size]
  const void* own_v = nullptr;
  const void* prompt_q = nullptr;  // [*, q_size]
  const void* prompt_k = nullptr;  // [*, kv_size]
  const void* prompt_v = nullptr;
  const std::int32_t* query_row_of = nullptr;  // [num_rows]
  const std::int32_t* key_row_of = nullptr;    // [num_rows]
  void* grad_qkv = nullptr;                    // [num_rows, q_size + 2 kv_size]
  std::int64_t num_rows = 0, num_own = 0;
  std::int64_t q_size = 0, kv_size = 0;
};
absl::Status SumAttentionGradients(const SumAttentionGradientsParams& params, void* stream);

}  // namespace tandem
