#include "trainer_server/policy/fused_attention.h"

#include <algorithm>
#include <bit>

namespace tandem {
namespace {

constexpr std::int64_t kLeastRows = 128;                           // of a bucket
constexpr std::int64_t kCudnnMarginBytes = std::int64_t{1} << 20;  // what cuDNN wants beside its sums
// LibTorch keeps as many fp32 sums of the queries' gradients as fill this many multiprocessors with heads, and rounds each
// sequence up to a tile of rows: the least number of sums counts that where sequences have 32 rows or more on average.
constexpr std::int64_t kFlashMultiprocessors = 132;
constexpr std::int64_t kFlashRowTile = 128;
constexpr std::int64_t kLeastFlashSums = 5;
constexpr int kMaxFlashHeadDim = 256;

// Of all key-value heads, or as many at a time as the limit has room for.
std::int64_t WithinLimit(std::int64_t bytes_of_head, std::int64_t num_heads, std::int64_t limit_bytes) {
  return std::max(bytes_of_head, std::min(bytes_of_head * num_heads, limit_bytes)) + kCudnnMarginBytes;
}

}  // namespace

std::int64_t AttentionRowsBucket(std::int64_t rows) {
  if (rows <= kLeastRows) return kLeastRows;
  const auto step = std::max<std::int64_t>(static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(rows))) / 4, 64);
  return (rows + step - 1) / step * step;
}

std::int64_t CudnnForwardBytes(const ModelConfig& config, std::int64_t num_queries) {
  return num_queries * (config.num_heads / config.num_kv_heads) * (2 * config.head_dim + 4);
}

std::int64_t CudnnBackwardBytes(const ModelConfig& config, std::int64_t num_queries, std::int64_t num_keys) {
  const std::int64_t d = config.head_dim;
  return AttentionRowsBucket(num_queries) * (4 * d + 4) + num_queries * (4 * d + 4) + num_keys * 4 * d;
}

AttentionKernel ChooseAttention(const ModelConfig& config, StorageFormat format, const AttentionOptions& options) {
  const int d = config.head_dim;
  if (format == StorageFormat::kFp32) return AttentionKernel::kOwn;
  if (!options.is_deterministic && (d == 64 || d == 128 || d == 256)) return AttentionKernel::kCudnn;
  return d % 8 == 0 && d <= kMaxFlashHeadDim ? AttentionKernel::kFlash : AttentionKernel::kOwn;
}

AttentionScratch PlanAttentionScratch(const ModelConfig& config, StorageFormat format, const AttentionOptions& options,
                                      std::int64_t num_rows) {
  const std::int64_t q = config.q_size(), kv = config.kv_size(), heads = config.num_heads, kv_heads = config.num_kv_heads;
  switch (ChooseAttention(config, format, options)) {
    case AttentionKernel::kOwn:
      return {.forward_bytes = 0, .backward_bytes = 4 * heads * num_rows};
    case AttentionKernel::kCudnn:
      return {
          .forward_bytes = WithinLimit(CudnnForwardBytes(config, num_rows), kv_heads, options.scratch_limit_bytes),
          .backward_bytes = WithinLimit(CudnnBackwardBytes(config, num_rows, num_rows), kv_heads, options.scratch_limit_bytes)};
    case AttentionKernel::kFlash:
      break;
  }
  // Gathered queries, keys and values, and of the backward pass outputs and their gradients; what comes out; in the backward
  // pass keys' and values' gradients for every query head, and several fp32 sums of the queries'.
  const std::int64_t gathered = 2 * q + 2 * 2 * kv, padded_q = heads * ((config.head_dim + 31) / 32 * 32);
  const std::int64_t sums = std::max((kFlashMultiprocessors + heads - 1) / heads, kLeastFlashSums);
  return {.forward_bytes = num_rows * (gathered + 2 * q + 2 * 4 * heads),
          .backward_bytes = num_rows * (gathered + 2 * 2 * q + 2 * q + 2 * 2 * kv + 2 * 2 * q + 3 * 4 * heads) +
                            4 * padded_q * sums * (num_rows + kFlashRowTile)};
}

AttentionRows::AttentionRows(const MicroBatch& batch) : num_rows(static_cast<std::int64_t>(batch.token_ids.size())) {
  std::int32_t end = 0, prompt_begin = -1, prompt_end = -1;
  query_begins = key_begins = {0};
  const auto close_group = [&] {
    const auto queries = static_cast<std::int32_t>(query_rows.size());
    if (prompt_begin < 0 || queries == query_begins.back()) return;
    for (std::int32_t row = prompt_begin; row < prompt_end; ++row) key_rows.push_back(row);
    longest_query = std::max<std::int64_t>(longest_query, queries - query_begins.back());
    longest_key = std::max<std::int64_t>(longest_key, prompt_end - prompt_begin);
    query_begins.push_back(queries);
    key_begins.push_back(static_cast<std::int32_t>(key_rows.size()));
  };
  for (const PackedCompletion& completion : batch.completions) {
    if (completion.prompt_begin != prompt_begin || completion.prompt_end != prompt_end) {
      close_group();
      if (completion.prompt_begin != end || completion.prompt_end <= end) return;
      prompt_begin = completion.prompt_begin;
      end = prompt_end = completion.prompt_end;
      own_begins.push_back(prompt_begin);
    }
    if (completion.begin == completion.end) continue;
    if (completion.begin != end || completion.end <= end) return;
    if (completion.begin != prompt_end) {
      own_begins.push_back(completion.begin);
      for (std::int32_t row = completion.begin; row < completion.end; ++row) query_rows.push_back(row);
    }
    end = completion.end;
  }
  close_group();
  own_begins.push_back(end);
  for (std::size_t n = 1; n < own_begins.size(); ++n) {
    longest_own = std::max<std::int64_t>(longest_own, own_begins[n] - own_begins[n - 1]);
  }
  is_served = end > 0;
}

}  // namespace tandem
