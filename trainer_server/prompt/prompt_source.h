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

namespace tandem {

struct Prompt {
  std::size_t row_index = 0;
  nlohmann::json row;  // all fields; rewards name them
  std::vector<TokenId> token_ids;
};

// The ids of a row's prompt. `line` is for messages. Errors: INVALID_ARGUMENT naming the line (no such field, neither string nor
// messages, empty, beyond the template).
absl::StatusOr<std::vector<TokenId>> EncodePrompt(const PromptEncoder& encoder, const v1::DataConfig& config,
                                                  const nlohmann::json& row, std::size_t line);

class PromptSource {
 public:
  PromptSource(std::shared_ptr<const DataSet> data, std::shared_ptr<const PromptEncoder> encoder, v1::DataConfig config,
               std::uint64_t seed);

  // The row at `position` of the stream: row RowAt(e * num_rows + i) is the i-th of epoch e's permutation.
  std::size_t RowAt(std::uint64_t position);
  // Positions [cursor, cursor + count).
  absl::StatusOr<std::vector<Prompt>> Draw(std::uint64_t cursor, std::size_t count);
  absl::StatusOr<Prompt> Read(std::size_t row_index) const;
  std::size_t num_rows() const { return data_->num_rows(); }

 private:
  std::shared_ptr<const DataSet> data_;
  std::shared_ptr<const PromptEncoder> encoder_;
  const v1::DataConfig config_;
  const std::uint64_t seed_;
  std::uint64_t epoch_ = 0;
  std::vector<std::uint32_t> permutation_;  // of epoch_; empty: not made yet
};

}  // namespace tandem
