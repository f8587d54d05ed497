// The text of one completion as it grows, and its stop strings. A match may begin inside one token and end inside another; text
// that may still become a match is held back (CASES C05). Confined to the engine thread.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "common/model/tokenizer.h"

namespace tandem {

class CompletionText {
 public:
  CompletionText(std::shared_ptr<const Tokenizer> tokenizer, std::vector<std::string> stop_strings)
      : detokenizer_(std::move(tokenizer)), stop_strings_(std::move(stop_strings)) {}

  struct Step {
    std::string text;         // certain now
    bool is_stopped = false;  // a stop string is whole; `text` ends before it, and what follows is dropped
  };
  Step Push(TokenId id);
  // What was held back, for a completion that no stop string ended.
  std::string Finish();

 private:
  IncrementalDetokenizer detokenizer_;
  std::vector<std::string> stop_strings_;
  std::string held_;
};

}  // namespace tandem
