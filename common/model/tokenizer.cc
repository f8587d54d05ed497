#include "common/model/tokenizer.h"

#include <algorithm>
#include <array>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "common/model/byte_pair_merges.h"
#include "common/model/text_splitter.h"
#include "common/model/utf8.h"

namespace tandem {
namespace {

constexpr std::size_t kMaxTokens = std::size_t{1} << 24;
constexpr std::string_view kDigit = R"(\p{N})";

absl::Status CheckSpec(const TokenizerSpec& spec) {
  const auto fail = [](const auto&... message) { return absl::InvalidArgumentError(absl::StrCat("tokenizer: ", message...)); };
  if (spec.tokens.empty() || spec.tokens.size() > kMaxTokens) {
    return fail(spec.tokens.size(), " tokens, from 1 to ", kMaxTokens, " are possible");
  }
  for (std::size_t id = 0; id < spec.tokens.size(); ++id) {
    if (!IsWellFormed(spec.tokens[id])) return fail("token ", id, " is not UTF-8");
  }
  if (spec.merges.size() > kMaxTokens) return fail(spec.merges.size(), " merges, at most ", kMaxTokens);
  for (const AddedToken& added : spec.added_tokens) {
    if (added.id >= spec.tokens.size()) return fail("added token ", added.id, ", but there are ", spec.tokens.size(), " tokens");
    if (added.text.empty() || !IsWellFormed(added.text)) return fail("added token ", added.id, " has an empty text or no UTF-8");
    if (added.is_special && added.is_normalized) return fail("added token ", added.id, " is special and normalized");
  }
  for (const TokenId id : spec.prefix_ids) {
    if (id >= spec.tokens.size()) return fail("start token ", id, ", but there are ", spec.tokens.size(), " tokens");
  }
  return absl::OkStatus();
}

// Finds added tokens in a text: leftmost first, the longest among those that begin together.
class AddedTokenFinder {
 public:
  // `text`: what to look for, the token's own text or its normal form.
  void Add(std::string text, const AddedToken* token) {
    auto& candidates = by_first_byte_[FirstByte(text)];
    candidates.push_back({std::move(text), token});
  }
  void Finish() {
    for (auto& tokens : by_first_byte_) {
      std::stable_sort(tokens.begin(), tokens.end(),
                       [](const Entry& a, const Entry& b) { return a.text.size() > b.text.size(); });
      is_empty_ = is_empty_ && tokens.empty();
    }
  }

  // Calls on_text(text) and on_token(token) in order. Special tokens count only where they lie inside a range of `allowed`.
  template <typename OnText, typename OnToken>
  void Scan(std::string_view text, std::span<const TextRange> allowed, const OnText& on_text, const OnToken& on_token) const {
    std::size_t done = 0;
    for (std::size_t at = 0; at < text.size() && !is_empty_;) {
      while (!allowed.empty() && allowed.front().end <= at) allowed = allowed.subspan(1);
      const Entry* entry = Find(text, at, allowed);
      if (entry == nullptr) {
        ++at;
        continue;
      }
      const std::size_t begin = entry->token->strips_left ? StripLeft(text, done, at) : at;
      at += entry->text.size();
      if (entry->token->strips_right) at = StripRight(text, at);
      if (begin > done) on_text(text.substr(done, begin - done));
      on_token(*entry->token);
      done = at;
    }
    if (done < text.size()) on_text(text.substr(done));
  }

 private:
  struct Entry {
    std::string text;
    const AddedToken* token = nullptr;
  };

  static std::uint8_t FirstByte(std::string_view text) { return static_cast<std::uint8_t>(text.front()); }

  const Entry* Find(std::string_view text, std::size_t at, std::span<const TextRange> allowed) const {
    for (const Entry& entry : by_first_byte_[FirstByte(text.substr(at))]) {
      if (text.substr(at, entry.text.size()) != entry.text) continue;
      const bool is_allowed = !allowed.empty() && allowed.front().begin <= at && at + entry.text.size() <= allowed.front().end;
      if (is_allowed || !entry.token->is_special) return &entry;
    }
    return nullptr;
  }

