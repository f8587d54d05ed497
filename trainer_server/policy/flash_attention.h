// Causal attention over packed rows with shared prompts, by LibTorch's flash attention: one call in which every prompt and
// completion attends to itself, one in which the completions of a group attend to their prompt; outputs merged by their
// log-sum-exps, and in the backward pass both calls get the merged ones. Deterministic. bf16; on the GPU; confined to one thread,
// whose current stream is `stream` meanwhile. Throws c10::Error.
//
// What it does not serve (packs with gaps, other head sizes and cards) is kernels/packed_attention's.
#pragma once

#include <cstdint>
#include <vector>

#include "common/gpu/device.h"
#include "common/model/model_config.h"
#include "common/torch/buffer.h"
#include "trainer_server/batch/micro_batch.h"

namespace tandem {

// Where the two calls find their rows, on the host. Example: a prompt of 3 with completions of 2 and 1, then a row of nothing:
// own_begins [0 3 5 6], query_begins [0 3], key_begins [0 3], query_rows [3 4 5], key_rows [0 1 2], query_row_of [-1 -1 -1 0 1 2
// -1], key_row_of [0 1 2 -1 -1 -1 -1].
struct FlashRows {
  bool is_served = false;  // false: rows have gaps or another order; the rest is then undefined
  std::int64_t num_rows = 0;
  std::vector<std::int32_t> own_begins;                // of every prompt and completion, then the end
  std::vector<std::int32_t> query_begins, key_begins;  // of each group in query_rows and key_rows, then the end
  std::vector<std::int32_t> query_rows, key_rows;
  std::vector<std::int32_t> query_row_of, key_row_of;  // [num_rows]
  std::int64_t longest_own = 0, longest_query = 0, longest_key = 0;

  explicit FlashRows(const MicroBatch& batch);
};

class FlashAttention {
 public:
  // Whether this card and these heads are served.
  static bool Serves(const ModelConfig& config);

  // Requires: rows.is_served, Serves(config).
  FlashAttention(const ModelConfig& config, const FlashRows& rows, void* stream);

  // qkv: [num_rows, q + 2 kv] bf16, rotated. output: [num_rows, q] bf16, rows of nothing zero. lse: num_rows x num_heads floats,
  // for Backward alone.
  void Forward(const void* qkv, void* output, float* lse) const;
  // grad_qkv: overwritten.
  void Backward(const void* qkv, const void* output, const float* lse, const void* grad_output, void* grad_qkv) const;

 private:
  template <typename T>
  using DeviceBuffer = Buffer<T, Device::kCuda>;
  struct Gathered;  // queries, keys and values of the call over prompts
  Gathered Gather(const void* qkv) const;

  std::int64_t num_heads_, num_kv_heads_, head_dim_;
  std::int64_t num_rows_, num_own_, num_queries_, num_keys_, num_segments_, num_groups_;
  std::int64_t longest_own_, longest_query_, longest_key_;
  void* stream_;
  DeviceBuffer<std::int32_t> indices_;
  const std::int32_t *own_begins_, *query_begins_, *key_begins_, *query_rows_, *key_rows_, *query_row_of_, *key_row_of_;
};

}  // namespace tandem
