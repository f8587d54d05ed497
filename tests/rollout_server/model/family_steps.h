// The two steps by which a golden model is asked for its logits: its prompt at once, then its last token.
#pragma once

#include <cstdint>
#include <numeric>

#include "rollout_server/model/decoder_model.h"
#include "tests/support/family_golden.h"

namespace tandem::testing {

// Logits of every row. Blocks of 16 tokens, 0 and 1 of the cache.
inline StepBatch PrefillStep(const FamilyGolden& golden) {
  const auto num_prompt_tokens = static_cast<std::int32_t>(golden.prefill_logits.size());
  StepBatch batch;
  batch.token_ids.assign(golden.token_ids.begin(), golden.token_ids.end() - 1);
  batch.positions.resize(batch.token_ids.size());
  std::iota(batch.positions.begin(), batch.positions.end(), 0);
  batch.slot_mapping.assign(batch.positions.begin(), batch.positions.end());
  batch.logit_rows = batch.positions;
  batch.cu_query_lens = {0, num_prompt_tokens};
  batch.context_lens = {num_prompt_tokens};
  batch.block_tables = {{0, 1}};
  batch.adapter_of = {-1};
  return batch;
}

// Requires: PrefillStep has run.
inline StepBatch DecodeStep(const FamilyGolden& golden) {
  const auto num_prompt_tokens = static_cast<std::int32_t>(golden.prefill_logits.size());
  StepBatch batch;
  batch.token_ids = {golden.token_ids.back()};
  batch.positions = {num_prompt_tokens};
  batch.slot_mapping = {num_prompt_tokens};
  batch.logit_rows = {0};
  batch.cu_query_lens = {0, 1};
  batch.context_lens = {num_prompt_tokens + 1};
  batch.block_tables = {{0, 1}};
  batch.adapter_of = {-1};
  return batch;
}

}  // namespace tandem::testing
