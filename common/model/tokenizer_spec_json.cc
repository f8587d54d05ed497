// TokenizerSpec from Hugging Face's tokenizer.json and tokenizer_config.json. What byte-level BPE does not need is refused by
// name rather than skipped: a tokenizer that is nearly right trains a model on the wrong text.
#include <algorithm>
#include <optional>
#include <utility>

#include <nlohmann/json.hpp>

#include "common/model/bounded_json.h"
#include "common/model/split_patterns.h"
#include "common/model/tokenizer.h"

namespace tandem {
namespace {

using Json = nlohmann::json;
constexpr char kDigitRun[] = R"(\p{N}+)";
constexpr char kDigit[] = R"(\p{N})";

template <typename... Text>
absl::Status Invalid(const Text&... text) {
  return absl::InvalidArgumentError(absl::StrCat("tokenizer.json: ", text...));
}
template <typename... Text>
absl::Status Unknown(const Text&... text) {
  return absl::UnimplementedError(absl::StrCat("tokenizer.json: ", text...));
}

// The member `key`, or null where there is none.
const Json& Member(const Json& object, const char* key) {
  static const Json kNull;
  if (!object.is_object()) return kNull;
  const auto found = object.find(key);
  return found == object.end() ? kNull : *found;
}
std::string TextMember(const Json& object, const char* key) {
  const Json& value = Member(object, key);
  return value.is_string() ? value.get<std::string>() : std::string();
}
bool FlagMember(const Json& object, const char* key, bool otherwise) {
  const Json& value = Member(object, key);
  return value.is_boolean() ? value.get<bool>() : otherwise;
}
std::string TypeOf(const Json& step) { return TextMember(step, "type"); }

std::optional<TokenId> ToId(const Json& value, std::size_t limit) {
  if (!value.is_number_unsigned() || value.get<std::uint64_t>() >= limit) return std::nullopt;
  return static_cast<TokenId>(value.get<std::uint64_t>());
}

// A step or, as a Sequence, several under `list_key`; sequences inside sequences are taken apart too (the parser bounds depth).
std::vector<const Json*> StepsOf(const Json& step, const char* list_key) {
  if (step.is_null()) return {};
  if (TypeOf(step) != "Sequence") return {&step};
  std::vector<const Json*> steps;
  for (const Json& inner : Member(step, list_key)) {
    for (const Json* one : StepsOf(inner, list_key)) steps.push_back(one);
  }
  return steps;
}

absl::Status ReadVocabulary(const Json& root, TokenizerSpec* spec) {
  const Json& vocab = Member(Member(root, "model"), "vocab");
  const Json& added_tokens = Member(root, "added_tokens");
  if (!vocab.is_object()) return Invalid("model.vocab is no object");
  if (!added_tokens.is_null() && !added_tokens.is_array()) return Invalid("added_tokens is no list");
  // Ids may leave holes; the bound keeps one huge id from asking for memory that the file does not justify.
  const std::size_t limit = 2 * (vocab.size() + added_tokens.size()) + 65536;
  const auto place = [spec](TokenId id, const std::string& text) {
    if (id >= spec->tokens.size()) spec->tokens.resize(std::size_t{id} + 1);
    if (!spec->tokens[id].empty() && spec->tokens[id] != text) return false;
    spec->tokens[id] = text;
    return true;
  };
  for (const auto& [text, value] : vocab.items()) {
    const std::optional<TokenId> id = ToId(value, limit);
    if (!id.has_value()) return Invalid("model.vocab['", text, "'] is no id below ", limit);
    if (!place(*id, text)) return Invalid("model.vocab gives id ", *id, " to '", spec->tokens[*id], "' and to '", text, "'");
  }
  for (std::size_t i = 0; i < added_tokens.size(); ++i) {
    const Json& entry = added_tokens[i];
    const std::optional<TokenId> id = ToId(Member(entry, "id"), limit);
    AddedToken added;
    added.text = TextMember(entry, "content");
    if (!id.has_value() || added.text.empty()) return Invalid("added_tokens[", i, "] needs content and an id below ", limit);
    if (FlagMember(entry, "single_word", false)) return Unknown("added_tokens[", i, "] ('", added.text, "') is a single_word");
    if (!place(*id, added.text)) {
      return Invalid("added_tokens[", i, "] gives id ", *id, " to '", added.text, "', which is '", spec->tokens[*id], "'");
    }
    added.id = *id;
    added.is_special = FlagMember(entry, "special", false);
    added.strips_left = FlagMember(entry, "lstrip", false);
    added.strips_right = FlagMember(entry, "rstrip", false);
    added.is_normalized = !added.is_special && FlagMember(entry, "normalized", false);
    spec->added_tokens.push_back(std::move(added));
  }
  return absl::OkStatus();
}

absl::Status ReadModel(const Json& model, TokenizerSpec* spec) {
  // Old files leave the type out.
  if (const std::string type = TypeOf(model); type != "BPE" && !(type.empty() && Member(model, "merges").is_array())) {
    return Unknown("model.type is '", type, "', only BPE is known");
  }
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (!TextMember(model, key).empty()) return Unknown("model.", key, " is '", TextMember(model, key), "'");
  }
  if (!Member(model, "dropout").is_null() && Member(model, "dropout") != 0.0) return Unknown("model.dropout is not 0");
  if (FlagMember(model, "byte_fallback", false)) return Unknown("model.byte_fallback is set: that is no byte-level BPE");
  spec->ignore_merges = FlagMember(model, "ignore_merges", false);
  const Json& merges = Member(model, "merges");
  if (!merges.is_array()) return Invalid("model.merges is no list");
  spec->merges.reserve(merges.size());
  for (std::size_t i = 0; i < merges.size(); ++i) {
    const Json& merge = merges[i];
    if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
      spec->merges.emplace_back(merge[0].get<std::string>(), merge[1].get<std::string>());
      continue;
    }
    const std::string text = merge.is_string() ? merge.get<std::string>() : std::string();
    const std::size_t space = text.find(' ');
    if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos) {
      return Invalid("model.merges[", i, "] is not two tokens");
    }
    spec->merges.emplace_back(text.substr(0, space), text.substr(space + 1));
  }
  return absl::OkStatus();
}

