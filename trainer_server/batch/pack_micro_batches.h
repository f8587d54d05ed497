// Packs a step's groups into micro-batches of bounded size. Greedy, in the order given, so that the same groups always give the
// same micro-batches. Pure; thread-safe.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "common/base/status.h"
#include "trainer_server/batch/micro_batch.h"

namespace tandem {

struct CompletionToPack {
  std::int32_t sequence_index = 0;           // position in the step's sequences, kept in PackedCompletion
  std::span<const std::uint32_t> token_ids;  // may be empty: it then takes no row but stays in the micro-batch
  std::span<const std::uint8_t> loss_mask;   // one a token; 1: the token gets a head row
};

struct GroupToPack {
  std::span<const std::uint32_t> prompt_ids;  // at least one token: its last row predicts each completion's first token
  std::vector<CompletionToPack> completions;
};

// Rows of a micro-batch at most, when the step's longest sequence has `longest` tokens: `given`, or, where that is 0, as many as
// keep the device busy, and the longest sequence in any case.
std::int64_t MicroBatchLimit(std::int64_t given, std::int64_t longest);

// Each micro-batch holds whole completions and at most `max_tokens` rows. A group is kept together when it fits into one
// micro-batch; a larger one is split between completions and its prompt is packed again in each part. Groups without completions
// are left out. Errors: INVALID_ARGUMENT naming the sequence (an empty prompt; a mask of another length; prompt and completion
// beyond max_tokens).
absl::StatusOr<std::vector<MicroBatch>> PackMicroBatches(std::span<const GroupToPack> groups, std::int64_t max_tokens);

// Adds a head row for every token of a prompt but its first, after those of completions. A prompt that completions share counts
// once.
void AddPromptHeadRows(MicroBatch* batch);

}  // namespace tandem
