#include "trainer_server/policy/fused_attention.h"

#include <algorithm>
#include <bit>

namespace tandem {
namespace {

constexpr std::int64_t kLeastRows = 128;                           // of a bucket
constexpr std::int64_t kCudnnMarginBytes = std::int64_t{1} << 20;  // what cuDNN wants beside its sums
constexpr std::int64_t kFlashMultiprocessors = 132;                // LibTorch sums queries' gradients once for so many heads

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

std::int64_t CudnnScratchBytes(const ModelConfig& config, std::int64_t num_rows, std::int64_t scratch_limit_bytes) {
  const std::int64_t of_head = std::max(CudnnForwardBytes(config, num_rows), CudnnBackwardBytes(config, num_rows, num_rows));
  return std::max(of_head, std::min(of_head * config.num_kv_heads, scratch_limit_bytes)) + kCudnnMarginBytes;
}

std::int64_t FlashScratchBytes(const ModelConfig& config, std::int64_t num_rows) {
  const std::int64_t q = config.q_size(), kv = config.kv_size(), heads = config.num_heads;
  const std::int64_t sums = (kFlashMultiprocessors + heads - 1) / heads;
  // Gathered queries, outputs and their gradients, keys and values; gradients; keys' and values' for every query head;
  // log-sum-exps.
  const std::int64_t of_row = 3 * 2 * q + 2 * 2 * kv + 2 * q + 2 * 2 * kv + 2 * 2 * q + 4 * q * sums + 3 * 4 * heads;
  return num_rows * of_row;
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
