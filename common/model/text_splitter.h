// The first half of a byte-level tokenizer: text into the pieces that byte-pair merges never cross (PCRE2), and NFC (ICU).
// Immutable after Create; thread-safe.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/status.h"

namespace tandem {

// Patterns are applied one after the other: each splits every piece of the one before, its matches and what lies between them
// being pieces of their own. They are read as Oniguruma reads them:
// \s is exactly White_Space, ^ and $ stand for lines.
class TextSplitter {
 public:
  using PieceFunction = std::function<void(std::string_view)>;

  // Errors: INVALID_ARGUMENT naming the pattern, the place in it and PCRE2's words.
  static absl::StatusOr<TextSplitter> Create(const std::vector<std::string>& patterns);
  TextSplitter(TextSplitter&&) noexcept;
  TextSplitter& operator=(TextSplitter&&) noexcept;
  ~TextSplitter();

  // Calls `on_piece` for each piece of `text`, in order; the pieces joined are `text`. Ill-formed UTF-8 is a piece of its own. A
  // pattern that passes PCRE2's match limit leaves the rest of its stretch as one piece.
  void Split(std::string_view text, const PieceFunction& on_piece) const;

 private:
  struct Pattern;
  class Pass;
  TextSplitter();
  std::vector<std::unique_ptr<Pattern>> patterns_;
};

// Normalization form C of `text`; ill-formed UTF-8 stays as it is.
std::string NormalizeNfc(std::string_view text);
// Whether the code point has the property White_Space.
bool IsWhiteSpace(char32_t code_point);

}  // namespace tandem
