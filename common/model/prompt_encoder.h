// From a prompt as a user writes it to token ids: chat template, start token, control tokens. The one way into the model for job
// prompts and for `tandem generate`, so both give the same ids. Immutable; thread-safe.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/model/tokenizer.h"

namespace tandem {

struct ChatMessage {
  std::string role;
  std::string content;
  // A JSON object with what else templates ask a message for ("tool_calls", "name", "tool_call_id", ...); empty: nothing.
  std::string further_fields = {};
  bool is_open = false;  // an assistant's turn that is yet to be written: without content
};

struct ChatOptions {
  bool add_generation_prompt = true;
  // A JSON object of further variables of the template, as {"enable_thinking": false}; empty: none. Texts in it are content.
  std::string template_arguments = {};
};

class PromptEncoder {
 public:
  // Errors: INVALID_ARGUMENT when the chat template does not parse.
  static absl::StatusOr<std::shared_ptr<const PromptEncoder>> Create(std::shared_ptr<const Tokenizer> tokenizer);
  virtual ~PromptEncoder() = default;

  // The template's text. A template that asks for the date is told 26 Jul 2024, so that a prompt is the same on every day.
  // Errors: FAILED_PRECONDITION (the model has no chat template), INVALID_ARGUMENT (the template raises, with its words; a
  // message that is open; template arguments that CheckTemplateArguments refuses).
  virtual absl::StatusOr<std::string> Render(const std::vector<ChatMessage>& messages, const ChatOptions& options) const = 0;
  // Ids of the rendered messages: control tokens only where the template wrote them, never inside content (CASES C32); exactly
  // one start token: the template's, or else the tokenizer's (prefix_ids), or else the one that the model names (bos_text) (CASES
  // C30). Errors: Render's, and INVALID_ARGUMENT when the template builds control tokens out of the messages' own text.
  virtual absl::StatusOr<std::vector<TokenId>> EncodeChat(const std::vector<ChatMessage>& messages,
                                                          const ChatOptions& options) const = 0;
  // Ids of what the template writes behind the content of messages[answer_index] and before it asks for the next turn: what a
  // conversation's ids are extended by, so that the answer's own ids stay as they were drawn (CASES C31). nullopt: shown the
  // whole conversation, the template writes what stands before the answer, or the answer, another way. Errors: EncodeChat's.
  virtual absl::StatusOr<std::optional<std::vector<TokenId>>> EncodeBehind(const std::vector<ChatMessage>& messages,
                                                                           std::size_t answer_index,
                                                                           const ChatOptions& options) const = 0;
  // Ids of plain text: prefix_ids, then the text without control tokens.
  virtual std::vector<TokenId> EncodeText(std::string_view text) const = 0;
  // A JSON array of {"role", "content"}, with any further fields. Content is text, or an array of {"type": "text", "text"}, whose
  // texts are joined; an assistant's may be null: with "tool_calls" it is empty, else the message is open. Errors:
  // INVALID_ARGUMENT naming the place.
  static absl::StatusOr<std::vector<ChatMessage>> ParseMessages(std::string_view json);
  // Errors: INVALID_ARGUMENT when `json` is no object, longer than 64 KiB, or sets a variable that is not the user's to set.
  static absl::Status CheckTemplateArguments(std::string_view json);
};

}  // namespace tandem