absl::Status ReadNormalizer(const Json& normalizer, TokenizerSpec* spec) {
  for (const Json* step : StepsOf(normalizer, "normalizers")) {
    if (TypeOf(*step) != "NFC") return Unknown("the normalizer '", TypeOf(*step), "'; only NFC is known");
    spec->normalize_nfc = true;
  }
  return absl::OkStatus();
}

absl::Status ReadPreTokenizer(const Json& pre_tokenizer, TokenizerSpec* spec) {
  bool has_byte_level = false;
  for (const Json* step : StepsOf(pre_tokenizer, "pretokenizers")) {
    const std::string type = TypeOf(*step);
    if (has_byte_level) return Unknown("the pre-tokenizer '", type, "' after ByteLevel");
    if (type == "Digits") {
      const bool is_each = FlagMember(*step, "individual_digits", false);
      if (is_each && spec->split_patterns.empty()) {
        spec->split_digits = true;
      } else {
        spec->split_patterns.push_back(is_each ? kDigit : kDigitRun);
      }
    } else if (type == "Split") {
      const std::string regex = TextMember(Member(*step, "pattern"), "Regex");
      const std::string behavior = TextMember(*step, "behavior");
      if (regex.empty() || behavior != "Isolated" || FlagMember(*step, "invert", false)) {
        return Unknown("a Split that is not by a Regex with behavior Isolated (it is '", behavior, "')");
      }
      spec->split_patterns.push_back(regex);
    } else if (type == "ByteLevel") {
      has_byte_level = true;
      spec->add_prefix_space = FlagMember(*step, "add_prefix_space", true);
      // The space goes before each piece of the steps before; only where there is none is that the whole stretch.
      if (spec->add_prefix_space && (spec->split_digits || !spec->split_patterns.empty())) {
        return Unknown("a ByteLevel with add_prefix_space after other pre-tokenizers");
      }
      if (FlagMember(*step, "use_regex", true)) spec->split_patterns.push_back(kGpt2Pattern);
    } else {
      return Unknown("the pre-tokenizer '", type, "'");
    }
  }
  if (!has_byte_level) return Unknown("no ByteLevel pre-tokenizer: that is no byte-level BPE");
  return absl::OkStatus();
}

