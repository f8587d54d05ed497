// Text of others as a terminal or a log may show it. Stateless.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace tandem {

enum class LineEnds { kKeep, kEscape };

// `text` with what a terminal takes for a command, or that hides what is written, spelled out: control characters of ASCII but
// tab as \u001b, those of Latin-1 and the marks that turn the direction of writing as \u009b and \u202e; newlines stay or become
// \n.
std::string Printable(std::string_view text, LineEnds line_ends);

// At most `limit` bytes (3 or more), cut between characters of UTF-8 and ended by "..." when longer.
std::string Shorten(std::string text, std::size_t limit);

}  // namespace tandem
