// Causal attention over a micro-batch in which completions share their prompt's keys: a prompt row sees the prompt up to itself,
// a completion row sees the whole prompt and its completion up to itself. Memory grows with rows, never with rows squared.
// Confined to the calling thread; splits its work among LibTorch's threads without changing a bit of the result.
#pragma once

#include <cstdint>
#include <vector>

#include "common/model/model_config.h"
#include "common/torch/buffer.h"
#include "common/torch/vector_ops.h"
#include "trainer_server/batch/micro_batch.h"

namespace tandem {

template <typename T>
class PackedAttention {
 public:
  // Requires: ranges inside the batch, as CheckMicroBatch says.
  PackedAttention(const ModelConfig& config, const MicroBatch& batch);

  // qkv: [num_rows, q + 2 kv], rotated. output: [num_rows, q]; rows of no prompt and no completion become zero. lse: [num_rows,
  // num_heads].
  void Forward(const T* qkv, T* output, T* lse);
  // After Forward of the same qkv. grad_qkv: overwritten.
  void Backward(const T* qkv, const T* output, const T* lse, const T* grad_output, T* grad_qkv);

 private:
  // Consecutive rows whose keys are stored together.
  struct Segment {
    std::int32_t begin = 0;
    std::int32_t end = 0;
    std::int64_t first_column = 0;  // of its keys in keys_t_, a multiple of kColumnAlignment
  };
  struct Group {
    Segment prompt;
    std::vector<Segment> completions;
  };
  struct Item {
    std::int32_t group = 0;
    std::int32_t completion = -1;  // -1: the prompt's own rows
    std::int32_t kv_head = 0;
    std::int32_t row_begin = 0;
    std::int32_t row_end = 0;
  };
  struct Scratch;

  Segment PlaceSegment(std::int32_t begin, std::int32_t end);
  // Calls `body(segment)` in order.
  void ForEachSegment(auto body) const;
  void PackColumns(const T* qkv, std::int64_t first_feature, T* columns) const;
  // The key blocks that rows of an item may see: the prompt's, then the completion's own.
  void FillBlocks(const Item& item, const T* qkv, T* grad_qkv, std::vector<KvBlock<T>>* blocks) const;
  void AppendBlocks(const Segment& segment, std::int32_t kv_head, const T* qkv, T* grad_qkv,
                    std::vector<KvBlock<T>>* blocks) const;
  AttentionTile<T> GatherTile(const Item& item, const T* qkv, T* grad_qkv, Scratch* scratch) const;
  void ForwardItem(const Item& item, const T* qkv, T* output, T* lse) const;
  void BackwardItem(const Item& item, const T* qkv, const T* output, const T* lse, const T* grad_output, T* grad_qkv) const;

  const std::int64_t num_rows_, num_heads_, num_kv_heads_, head_dim_, q_size_, kv_size_, row_width_;
  const VectorOps<T>& ops_;
  std::vector<Group> groups_;
  std::vector<Item> items_;           // by group and KV head, then in row order
  std::vector<std::int64_t> chains_;  // items of one group and KV head: [chains_[i], chains_[i + 1])
  std::int64_t num_columns_ = 0;
  Buffer<T> keys_t_, values_t_;  // [num_kv_heads][head_dim x num_columns], blocks of columns one after the other
};

}  // namespace tandem
