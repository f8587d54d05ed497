// Causal attention of a ragged batch of queries over a paged KV cache: prefill, chunks of it and decode alike. On the device
// FlashInfer's prefill template (bf16, head sizes 64, 128 and 256, any group of query heads over a KV head); the reference takes
// fp32 and bf16 and any size.
//
// Example, pages of 16 tokens: sequence 0 prefills its last 3 of 20 tokens, sequence 1 decodes its 5th token: query_indptr [0 3
// 4], page_indptr [0 2 3], page_indices [7 4 9], last_page_tokens [4 5]. The last of a sequence's queries sees all its keys, the
// one before it one key less, and so on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "common/gpu/device.h"
#include "common/gpu/dtype.h"

namespace tandem {

struct PagedAttentionShape {
  DType dtype = DType::kBf16;
  int num_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  int page_tokens = 0;
};

// Memory that a plan fills and its attention reads; one plan at a time.
struct PagedAttentionScratch {
  std::span<std::byte> partials;  // device
  std::span<std::byte> indices;   // device
  std::span<std::byte> staging;   // page-locked host, as large as `indices`; not to be touched until the stream is past the plan
};
// Enough for every batch of at most so many query rows and sequences.
std::uint64_t PagedAttentionPartialBytes(const PagedAttentionShape& shape, std::int64_t max_rows, std::int64_t max_sequences);
std::uint64_t PagedAttentionIndexBytes(const PagedAttentionShape& shape, std::int64_t max_rows, std::int64_t max_sequences);

struct PagedAttentionPlan {
  std::vector<std::int64_t> values;  // FlashInfer's
};
struct PagedAttentionPlanParams {
  PagedAttentionShape shape;
  const std::int32_t* query_indptr = nullptr;  // host, [num_sequences + 1]
  const std::int32_t* page_indptr = nullptr;   // host, [num_sequences + 1]
  std::int64_t num_sequences = 0;
  std::int64_t num_rows = 0;  // >= query_indptr[num_sequences]
  // One launch shape for all batches of so many sequences and rows, whatever their lengths: for CUDA graphs. Sequences without
  // queries are allowed.
  bool is_fixed_shape = false;
};
// Splits the batch over the device's blocks, on the host, and enqueues the copy of the outcome; the split serves every layer.
// Errors: INVALID_ARGUMENT (shape), INTERNAL (FlashInfer's words, scratch too small).
absl::Status PlanPagedAttention(const PagedAttentionPlanParams& params, const PagedAttentionScratch& scratch,
                                PagedAttentionPlan* plan, void* stream);

struct PagedAttentionParams {
  PagedAttentionShape shape;
  const void* query = nullptr;        // [num_rows, query_row_stride]: num_heads x head_dim of each row, rotated
  std::int64_t query_row_stride = 0;  // in elements
  const void* keys = nullptr;         // page p: [page_tokens, num_kv_heads, head_dim] at keys + p page_stride
  const void* values = nullptr;       // as keys
  std::int64_t page_stride = 0;       // in elements
  // [num_kv_heads] each: keys and values are codes under these scales (kv_cache/fp8_kv.h). Null: they are of the shape's
  // type.
  const float* key_scales = nullptr;
  const float* value_scales = nullptr;
  void* output = nullptr;                          // [num_rows, num_heads, head_dim]
  const std::int32_t* query_indptr = nullptr;      // [num_sequences + 1]
  const std::int32_t* page_indptr = nullptr;       // [num_sequences + 1]
  const std::int32_t* page_indices = nullptr;      // [page_indptr[num_sequences]]
  const std::int32_t* last_page_tokens = nullptr;  // [num_sequences], 1 to page_tokens
  std::int64_t num_sequences = 0;
};
// Scores are scaled by 1 / sqrt(head_dim). `plan` and `scratch` are of this batch, unused on the CPU. Errors: INVALID_ARGUMENT
// (shape), UNIMPLEMENTED (no device code), INTERNAL (launch).
absl::Status PagedAttention(const PagedAttentionParams& params, const PagedAttentionPlan& plan,
                            const PagedAttentionScratch& scratch, Device device, void* stream);

namespace internal {
absl::Status PlanPagedAttentionCuda(const PagedAttentionPlanParams& params, const PagedAttentionScratch& scratch,
                                    PagedAttentionPlan* plan, void* stream);
absl::Status PagedAttentionCuda(const PagedAttentionParams& params, const PagedAttentionPlan& plan,
                                const PagedAttentionScratch& scratch, void* stream);
}  // namespace internal

}  // namespace tandem
