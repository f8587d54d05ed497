// FusedAttention by LibTorch's FlashAttention-2. Deterministic: its backward pass adds in a fixed order. It takes what memory it
// takes: forward and backward on T rows hold about 16 H D bytes a row and 4 H D for each of the up to 132 / H sums of the
// queries' gradients (H heads of D: 90 KiB a row at 32 of 128).
#pragma once

#include <cstdint>

#include "common/gpu/device.h"
#include "common/model/model_config.h"
#include "common/torch/buffer.h"
#include "trainer_server/policy/fused_attention.h"

namespace tandem {

class FlashAttention : public FusedAttention {
 public:
  // Whether this card and these heads are served.
  static bool Serves(const ModelConfig& config);

  // Requires: rows.is_served, Serves(config). The thread's current stream becomes `stream` while a function runs.
  FlashAttention(const ModelConfig& config, const AttentionRows& rows, void* stream);

  void Forward(const void* qkv, void* output, float* lse) const override;
  void Backward(const void* qkv, const void* output, const float* lse, const void* grad_output, void* grad_qkv) const override;

 private:
  template <typename T>
  using DeviceBuffer = Buffer<T, Device::kCuda>;
  struct Gathered;  // queries, keys and values of the call over prompts
  Gathered Gather(const void* qkv) const;
  // [num_rows, num_heads, head_dim] <- rows of `row_stride` elements.
  void GatherHeads(const void* input, std::int64_t row_stride, const std::int32_t* rows, std::int64_t num_rows,
                   std::int64_t num_heads, void* output) const;

  std::int64_t num_heads_, num_kv_heads_, head_dim_;
  std::int64_t num_rows_, num_own_, num_queries_, num_keys_, num_segments_, num_groups_;
  std::int64_t longest_own_, longest_query_, longest_key_;
  void* stream_;
  DeviceBuffer<std::int32_t> indices_;
  const std::int32_t *own_begins_, *query_begins_, *key_begins_, *query_rows_, *key_rows_;
};

}  // namespace tandem
