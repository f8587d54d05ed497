// UTF-8 by Unicode 14, table 3-7: whole characters and the maximal ill-formed pieces that become one U+FFFD each. Stateless.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace tandem {

inline constexpr std::string_view kReplacementCharacter = "\xef\xbf\xbd";

enum class Utf8Kind {
  kCharacter,   // a well-formed character
  kIllFormed,   // a maximal piece that no further byte can make well-formed
  kIncomplete,  // the text ends inside a character
};
struct Utf8Piece {
  std::size_t size = 0;  // bytes, at least 1
  Utf8Kind kind = Utf8Kind::kCharacter;
};

// The first piece of `text`. Requires: not empty.
Utf8Piece FirstUtf8Piece(std::string_view text);
// The code point of the well-formed character at the start of `text`, whose size is `size`.
char32_t CodePoint(std::string_view text, std::size_t size);
void AppendUtf8(char32_t code_point, std::string* text);
// How many bytes at the start of `text` are well-formed.
std::size_t WellFormedPrefix(std::string_view text);
inline bool IsWellFormed(std::string_view text) { return WellFormedPrefix(text) == text.size(); }
// `bytes` with every ill-formed or incomplete piece as one U+FFFD.
std::string ReplaceIllFormed(std::string_view bytes);

}  // namespace tandem
