// Where keys and values of each token lie in the KV cache, fp32 on the CPU.
//
// Per layer: keys [num_blocks, num_kv_heads, head_dim, block_tokens], then values [num_blocks, num_kv_heads, block_tokens,
// head_dim]. Keys stand in columns so that the scores of neighbouring tokens fill one vector register.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/model/model_config.h"

namespace tandem {

class PagedKvCache {
 public:
  PagedKvCache(const ModelConfig& config, std::byte* memory, std::int64_t num_blocks, std::int64_t block_tokens)
      : memory_(reinterpret_cast<float*>(memory)),
        num_blocks_(num_blocks),
        block_tokens_(block_tokens),
        num_kv_heads_(config.num_kv_heads),
        head_dim_(config.head_dim) {}

  float* keys(std::int64_t layer, std::int64_t block, std::int64_t kv_head) const {
    return memory_ + ((2 * layer * num_blocks_ + block) * num_kv_heads_ + kv_head) * head_dim_ * block_tokens_;
  }
  float* values(std::int64_t layer, std::int64_t block, std::int64_t kv_head) const {
    return keys(layer, num_blocks_ + block, kv_head);
  }
  // One token's key and value rows, [num_kv_heads, head_dim] each, into its slot.
  void Write(std::int64_t layer, std::int64_t slot, const float* key_row, const float* value_row) const;
  // Floats of keys, and of values, of one block in one layer.
  std::int64_t block_size() const { return num_kv_heads_ * head_dim_ * block_tokens_; }
  std::int64_t num_blocks() const { return num_blocks_; }
  std::int64_t block_tokens() const { return block_tokens_; }

 private:
  float* memory_;
  std::int64_t num_blocks_, block_tokens_, num_kv_heads_, head_dim_;
};

}  // namespace tandem
