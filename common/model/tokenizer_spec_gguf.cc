// TokenizerSpec from the tokenizer.ggml.* values of a GGUF file.
#include <algorithm>
#include <array>
#include <utility>

#include "common/model/split_patterns.h"
#include "common/model/tokenizer.h"

namespace tandem {
namespace {

enum TokenType : std::int32_t { kUnknown = 2, kControl = 3, kUserDefined = 4 };

// What `pre` stands for. llama.cpp keeps this table in code, so files hold only the name.
struct PreTokenizer {
  std::string_view name;
  bool splits_digits;
  const char* pattern;
  bool ignores_merges;
  bool normalizes_nfc;
  bool adds_bos;         // when the file does not say
  bool has_start_token;  // false: the file's bos_token_id only fills the field
};
constexpr auto kPreTokenizers = std::to_array<PreTokenizer>({
    {"smollm", true, kGpt2Pattern, false, false, false, true},
    {"gpt-2", false, kGpt2Pattern, false, false, false, true},
    {"llama-bpe", false, kLlama3Pattern, true, false, true, true},
    {"llama3", false, kLlama3Pattern, true, false, true, true},
    {"llama-v3", false, kLlama3Pattern, true, false, true, true},
    {"qwen2", false, kQwen2Pattern, false, true, false, false},
    {"deepseek-r1-qwen", false, kQwen2Pattern, false, true, true, true},
});

template <typename... Text>
absl::Status Invalid(const Text&... text) {
  return absl::InvalidArgumentError(absl::StrCat("GGUF tokenizer: ", text...));
}

}  // namespace

absl::StatusOr<TokenizerSpec> TokenizerSpecFromGguf(GgufTokenizerValues values) {
  if (values.model != "gpt2") {
    return absl::UnimplementedError(
        absl::StrCat("GGUF tokenizer: tokenizer.ggml.model is '", values.model, "', only 'gpt2' (byte-level BPE) is known"));
  }
  const auto pre =
      std::find_if(kPreTokenizers.begin(), kPreTokenizers.end(), [&](const auto& row) { return row.name == values.pre; });
  if (pre == kPreTokenizers.end()) {
    std::string known;
    for (const PreTokenizer& row : kPreTokenizers) absl::StrAppend(&known, known.empty() ? "" : ", ", ToAbsl(row.name));
    return absl::UnimplementedError(absl::StrCat("GGUF tokenizer: tokenizer.ggml.pre is '", values.pre, "', known are ", known));
  }
  const std::size_t num_tokens = values.tokens.size();
  if (!values.token_types.empty() && values.token_types.size() != num_tokens) {
    return Invalid("tokenizer.ggml.token_type has ", values.token_types.size(), " entries for ", num_tokens, " tokens");
  }
  for (const auto& [key, id] : {std::pair{"bos", values.bos_token_id}, std::pair{"eos", values.eos_token_id}}) {
    if (id < -1 || id >= static_cast<std::int64_t>(num_tokens)) {
      return Invalid("tokenizer.ggml.", key, "_token_id is ", id, ", but there are ", num_tokens, " tokens");
    }
  }

  TokenizerSpec spec;
  spec.tokens = std::move(values.tokens);
  spec.merges.reserve(values.merges.size());
  for (std::size_t i = 0; i < values.merges.size(); ++i) {
    const std::string& merge = values.merges[i];
    const std::size_t space = merge.find(' ', 1);
    if (space == std::string::npos || space + 1 == merge.size())
      return Invalid("merge ", i, " ('", merge, "') is not two tokens");
    spec.merges.emplace_back(merge.substr(0, space), merge.substr(space + 1));
  }
  for (std::size_t id = 0; id < values.token_types.size(); ++id) {
    const std::int32_t type = values.token_types[id];
    if (spec.tokens[id].empty() || (type != kUnknown && type != kControl && type != kUserDefined)) continue;
    AddedToken added;
    added.id = static_cast<TokenId>(id);
    added.text = spec.tokens[id];
    added.is_special = type != kUserDefined;
    spec.added_tokens.push_back(std::move(added));
  }
  spec.split_digits = pre->splits_digits;
  spec.split_patterns = {pre->pattern};
  spec.ignore_merges = pre->ignores_merges;
  spec.normalize_nfc = pre->normalizes_nfc;
  const bool adds_bos = values.add_bos_token.value_or(pre->adds_bos);
  if (adds_bos && values.bos_token_id < 0) return Invalid("tokenizer.ggml.add_bos_token without a bos_token_id");
  if (adds_bos) spec.prefix_ids = {static_cast<TokenId>(values.bos_token_id)};
  if (values.bos_token_id >= 0 && (adds_bos || pre->has_start_token)) spec.bos_text = spec.tokens[values.bos_token_id];
  if (values.eos_token_id >= 0) spec.eos_text = spec.tokens[values.eos_token_id];
  spec.chat_template = std::move(values.chat_template);
  return spec;
}

}  // namespace tandem
