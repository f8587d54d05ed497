#include "common/model/utf8.h"

#include <cstdint>

namespace tandem {
namespace {

// The bytes that may follow a lead byte: how many, and the bounds of the first of them (those after it are 80..BF).
struct Lead {
  std::size_t num_following = 0;
  std::uint8_t least = 0x80;
  std::uint8_t most = 0xbf;
};

Lead LeadOf(std::uint8_t byte) {
  if (byte >= 0xc2 && byte <= 0xdf) return {1};
  if (byte == 0xe0) return {2, 0xa0, 0xbf};
  if (byte == 0xed) return {2, 0x80, 0x9f};
  if (byte >= 0xe1 && byte <= 0xef) return {2};
  if (byte == 0xf0) return {3, 0x90, 0xbf};
  if (byte >= 0xf1 && byte <= 0xf3) return {3};
  if (byte == 0xf4) return {3, 0x80, 0x8f};
  return {};
}

}  // namespace

Utf8Piece FirstUtf8Piece(std::string_view text) {
  const auto byte_at = [text](std::size_t i) { return static_cast<std::uint8_t>(text[i]); };
  if (byte_at(0) < 0x80) return {1, Utf8Kind::kCharacter};
  const Lead lead = LeadOf(byte_at(0));
  if (lead.num_following == 0) return {1, Utf8Kind::kIllFormed};
  for (std::size_t i = 1; i <= lead.num_following; ++i) {
    if (i == text.size()) return {i, Utf8Kind::kIncomplete};
    const std::uint8_t least = i == 1 ? lead.least : 0x80;
    const std::uint8_t most = i == 1 ? lead.most : 0xbf;
    if (byte_at(i) < least || byte_at(i) > most) return {i, Utf8Kind::kIllFormed};
  }
  return {lead.num_following + 1, Utf8Kind::kCharacter};
}

char32_t CodePoint(std::string_view text, std::size_t size) {
  const auto byte_at = [text](std::size_t i) { return static_cast<std::uint8_t>(text[i]); };
  if (size == 1) return byte_at(0);
  char32_t value = byte_at(0) & (0xffu >> (size + 1));
  for (std::size_t i = 1; i < size; ++i) value = (value << 6) | (byte_at(i) & 0x3fu);
  return value;
}

void AppendUtf8(char32_t code_point, std::string* text) {
  const auto append = [text](char32_t byte) { text->push_back(static_cast<char>(byte)); };
  if (code_point < 0x80) {
    append(code_point);
  } else if (code_point < 0x800) {
    append(0xc0 | (code_point >> 6));
    append(0x80 | (code_point & 0x3f));
  } else if (code_point < 0x10000) {
    append(0xe0 | (code_point >> 12));
    append(0x80 | ((code_point >> 6) & 0x3f));
    append(0x80 | (code_point & 0x3f));
  } else {
    append(0xf0 | (code_point >> 18));
    append(0x80 | ((code_point >> 12) & 0x3f));
    append(0x80 | ((code_point >> 6) & 0x3f));
    append(0x80 | (code_point & 0x3f));
  }
}

std::size_t WellFormedPrefix(std::string_view text) {
  std::size_t at = 0;
  while (at < text.size()) {
    if (static_cast<std::uint8_t>(text[at]) < 0x80) {
      ++at;
      continue;
    }
    const Utf8Piece piece = FirstUtf8Piece(text.substr(at));
    if (piece.kind != Utf8Kind::kCharacter) break;
    at += piece.size;
  }
  return at;
}

std::string ReplaceIllFormed(std::string_view bytes) {
  std::string text;
  text.reserve(bytes.size());
  while (!bytes.empty()) {
    const std::size_t good = WellFormedPrefix(bytes);
    text.append(bytes.substr(0, good));
    bytes.remove_prefix(good);
    if (bytes.empty()) break;
    text.append(kReplacementCharacter);
    bytes.remove_prefix(FirstUtf8Piece(bytes).size);
  }
  return text;
}

}  // namespace tandem
