// Where everything of the GPU's forward pass lies in its workspace.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attention/paged_attention.h"
#include "rollout_server/model/decoder_model.h"

namespace tandem {

inline constexpr std::size_t kBf16Bytes = 2;

PagedAttentionShape AttentionShapeOf(const ModelConfig& config, int block_tokens);

// The step's index arrays, int32 but for the pointers of token_places, each at a place that depends on the options alone: a
// captured step finds the next one's there. The longest comes last, so that the copy ends with what the step uses.
struct StepPlaces {
  StepPlaces(const ModelConfig& config, const DecoderModelOptions& options);
  std::int64_t token_ids, token_places, positions, slots, logit_rows, query_indptr, page_indptr, last_page_tokens, page_indices;
  std::int64_t max_pages;
  std::int64_t size = 0;  // elements
};

// In bytes from the workspace's start. bf16 unless said otherwise.
struct WorkspacePlaces {
  WorkspacePlaces(const ModelConfig& config, const DecoderModelOptions& options);
  StepPlaces step;
  std::uint64_t hidden;                                 // fp32 [max_batch_tokens, hidden_size]: the residual stream
  std::uint64_t qkv, gate_up;                           // fp32 [max_batch_tokens, width]: products
  std::uint64_t normed, queries, attention, activated;  // [max_batch_tokens, width]
  std::uint64_t adapter_x;
  std::uint64_t logits;          // fp32 [max_logit_rows, vocab_size]
  std::uint64_t cosines, sines;  // fp32 [max_positions, head_dim / 2]
  std::uint64_t step_indices, attention_partials, attention_partial_bytes, attention_indices, attention_index_bytes;
  std::uint64_t gemm, adapters, adapter_bytes;
  std::uint64_t dense;                            // values of the weight in codes that is multiplied with
  std::uint64_t kv_scales, key_rows, value_rows;  // of a cache in fp8; rows: [max_batch_tokens, kv_size] on their way to it
  std::uint64_t total_bytes = 0;
};

// Whether the GPU's forward pass serves the model, and has room for it. Errors: INVALID_ARGUMENT.
absl::Status CheckCudaDecoderOptions(const ModelConfig& config, const WeightLayout& layout, const DecoderModelOptions& options);

}  // namespace tandem
