// From a prompt as a user writes it to token ids: chat template, start token, control tokens. The one way into the model for job
// prompts and for `tandem generate`, so both give the same ids. Immutable; thread-safe.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "common/model/tokenizer.h"

namespace tandem {

struct ChatMessage {
  std::string role;
  std::string content;
};

class PromptEncoder {
 public:
  // Errors: INVALID_ARGUMENT when the chat template does not parse.
  static absl::StatusOr<std::shared_ptr<const PromptEncoder>> Create(std::shared_ptr<const Tokenizer> tokenizer);
  virtual ~PromptEncoder() = default;

  // The template's text. A template that asks for the date is told 26 Jul 2024, so that a prompt is the same on every day.
  // Errors: FAILED_PRECONDITION (the model has no chat template), INVALID_ARGUMENT (the template raises, with its words).
  virtual absl::StatusOr<std::string> Render(const std::vector<ChatMessage>& messages, bool add_generation_prompt) const = 0;
  // Ids of the rendered messages: control tokens only where the template wrote them, never inside content (CASES C32); exactly
  // one start token: the template's, or else the tokenizer's (prefix_ids), or else the one that the model names (bos_text) (CASES
  // C30). Errors: Render's, and INVALID_ARGUMENT when the template builds control tokens out of the messages' own text.
  virtual absl::StatusOr<std::vector<TokenId>> EncodeChat(const std::vector<ChatMessage>& messages,
                                                          bool add_generation_prompt) const = 0;
  // Ids of plain text: prefix_ids, then the text without control tokens.
  virtual std::vector<TokenId> EncodeText(std::string_view text) const = 0;
  // A JSON array of {"role", "content"}. Errors: INVALID_ARGUMENT naming the place.
  static absl::StatusOr<std::vector<ChatMessage>> ParseMessages(std::string_view json);
};

}  // namespace tandem
