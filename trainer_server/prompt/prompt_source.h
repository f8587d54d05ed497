// First arrow of the loop: job -> prompts. Draws rows in an order that is a pure function of the seed: each epoch is a
// permutation of its own, and a position in the stream of prompts names one row, so a cursor is one number. Thread-compatible.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/model/prompt_encoder.h"
#include "proto/job.pb.h"
#include "trainer_server/prompt/data_set.h"
#include "trainer_server/prompt/row_selection.h"

namespace tandem {

struct EncodedPrompt {
  std::vector<TokenId> token_ids;  // up to the model's first turn
  // The whole conversation where the model has more turns than one, those yet to be written open; else empty.
  std::vector<ChatMessage> messages;
};

struct Prompt {
  std::size_t row_index = 0;
  nlohmann::json row;  // all fields; rewards name them
  std::vector<TokenId> token_ids;
  std::vector<ChatMessage> messages;  // see EncodedPrompt
};

// The prompt of a row. `line` is for messages. Errors: INVALID_ARGUMENT naming the line (no such field, neither string nor
// messages, empty, beyond the template).
absl::StatusOr<EncodedPrompt> EncodePrompt(const PromptEncoder& encoder, const v1::DataConfig& config, const nlohmann::json& row,
                                           std::size_t line);

class PromptSource {
 public:
  // Draws of `rows` alone.
  PromptSource(std::shared_ptr<const DataSet> data, RowIndices rows, std::shared_ptr<const PromptEncoder> encoder,
               v1::DataConfig config, std::uint64_t seed);

  // The place among the rows at `position` of the stream: RowAt(e * num_rows + i) is the i-th of epoch e's permutation.
  std::size_t RowAt(std::uint64_t position);
  // Positions [cursor, cursor + count).
  absl::StatusOr<std::vector<Prompt>> Draw(std::uint64_t cursor, std::size_t count);
  // The row at `place` among the rows, [0, num_rows()).
  absl::StatusOr<Prompt> Read(std::size_t place) const;
  std::size_t num_rows() const { return rows_ == nullptr ? data_->num_rows() : rows_->size(); }

 private:
  std::shared_ptr<const DataSet> data_;
  RowIndices rows_;
  std::shared_ptr<const PromptEncoder> encoder_;
  const v1::DataConfig config_;
  const std::uint64_t seed_;
  std::uint64_t epoch_ = 0;
  std::vector<std::uint32_t> permutation_;  // of epoch_; empty: not made yet
};

}  // namespace tandem
