// Packed tokens for one forward and backward pass: no padding. A group's prompt is packed once; its completions follow and attend
// to it.
//
// Example: prompt of 3 tokens with completions of 2 and 1: token_ids [p0 p1 p2 a0 a1 b0], positions [0 1 2 3 4 3].
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tandem {

struct PackedCompletion {
  std::int32_t sequence_index = 0;  // position in the step's sequences
  std::int32_t prompt_begin = 0;    // rows of its prompt
  std::int32_t prompt_end = 0;
  std::int32_t begin = 0;  // rows of the completion
  std::int32_t end = 0;
};

struct MicroBatch {
  std::vector<std::int64_t> token_ids;  // [num_tokens]
  std::vector<std::int64_t> positions;  // [num_tokens]
  std::vector<PackedCompletion> completions;
  // One entry a completion token with loss mask 1, in the order of completions: the row whose hidden state predicts it, the
  // token.
  std::vector<std::int64_t> head_rows;
  std::vector<std::int64_t> head_targets;
  std::size_t num_prompt_head_rows = 0;  // of prompts' tokens, after all others; see AddPromptHeadRows
};

}  // namespace tandem