  static std::size_t StripLeft(std::string_view text, std::size_t floor, std::size_t at) {
    while (at > floor) {
      std::size_t begin = at - 1;
      while (begin > floor && (static_cast<std::uint8_t>(text[begin]) & 0xc0) == 0x80) --begin;
      const Utf8Piece piece = FirstUtf8Piece(text.substr(begin, at - begin));
      if (piece.kind != Utf8Kind::kCharacter || piece.size != at - begin ||
          !IsWhiteSpace(CodePoint(text.substr(begin), piece.size)))
        break;
      at = begin;
    }
    return at;
  }

  static std::size_t StripRight(std::string_view text, std::size_t at) {
    while (at < text.size()) {
      const Utf8Piece piece = FirstUtf8Piece(text.substr(at));
      if (piece.kind != Utf8Kind::kCharacter || !IsWhiteSpace(CodePoint(text.substr(at), piece.size))) break;
      at += piece.size;
    }
    return at;
  }

  std::array<std::vector<Entry>, 256> by_first_byte_;
  bool is_empty_ = true;
};

class ByteLevelTokenizer final : public Tokenizer {
 public:
  static absl::StatusOr<std::shared_ptr<const Tokenizer>> Create(TokenizerSpec spec);

  std::vector<TokenId> Encode(std::string_view text, ControlTokens control) const override {
    const TextRange whole{0, text.size()};
    return EncodeMarked(text, {&whole, control == ControlTokens::kParse ? std::size_t{1} : std::size_t{0}});
  }
  std::vector<TokenId> EncodeMarked(std::string_view text, std::span<const TextRange> control_ranges) const override;
  std::string Decode(std::span<const TokenId> ids, bool skip_special) const override;
  std::string_view TokenBytes(TokenId id, bool skip_special) const override {
    if (id >= token_bytes_.size() || (skip_special && is_special_[id])) return {};
    return token_bytes_[id];
  }
  const TokenizerSpec& spec() const override { return spec_; }
  std::size_t vocab_size() const override { return spec_.tokens.size(); }

 private:
  ByteLevelTokenizer(TokenizerSpec spec, TextSplitter splitter) : spec_(std::move(spec)), splitter_(std::move(splitter)) {}
  void EncodeStretch(std::string_view text, BytePairMerges::Workspace* workspace, std::vector<TokenId>* ids) const;

