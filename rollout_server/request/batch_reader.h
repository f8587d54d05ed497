// Reads one batch from the pieces of a Generate stream: header, groups with their prompts, run. Checks everything before anything
// is computed, and bounds what a caller can make the server hold. Confined to the stream's thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/model/prompt_encoder.h"
#include "rollout_server/request/rollout_request.h"

namespace tandem {

class BatchReader {
 public:
  BatchReader(RequestLimits limits, std::shared_ptr<const PromptEncoder> encoder)
      : limits_(limits), encoder_(std::move(encoder)) {}

  // Takes the next piece. After an error the reader is spent. Errors: INVALID_ARGUMENT and RESOURCE_EXHAUSTED naming group,
  // field, value and limit; what the prompt encoder says.
  absl::Status Push(const v1::GenerateRequest& piece);
  // True after `run`: the batch is whole.
  bool is_complete() const { return is_complete_; }
  // Requires: is_complete().
  BatchRequest Take() { return std::move(batch_); }

 private:
  absl::Status ReadHeader(const v1::BatchHeader& header);
  absl::Status ReadGroup(const v1::GroupHeader& group);
  absl::Status ReadPrompt(const v1::PromptPiece& piece);
  absl::Status CloseGroup();

  RequestLimits limits_;
  std::shared_ptr<const PromptEncoder> encoder_;
  BatchRequest batch_;
  std::uint32_t num_groups_ = 0;
  bool has_header_ = false;
  bool is_complete_ = false;
  std::uint64_t num_sequences_ = 0;
  std::uint64_t num_prompt_tokens_ = 0;
  // The prompt of the last group, while its pieces come.
  v1::PromptPiece::KindCase kind_ = v1::PromptPiece::KIND_NOT_SET;
  std::vector<std::uint32_t> ids_;
  std::string text_, template_arguments_;
};

}  // namespace tandem
