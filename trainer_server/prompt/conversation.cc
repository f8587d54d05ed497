#include "trainer_server/prompt/conversation.h"

#include <algorithm>

namespace tandem {

Conversation::Conversation(const PromptEncoder* encoder, std::string template_arguments, std::vector<ChatMessage> messages)
    : encoder_(encoder),
      template_arguments_(std::move(template_arguments)),
      messages_(std::move(messages)),
      asked_(NextOpen(0)) {}

std::size_t Conversation::NextOpen(std::size_t begin) const {
  const auto from = messages_.begin() + static_cast<std::ptrdiff_t>(begin);
  return static_cast<std::size_t>(std::find_if(from, messages_.end(), [](const ChatMessage& m) { return m.is_open; }) -
                                  messages_.begin());
}

absl::StatusOr<Conversation::Extension> Conversation::Answer(const std::string& text, std::optional<TokenId> last_id) {
  const std::size_t answered = asked_;
  messages_[answered].content = text;
  messages_[answered].is_open = false;
  asked_ = NextOpen(answered + 1);
  const std::vector<ChatMessage> said(messages_.begin(), messages_.begin() + static_cast<std::ptrdiff_t>(asked_));
  const ChatOptions options{.add_generation_prompt = true, .template_arguments = template_arguments_};
  TANDEM_ASSIGN_OR_RETURN(std::optional<std::vector<TokenId>> behind, encoder_->EncodeBehind(said, answered, options));
  if (behind.has_value()) {
    if (!behind->empty() && last_id.has_value() && behind->front() == *last_id) behind->erase(behind->begin());
    return Extension{.token_ids = *std::move(behind), .is_rewritten = false};
  }
  Extension anew{.token_ids = {}, .is_rewritten = true};
  TANDEM_ASSIGN_OR_RETURN(anew.token_ids, encoder_->EncodeChat(said, options));
  return anew;
}

absl::StatusOr<std::uint64_t> MostConversationTokens(Conversation conversation, std::uint64_t max_tokens) {
  std::uint64_t tokens = max_tokens;
  while (conversation.is_open()) {
    TANDEM_ASSIGN_OR_RETURN(const Conversation::Extension extension, conversation.Answer("x", std::nullopt));
    tokens += extension.token_ids.size() + max_tokens;
  }
  return tokens;
}

}  // namespace tandem
