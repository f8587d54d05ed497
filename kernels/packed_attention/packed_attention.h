// Causal attention over packed rows whose keys are two ranges: a prompt that several completions share, and the row's own
// sequence up to itself. Exact softmax in fp32, written for every head size up to 256 and both number types: the device's oracle,
// and the path where LibTorch's flash attention does not serve. Deterministic: no atomics.
//
// Device only; all pointers are device memory. `stream` is a cudaStream_t. Errors: INVALID_ARGUMENT (shape, dtype), UNIMPLEMENTED
// (no device code in this build), INTERNAL (launch).
#pragma once

#include <cstdint>

#include "common/gpu/device.h"
#include "common/gpu/dtype.h"

namespace tandem {

// Row r sees keys [prompt_begin, prompt_end) and [own_begin, r]. Rows of a prompt have an empty prompt range. Example: prompt of
// 3 rows with completions of 2 and 1, then a row of nothing: prompt_begin [0 0 0 0 0 0 0], prompt_end [0 0 0 3 3 3 0], own_begin
// [0 0 0 3 3 5 -1], own_end [3 3 3 5 5 6 -1]; one group: group [0 0 0 -1 -1 -1 -1], readers_begin [0 2], readers [3 5, 5 6].
struct PackedRows {
  std::int64_t num_rows = 0;
  const std::int32_t* prompt_begin = nullptr;  // [num_rows]
  const std::int32_t* prompt_end = nullptr;
  const std::int32_t* own_begin = nullptr;  // -1: the row belongs to nothing, sees nothing, outputs zero
  const std::int32_t* own_end = nullptr;    // of its prompt or completion
  const std::int32_t* group = nullptr;      // of a prompt's rows; else -1
  // Completions that see the prompt of group g: ranges readers[readers_begin[g]] ... readers[readers_begin[g + 1] - 1].
  const std::int32_t* readers_begin = nullptr;  // [num_groups + 1]
  const std::int32_t* readers = nullptr;        // [num_ranges, 2]: begin, end
};

struct PackedAttentionParams {
  DType dtype = DType::kFp32;  // of all but lse and delta: fp32, bf16
  PackedRows rows;
  std::int64_t num_heads = 0;
  std::int64_t num_kv_heads = 0;
  std::int64_t head_dim = 0;  // 1 to 256
  const void* qkv = nullptr;  // [num_rows, (num_heads + 2 num_kv_heads) head_dim], rotated
  void* output = nullptr;     // [num_rows, num_heads head_dim]
  float* lse = nullptr;       // [num_rows, num_heads], of scores / sqrt(head_dim); 0 where a row sees nothing
};
absl::Status PackedAttentionForward(const PackedAttentionParams& params, void* stream);

struct PackedAttentionBackwardParams {
  PackedAttentionParams forward;      // as it ran
  const void* grad_output = nullptr;  // [num_rows, num_heads head_dim]
  float* delta = nullptr;             // scratch [num_rows, num_heads]
  void* grad_qkv = nullptr;           // as qkv; overwritten, rows of nothing with zero
};
absl::Status PackedAttentionBackward(const PackedAttentionBackwardParams& params, void* stream);

}  // namespace tandem
