// Byte-level BPE: text to token ids and back. Built from a TokenizerSpec, which comes from tokenizer.json, from a GGUF file, or
// from the pool. Immutable after Create; thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/base/status.h"

namespace tandem {

using TokenId = std::uint32_t;

struct AddedToken {
  TokenId id = 0;
  std::string text;
  bool is_special = false;   // a control token: left out by Decode(skip_special)
  bool strips_left = false;  // takes the white space before it along
  bool strips_right = false;
  bool is_normalized = false;  // looked for after NFC, not before; never a special one
};

// Everything a tokenizer is, as plain values.
struct TokenizerSpec {
  std::vector<std::string> tokens;                          // by id, in GPT-2's byte alphabet; added tokens as plain text
  std::vector<std::pair<std::string, std::string>> merges;  // by rank
  std::vector<AddedToken> added_tokens;
  std::vector<std::string> split_patterns;  // as Oniguruma reads them; one after the other, matches isolated
  bool split_digits = false;                // each digit (Nd, Nl, No) alone, before the patterns
  bool normalize_nfc = false;
  bool ignore_merges = false;       // a piece that is a token as a whole is taken as it is (Llama 3)
  bool add_prefix_space = false;    // before each stretch of text between added tokens that does not begin with a space
  std::vector<TokenId> prefix_ids;  // what the post-processor puts before a text (start token), if anything
  std::string bos_text, eos_text;   // for chat templates; may be empty
  std::string chat_template;        // may be empty
};

// How Encode reads text that looks like a control token ("<|im_end|>"): the token, or ordinary text. Added tokens that are not
// special are found either way.
enum class ControlTokens { kParse, kLiteral };

// Bytes [begin, end) of a text.
struct TextRange {
  std::size_t begin = 0;
  std::size_t end = 0;
};

class Tokenizer {
 public:
  // Errors: INVALID_ARGUMENT naming the token, merge or pattern that is wrong.
  static absl::StatusOr<std::shared_ptr<const Tokenizer>> Create(TokenizerSpec spec);
  virtual ~Tokenizer() = default;

  // Ids of `text`, without prefix_ids. Bytes that no token covers vanish (counted nowhere: the file defines it so). Takes time
  // n log n in the longest piece; a pattern that passes PCRE2's match limit leaves the rest of its stretch in one piece.
  virtual std::vector<TokenId> Encode(std::string_view text, ControlTokens control) const = 0;
  // Encode(text) where control tokens are parsed only if they lie wholly inside one of `control_ranges` (sorted, disjoint).
  // Everything else is one text: pieces and merges reach over the borders of ranges.
  virtual std::vector<TokenId> EncodeMarked(std::string_view text, std::span<const TextRange> control_ranges) const = 0;
  // Text of `ids`; invalid UTF-8 becomes U+FFFD, as Python's decode(errors="replace") does. Unknown ids are nothing.
  virtual std::string Decode(std::span<const TokenId> ids, bool skip_special) const = 0;
  // The raw bytes that one token stands for; special tokens give none when skip_special.
  virtual std::string_view TokenBytes(TokenId id, bool skip_special) const = 0;
  virtual const TokenizerSpec& spec() const = 0;
  virtual std::size_t vocab_size() const = 0;
};

// Turns a stream of tokens into a stream of whole characters, special tokens left out: all of Push and Finish joined equal
// Decode(ids, /*skip_special=*/true). One a completion; confined to one thread.
class IncrementalDetokenizer {
 public:
  explicit IncrementalDetokenizer(std::shared_ptr<const Tokenizer> tokenizer) : tokenizer_(std::move(tokenizer)) {}
  // Text that became certain with `id`; never half a character, never U+FFFD while more bytes may complete it.
  std::string Push(TokenId id);
  // What was held back; bytes that form no character become one U+FFFD a maximal ill-formed piece.
  std::string Finish();

 private:
  std::shared_ptr<const Tokenizer> tokenizer_;
  std::string pending_;
};

// The spec as bytes for the pool, and back. Parse trusts nothing.
std::string SerializeTokenizerSpec(const TokenizerSpec& spec);
absl::StatusOr<TokenizerSpec> ParseTokenizerSpec(std::string_view bytes);
// From the text of tokenizer.json and (may be empty) tokenizer_config.json and chat_template.jinja.
// Errors: INVALID_ARGUMENT naming the place in the file; UNIMPLEMENTED naming a step that is not byte-level BPE's.
absl::StatusOr<TokenizerSpec> TokenizerSpecFromJson(std::string_view tokenizer_json, std::string_view tokenizer_config_json,
                                                    std::string_view chat_template);
// From the values of a GGUF file: tokenizer.ggml.{model,pre,tokens,token_type,merges,bos_token_id,...}.
struct GgufTokenizerValues {
  std::string model, pre, chat_template;
  std::vector<std::string> tokens, merges;
  std::vector<std::int32_t> token_types;              // 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte
  std::int64_t bos_token_id = -1, eos_token_id = -1;  // -1: the file has none
  std::optional<bool> add_bos_token;                  // nullopt: the file does not say, and `pre` decides
};
// Errors: INVALID_ARGUMENT naming key, value and limit; UNIMPLEMENTED naming the `model` or `pre` that is not known.
absl::StatusOr<TokenizerSpec> TokenizerSpecFromGguf(GgufTokenizerValues values);

}  // namespace tandem