// TemplateProcessing: what stands before the text's place in the `single` template.
absl::Status ReadTemplate(const Json& step, std::size_t num_tokens, TokenizerSpec* spec) {
  bool is_after_text = false;
  for (const Json& part : Member(step, "single")) {
    if (Member(part, "Sequence").is_object()) {
      is_after_text = true;
      continue;
    }
    const std::string name = TextMember(Member(part, "SpecialToken"), "id");
    if (is_after_text) return Unknown("a post_processor that puts '", name, "' after the text");
    const Json& ids = Member(Member(Member(step, "special_tokens"), name.c_str()), "ids");
    if (!ids.is_array() || ids.empty()) return Invalid("post_processor.special_tokens has no ids for '", name, "'");
    for (const Json& value : ids) {
      const std::optional<TokenId> id = ToId(value, num_tokens);
      if (!id.has_value()) return Invalid("post_processor: an id of '", name, "' is not below ", num_tokens);
      spec->prefix_ids.push_back(*id);
    }
  }
  return absl::OkStatus();
}

absl::Status ReadPostProcessor(const Json& post_processor, TokenizerSpec* spec) {
  for (const Json* step : StepsOf(post_processor, "processors")) {
    const std::string type = TypeOf(*step);
    if (type == "ByteLevel") continue;  // moves offsets only
    if (type != "TemplateProcessing") return Unknown("the post-processor '", type, "'");
    TANDEM_RETURN_IF_ERROR(ReadTemplate(*step, spec->tokens.size(), spec));
  }
  return absl::OkStatus();
}

absl::Status CheckDecoder(const Json& decoder) {
  for (const Json* step : StepsOf(decoder, "decoders")) {
    if (TypeOf(*step) != "ByteLevel") return Unknown("the decoder '", TypeOf(*step), "'");
  }
  return absl::OkStatus();
}

// "bos_token": "<s>" or {"content": "<s>", ...}.
std::string TokenText(const Json& config, const char* key) {
  const Json& value = Member(config, key);
  return value.is_object() ? TextMember(value, "content") : TextMember(config, key);
}

// "chat_template": a text, or a list of {"name", "template"} of which "default" counts.
std::string ChatTemplateOf(const Json& config) {
  const Json& value = Member(config, "chat_template");
  if (!value.is_array()) return TextMember(config, "chat_template");
  for (const Json& entry : value) {
    if (TextMember(entry, "name") == "default") return TextMember(entry, "template");
  }
  return {};
}

absl::Status ReadConfig(const Json& config, TokenizerSpec* spec) {
  spec->bos_text = TokenText(config, "bos_token");
  spec->eos_text = TokenText(config, "eos_token");
  spec->chat_template = ChatTemplateOf(config);
  // These classes rebuild the post-processor from the flag; the others let tokenizer.json decide.
  const std::string name = TextMember(config, "tokenizer_class");
  const Json& adds_bos = Member(config, "add_bos_token");
  if ((name != "LlamaTokenizer" && name != "LlamaTokenizerFast") || !adds_bos.is_boolean()) return absl::OkStatus();
  spec->prefix_ids.clear();
  if (!adds_bos.get<bool>()) return absl::OkStatus();
  const auto bos = std::find(spec->tokens.begin(), spec->tokens.end(), spec->bos_text);
  if (spec->bos_text.empty() || bos == spec->tokens.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat("tokenizer_config.json: add_bos_token, but bos_token '", spec->bos_text, "' is no token"));
  }
  spec->prefix_ids = {static_cast<TokenId>(bos - spec->tokens.begin())};
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<TokenizerSpec> TokenizerSpecFromJson(std::string_view tokenizer_json, std::string_view tokenizer_config_json,
                                                    std::string_view chat_template) {
  TANDEM_ASSIGN_OR_RETURN(const Json root, ParseBoundedJson(tokenizer_json, "tokenizer.json", "text"));
  TokenizerSpec spec;
  TANDEM_RETURN_IF_ERROR(ReadVocabulary(root, &spec));
  TANDEM_RETURN_IF_ERROR(ReadModel(Member(root, "model"), &spec));
  TANDEM_RETURN_IF_ERROR(ReadNormalizer(Member(root, "normalizer"), &spec));
  TANDEM_RETURN_IF_ERROR(ReadPreTokenizer(Member(root, "pre_tokenizer"), &spec));
  TANDEM_RETURN_IF_ERROR(ReadPostProcessor(Member(root, "post_processor"), &spec));
  TANDEM_RETURN_IF_ERROR(CheckDecoder(Member(root, "decoder")));
  if (!tokenizer_config_json.empty()) {
    TANDEM_ASSIGN_OR_RETURN(const Json config, ParseBoundedJson(tokenizer_config_json, "tokenizer_config.json", "text"));
    TANDEM_RETURN_IF_ERROR(ReadConfig(config, &spec));
  }
  if (!chat_template.empty()) spec.chat_template = chat_template;
  return spec;
}

}  // namespace tandem
