// Which rows of a data set a job trains on, which it holds out for evaluation, and which it leaves out: a pure function of the
// file, the tokenizer and DataConfig. Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "common/model/prompt_encoder.h"
#include "proto/job.pb.h"
#include "trainer_server/prompt/data_set.h"

namespace tandem {

inline constexpr std::size_t kMaxFilteredRows = std::size_t{1} << 20;  // whose prompts a filter encodes

using RowIndices = std::shared_ptr<const std::vector<std::uint32_t>>;  // ascending; null: every row

struct RowSelection {
  RowIndices trained;
  RowIndices held_out;  // null: none
  v1::DataCounts counts;
};

// The split is drawn over all rows before any is left out, so that a filter moves no row from one side to the other. With
// min_prompt_tokens or max_prompt_tokens every prompt is encoded. Errors: INVALID_ARGUMENT naming the field (nothing is left to
// train on or to hold out, more than kMaxFilteredRows to encode) or the line whose prompt cannot be encoded.
absl::StatusOr<RowSelection> SelectRows(const PromptEncoder& encoder, const v1::DataConfig& config, const DataSet& data);

}  // namespace tandem