  const TokenizerSpec spec_;
  const TextSplitter splitter_;
  std::vector<std::string> token_bytes_;  // by id: what a token stands for in text
  std::vector<bool> is_special_;          // by id
  AddedTokenFinder raw_finder_;           // added tokens that are looked for before NFC
  AddedTokenFinder normal_finder_;        // and after it
  BytePairMerges merges_;
  // Pieces that are one token, with no merge to run: nine of ten in real text. Keys lie in token_bytes_.
  absl::flat_hash_map<std::string_view, TokenId> whole_pieces_;
};

absl::StatusOr<std::shared_ptr<const Tokenizer>> ByteLevelTokenizer::Create(TokenizerSpec unchecked_spec) {
  TANDEM_RETURN_IF_ERROR(CheckSpec(unchecked_spec));
  std::vector<std::string> patterns = unchecked_spec.split_patterns;
  if (unchecked_spec.split_digits) patterns.insert(patterns.begin(), std::string(kDigit));
  TANDEM_ASSIGN_OR_RETURN(TextSplitter splitter, TextSplitter::Create(patterns));
  std::shared_ptr<ByteLevelTokenizer> tokenizer(new ByteLevelTokenizer(std::move(unchecked_spec), std::move(splitter)));
  const TokenizerSpec& spec = tokenizer->spec_;

  std::vector<bool> is_added(spec.tokens.size(), false);
  tokenizer->is_special_.resize(spec.tokens.size(), false);
  tokenizer->token_bytes_.resize(spec.tokens.size());
  for (const AddedToken& added : spec.added_tokens) {
    is_added[added.id] = true;
    tokenizer->is_special_[added.id] = added.is_special;
    tokenizer->token_bytes_[added.id] = added.text;
    if (added.is_normalized) {
      tokenizer->normal_finder_.Add(spec.normalize_nfc ? NormalizeNfc(added.text) : added.text, &added);
    } else {
      tokenizer->raw_finder_.Add(added.text, &added);
    }
  }
  tokenizer->raw_finder_.Finish();
  tokenizer->normal_finder_.Finish();

  // Special tokens are no text: no run of ordinary bytes may become one, whatever the merges say.
  absl::flat_hash_map<std::string_view, TokenId> ids;
  ids.reserve(spec.tokens.size());
  for (TokenId id = 0; id < spec.tokens.size(); ++id) {
    const std::string& text = spec.tokens[id];
    if (!is_added[id]) tokenizer->token_bytes_[id] = BytesOfLetters(text).value_or(text);
    if (!text.empty() && !tokenizer->is_special_[id]) ids.try_emplace(text, id);
  }
  TANDEM_ASSIGN_OR_RETURN(tokenizer->merges_, BytePairMerges::Create(ids, spec.merges));

  BytePairMerges::Workspace workspace;
  std::vector<TokenId> pieces;
  tokenizer->whole_pieces_.reserve(ids.size());
  for (const auto& [text, id] : ids) {
    if (is_added[id] || !BytesOfLetters(text).has_value()) continue;
    const std::string& bytes = tokenizer->token_bytes_[id];
    pieces.clear();
    if (!spec.ignore_merges) tokenizer->merges_.Encode(bytes, &workspace, &pieces);
    if (spec.ignore_merges || (pieces.size() == 1 && pieces.front() == id)) tokenizer->whole_pieces_.try_emplace(bytes, id);
  }
  return tokenizer;
}

std::vector<TokenId> ByteLevelTokenizer::EncodeMarked(std::string_view text, std::span<const TextRange> control_ranges) const {
  std::vector<TokenId> ids;
  BytePairMerges::Workspace workspace;
  const auto on_token = [&ids](const AddedToken& token) { ids.push_back(token.id); };
  const auto on_normal_text = [&](std::string_view stretch) { EncodeStretch(stretch, &workspace, &ids); };
  const auto on_raw_text = [&](std::string_view stretch) {
    if (spec_.normalize_nfc) {
      normal_finder_.Scan(NormalizeNfc(stretch), {}, on_normal_text, on_token);
    } else {
      normal_finder_.Scan(stretch, {}, on_normal_text, on_token);
    }
  };
  raw_finder_.Scan(text, control_ranges, on_raw_text, on_token);
  return ids;
}

// `text`: what lies between added tokens.
void ByteLevelTokenizer::EncodeStretch(std::string_view text, BytePairMerges::Workspace* workspace,
                                       std::vector<TokenId>* ids) const {
  std::string prefixed;
  if (spec_.add_prefix_space && !text.empty() && text.front() != ' ') {
    prefixed.append(" ").append(text);
    text = prefixed;
  }
  splitter_.Split(text, [&](std::string_view piece) {
    const auto whole = whole_pieces_.find(piece);
    if (whole != whole_pieces_.end()) {
      ids->push_back(whole->second);
    } else {
      merges_.Encode(piece, workspace, ids);
    }
  });
}

std::string ByteLevelTokenizer::Decode(std::span<const TokenId> ids, bool skip_special) const {
  std::string bytes;
  for (const TokenId id : ids) bytes.append(TokenBytes(id, skip_special));
  return ReplaceIllFormed(bytes);
}

}  // namespace

absl::StatusOr<std::shared_ptr<const Tokenizer>> Tokenizer::Create(TokenizerSpec spec) {
  return ByteLevelTokenizer::Create(std::move(spec));
}

std::string IncrementalDetokenizer::Push(TokenId id) {
  pending_.append(tokenizer_->TokenBytes(id, /*skip_special=*/true));
  // Only the last piece can be incomplete; what stands before it is certain, ill-formed or not.
  std::size_t certain = 0;
  while (certain < pending_.size()) {
    const std::string_view rest = std::string_view(pending_).substr(certain);
    const Utf8Piece piece = FirstUtf8Piece(rest);
    if (piece.kind == Utf8Kind::kIncomplete) break;
    certain += piece.size;
  }
  std::string text = ReplaceIllFormed(std::string_view(pending_).substr(0, certain));
  pending_.erase(0, certain);
  return text;
}

std::string IncrementalDetokenizer::Finish() {
  std::string text = ReplaceIllFormed(pending_);
  pending_.clear();
  return text;
}

}  // namespace tandem
