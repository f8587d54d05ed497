#include "rollout_server/sample/completion_text.h"

#include <algorithm>
#include <utility>

namespace tandem {

CompletionText::Step CompletionText::Push(TokenId id) {
  held_ += detokenizer_.Push(id);
  std::size_t match = std::string::npos;
  for (const std::string& stop : stop_strings_) match = std::min(match, held_.find(stop));
  if (match != std::string::npos) return {.text = std::exchange(held_, "").substr(0, match), .is_stopped = true};
  // The longest end of the text with which a stop string begins.
  std::size_t open_bytes = 0;
  for (const std::string& stop : stop_strings_) {
    for (std::size_t size = std::min(held_.size(), stop.size() - 1); size > open_bytes; --size) {
      if (held_.compare(held_.size() - size, size, stop, 0, size) == 0) open_bytes = size;
    }
  }
  Step step{.text = held_.substr(0, held_.size() - open_bytes)};
  held_.erase(0, step.text.size());
  return step;
}

std::string CompletionText::Finish() { return std::exchange(held_, "") + detokenizer_.Finish(); }

}  // namespace tandem
