#include "common/model/byte_pair_merges.h"

#include <algorithm>

#include "common/model/utf8.h"

namespace tandem {
namespace {

constexpr bool IsPrintableLatin1(std::uint32_t byte) {
  return (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || (byte >= 0xae && byte <= 0xff);
}

constexpr std::array<char16_t, 256> MakeLetters() {
  std::array<char16_t, 256> letters{};
  char16_t next = 0x100;
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    letters[byte] = IsPrintableLatin1(byte) ? static_cast<char16_t>(byte) : next++;
  }
  return letters;
}
constexpr std::array<char16_t, 256> kLetters = MakeLetters();
constexpr std::uint32_t kLettersEnd = 0x100 + 68;

constexpr std::array<std::int16_t, kLettersEnd> MakeBytes() {
  std::array<std::int16_t, kLettersEnd> bytes{};
  for (std::int16_t& byte : bytes) byte = -1;
  for (std::uint32_t byte = 0; byte < 256; ++byte) bytes[kLetters[byte]] = static_cast<std::int16_t>(byte);
  return bytes;
}
constexpr std::array<std::int16_t, kLettersEnd> kBytes = MakeBytes();

}  // namespace

std::string ByteLetters(std::string_view bytes) {
  std::string letters;
  for (const char byte : bytes) AppendUtf8(kLetters[static_cast<std::uint8_t>(byte)], &letters);
  return letters;
}

std::optional<std::string> BytesOfLetters(std::string_view letters) {
  std::string bytes;
  while (!letters.empty()) {
    const Utf8Piece piece = FirstUtf8Piece(letters);
    if (piece.kind != Utf8Kind::kCharacter) return std::nullopt;
    const char32_t letter = CodePoint(letters, piece.size);
    if (letter >= kLettersEnd || kBytes[letter] < 0) return std::nullopt;
    bytes.push_back(static_cast<char>(kBytes[letter]));
    letters.remove_prefix(piece.size);
  }
  return bytes;
}

absl::StatusOr<BytePairMerges> BytePairMerges::Create(const absl::flat_hash_map<std::string_view, TokenId>& ids,
                                                      const std::vector<std::pair<std::string, std::string>>& merges) {
  BytePairMerges result;
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    const char raw = static_cast<char>(byte);
    const auto found = ids.find(ByteLetters({&raw, 1}));
    if (found != ids.end()) result.byte_ids_[byte] = found->second;
  }
  result.merges_.reserve(merges.size());
  for (std::size_t rank = 0; rank < merges.size(); ++rank) {
    const auto& [left_text, right_text] = merges[rank];
    const std::string merged_text = left_text + right_text;
    const auto left = ids.find(left_text);
    const auto right = ids.find(right_text);
    const auto merged = ids.find(merged_text);
    for (const auto& [found, text] :
         {std::pair{left, &left_text}, std::pair{right, &right_text}, std::pair{merged, &merged_text}}) {
      if (found == ids.end()) {
        return absl::InvalidArgumentError(absl::StrCat("tokenizer: merge ", rank, " ('", left_text, "' with '", right_text,
                                                       "') needs '", *text, "', which is no ordinary token"));
      }
    }
    // A pair named twice has its last rank, as in Hugging Face's tokenizers.
    result.merges_[PairKey(left->second, right->second)] = {static_cast<std::uint32_t>(rank), merged->second};
  }
  return result;
}

void BytePairMerges::PushCandidate(std::int32_t left, Workspace* workspace) const {
  const std::int32_t right = workspace->symbols_[left].next;
  if (right < 0) return;
  const std::uint64_t pair = PairKey(workspace->symbols_[left].id, workspace->symbols_[right].id);
  const auto found = merges_.find(pair);
  if (found == merges_.end()) return;
  workspace->heap_.push_back({found->second.rank, left, pair});
  std::push_heap(workspace->heap_.begin(), workspace->heap_.end());
}

void BytePairMerges::Encode(std::string_view piece, Workspace* workspace, std::vector<TokenId>* ids) const {
  std::vector<Workspace::Symbol>& symbols = workspace->symbols_;
  std::vector<Workspace::Candidate>& heap = workspace->heap_;
  symbols.clear();
  heap.clear();
  for (const char byte : piece) {
    const std::optional<TokenId> id = byte_ids_[static_cast<std::uint8_t>(byte)];
    if (!id.has_value()) continue;
    const auto index = static_cast<std::int32_t>(symbols.size());
    if (index > 0) symbols.back().next = index;
    symbols.push_back({*id, index - 1, -1, false});
  }
  for (std::size_t i = 0; i + 1 < symbols.size(); ++i) PushCandidate(static_cast<std::int32_t>(i), workspace);

  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end());
    const Workspace::Candidate best = heap.back();
    heap.pop_back();
    Workspace::Symbol& left = symbols[best.left];
    if (left.is_merged_away || left.next < 0 || PairKey(left.id, symbols[left.next].id) != best.pair) continue;
    Workspace::Symbol& right = symbols[left.next];
    left.id = merges_.find(best.pair)->second.result;
    left.next = right.next;
    right.is_merged_away = true;
    if (left.next >= 0) symbols[left.next].previous = best.left;
    if (left.previous >= 0) PushCandidate(left.previous, workspace);
    PushCandidate(best.left, workspace);
  }
  for (std::int32_t i = symbols.empty() ? -1 : 0; i >= 0; i = symbols[i].next) ids->push_back(symbols[i].id);
}

}  // namespace tandem
