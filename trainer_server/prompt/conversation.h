// A conversation in which the model has several turns: what is said to it between them, as ids behind the ids that it drew. An
// answer is never encoded again. Thread-compatible.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/model/prompt_encoder.h"

namespace tandem {

class Conversation {
 public:
  // `messages` hold at least one open turn, the first of which is asked for; none is the last. Requires: `encoder` outlives it.
  Conversation(const PromptEncoder* encoder, std::string template_arguments, std::vector<ChatMessage> messages);

  // True while the model has a turn after the one asked for.
  bool is_open() const { return asked_ < messages_.size(); }

  struct Extension {
    // Ids behind the answer's, up to the next turn; or the whole prompt of that turn, when the template, shown the answer, writes
    // what was there in another way: the sample is split, and begins anew.
    std::vector<TokenId> token_ids;
    bool is_rewritten = false;
  };
  // Takes the answer that was asked for, as text. `last_id`: its last token where it ended by itself, which the template's own
  // end of turn does not repeat. Requires: is_open(). Errors: the encoder's.
  absl::StatusOr<Extension> Answer(const std::string& text, std::optional<TokenId> last_id);

 private:
  std::size_t NextOpen(std::size_t begin) const;

  const PromptEncoder* encoder_;
  std::string template_arguments_;
  std::vector<ChatMessage> messages_;
  std::size_t asked_;  // the open turn that is asked for; messages_.size(): the one behind them all
};

// Tokens at most behind the prompt of a conversation, when each of the model's turns takes `max_tokens`. Errors: the encoder's.
absl::StatusOr<std::uint64_t> MostConversationTokens(Conversation conversation, std::uint64_t max_tokens);

}  // namespace tandem
