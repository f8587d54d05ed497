// Causal attention over packed rows with shared prompts by a library's kernel: what its implementations (cudnn_attention.h,
// flash_attention.h) have in common. Such a kernel knows one range of keys a sequence, so it runs twice: once every prompt with
// its first completion, and every other completion, attends to itself; once these others attend to their prompt without a mask.
// The outputs are merged by their log-sum-exps; in the backward pass both calls get the merged ones, so each gives its share of
// the gradients.
//
// bf16; on the GPU; confined to one thread. What they do not serve (packs with gaps, other head sizes and cards) is
// kernels/packed_attention's.
#pragma once

#include <cstdint>
#include <vector>

#include "common/model/model_config.h"
#include "common/model/weight_layout.h"
#include "trainer_server/batch/micro_batch.h"

namespace tandem {

// Where the two calls find their rows, on the host. Example: a prompt of 3 with completions of 2, 1 and 1, then a row of nothing:
// own_begins [0 5 6 7], query_begins [0 2], key_begins [0 3], query_rows [5 6], key_rows [0 1 2].
struct AttentionRows {
  bool is_served = false;  // false: rows have gaps or another order; the rest is then undefined
  std::int64_t num_rows = 0;
  std::vector<std::int32_t> own_begins;                // of every prompt, and completion but a prompt's first; then the end
  std::vector<std::int32_t> query_begins, key_begins;  // of each group in query_rows and key_rows, then the end
  std::vector<std::int32_t> query_rows, key_rows;      // those of one group follow each other
  std::int64_t longest_own = 0, longest_query = 0, longest_key = 0;

  explicit AttentionRows(const MicroBatch& batch);
  std::int64_t num_own() const { return own_begins.back(); }
  std::int64_t num_queries() const { return static_cast<std::int64_t>(query_rows.size()); }
  std::int64_t num_keys() const { return static_cast<std::int64_t>(key_rows.size()); }
};

struct AttentionOptions {
  bool is_deterministic = false;                               // the same bits each time: not by cuDNN
  std::int64_t scratch_limit_bytes = std::int64_t{512} << 20;  // of cuDNN's, which then splits its work
};
enum class AttentionKernel { kOwn, kFlash, kCudnn };
// What serves packs without gaps on a card that has it.
AttentionKernel ChooseAttention(const ModelConfig& config, StorageFormat format, const AttentionOptions& options);

// Device memory that the passes of `num_rows` rows take at most, beside their arguments. cuDNN's: at most the limit where one
// key-value head fits into it, and a margin.
struct AttentionScratch {
  std::int64_t forward_bytes = 0;
  std::int64_t backward_bytes = 0;
};
AttentionScratch PlanAttentionScratch(const ModelConfig& config, StorageFormat format, const AttentionOptions& options,
                                      std::int64_t num_rows);
// Of that, for a key-value head of cuDNN's: Forward's call over prompts, either call of Backward.
std::int64_t CudnnForwardBytes(const ModelConfig& config, std::int64_t num_queries);
std::int64_t CudnnBackwardBytes(const ModelConfig& config, std::int64_t num_queries, std::int64_t num_keys);
// The number of rows that cuDNN's graphs are built for: quarter steps between powers of two.
std::int64_t AttentionRowsBucket(std::int64_t rows);

// One micro-batch's attention. Buffers come from the ArenaScope of the GPU. Throws c10::Error.
class FusedAttention {
 public:
  virtual ~FusedAttention() = default;
  // qkv: [num_rows, q + 2 kv] bf16, rotated. output: [num_rows, q] bf16, rows of nothing zero. lse: num_rows x num_heads floats,
  // for Backward alone.
  virtual void Forward(const void* qkv, void* output, float* lse) const = 0;
  // grad_qkv: overwritten.
  virtual void Backward(const void* qkv, const void* output, const float* lse, const void* grad_output, void* grad_qkv) const = 0;
};

}  // namespace tandem
