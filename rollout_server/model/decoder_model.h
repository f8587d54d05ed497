// The forward pass of the rollout server: one call runs one step plan over the paged KV cache and returns logits of the rows
// asked for. No torch type crosses this interface, so the scheduler and engine are tested without LibTorch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "common/base/status.h"
#include "common/model/model_config.h"
#include "common/model/weight_layout.h"

namespace tandem {

// An adapter as it lies in a slot of the pool; the bytes must stay until no batch names it.
struct AdapterView {
  const std::byte* slot = nullptr;
  const AdapterLayout* layout = nullptr;
  float scale = 0;
};

// One step's work, ragged. Example: sequence 0 prefills 3 tokens from position 0, sequence 1 decodes its 9th token:
//   token_ids [a b c d], cu_query_lens [0 3 4], context_lens [3 9], positions [0 1 2 8].
struct StepBatch {
  std::vector<std::uint32_t> token_ids;                 // [num_tokens]
  std::vector<std::int32_t> positions;                  // [num_tokens]
  std::vector<std::int32_t> cu_query_lens;              // [num_sequences + 1]
  std::vector<std::int32_t> context_lens;               // [num_sequences]: keys in the cache after this step
  std::vector<std::int64_t> slot_mapping;               // [num_tokens]: block * block_tokens + offset, where K and V are written
  std::vector<std::vector<std::int32_t>> block_tables;  // [num_sequences][ceil(context_len / block_tokens)]
  std::vector<std::int32_t> logit_rows;                 // token rows whose logits are wanted
  std::vector<std::int32_t> adapter_of;                 // [num_sequences]: index into adapters, or -1
  std::vector<AdapterView> adapters;
};

struct DecoderModelOptions {
  int block_tokens = 16;
  int num_blocks = 0;
};

class DecoderModel {
 public:
  // Bytes of K and V of one block over all layers.
  static std::uint64_t BlockBytes(const ModelConfig& config, int block_tokens);
  // `weights` as `layout` says and `kv_cache` (>= num_blocks x BlockBytes) lie in the pool and outlive the model.
  static absl::StatusOr<std::unique_ptr<DecoderModel>> Create(const ModelConfig& config, const WeightLayout& layout,
                                                              const std::byte* weights, std::span<std::byte> kv_cache,
                                                              const DecoderModelOptions& options);
  virtual ~DecoderModel() = default;
  // Logits [logit_rows.size(), vocab_size] fp32, valid until the next call. Errors: INTERNAL (LibTorch's words).
  // A row's logits do not depend on the other sequences of the batch beyond the rounding of the GEMM.
  virtual absl::StatusOr<std::span<const float>> Run(const StepBatch& batch) = 0;
  // Copies one block's K and V (a shared prompt's last, partly filled block, before a member writes to it).
  virtual absl::Status CopyBlock(std::int32_t from, std::int32_t to) = 0;
};

}  // namespace tandem
