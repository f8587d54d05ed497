#include "common/base/printable.h"

#include <cstdint>

#include "absl/strings/str_format.h"

namespace tandem {
namespace {

constexpr std::string_view kDirections = "\xe2\x80";  // U+2000 to U+203F, of which U+202A to U+202E turn it
constexpr std::string_view kIsolates = "\xe2\x81";    // U+2040 to U+207F, of which U+2066 to U+2069 do

}  // namespace

std::string Printable(std::string_view text, LineEnds line_ends) {
  std::string printable;
  printable.reserve(text.size());
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<std::uint8_t>(text[i]);
    const auto follows = [&](std::size_t at, std::uint8_t first, std::uint8_t last) {
      return i + at < text.size() && static_cast<std::uint8_t>(text[i + at]) >= first &&
             static_cast<std::uint8_t>(text[i + at]) <= last;
    };
    if (byte == '\n' && line_ends == LineEnds::kEscape) {
      printable += "\\n";
    } else if ((byte < 0x20 && byte != '\n' && byte != '\t') || byte == 0x7f) {
      absl::StrAppendFormat(&printable, "\\u%04x", byte);
    } else if (byte == 0xc2 && follows(1, 0x80, 0x9f)) {
      absl::StrAppendFormat(&printable, "\\u%04x", static_cast<std::uint8_t>(text[++i]));
    } else if ((text.substr(i).starts_with(kDirections) && follows(2, 0xaa, 0xae)) ||
               (text.substr(i).starts_with(kIsolates) && follows(2, 0xa6, 0xa9))) {
      const int low = static_cast<std::uint8_t>(text[i + 1]) == 0x80 ? 0x2000 : 0x2040;
      absl::StrAppendFormat(&printable, "\\u%04x", low + (static_cast<std::uint8_t>(text[i + 2]) & 0x3f));
      i += 2;
    } else {
      printable += text[i];
    }
  }
  return printable;
}

std::string Shorten(std::string text, std::size_t limit) {
  if (text.size() <= limit) return text;
  std::size_t end = limit - 3;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;
  text.resize(end);
  return text + "...";
}

}  // namespace tandem
