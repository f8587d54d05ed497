#include "common/model/hugging_face_files.h"

#include <set>
#include <vector>

#include "common/base/check.h"
#include "common/model/layer_facts.h"
#include "common/model/split_patterns.h"
#include "nlohmann/json.hpp"

namespace tandem {
namespace {

using Json = nlohmann::json;

Json PreTokenizer(const TokenizerSpec& spec) {
  Json steps = Json::array();
  if (spec.split_digits) steps.push_back({{"type", "Digits"}, {"individual_digits", true}});
  std::vector<std::string> patterns = spec.split_patterns;
  const bool ends_as_gpt2 = !patterns.empty() && patterns.back() == kGpt2Pattern;  // which ByteLevel splits by itself
  if (ends_as_gpt2) patterns.pop_back();
  for (const std::string& pattern : patterns) {
    steps.push_back({{"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", "Isolated"}, {"invert", false}});
  }
  steps.push_back(
      {{"type", "ByteLevel"}, {"add_prefix_space", spec.add_prefix_space}, {"trim_offsets", true}, {"use_regex", ends_as_gpt2}});
  return {{"type", "Sequence"}, {"pretokenizers", steps}};
}

// Puts prefix_ids before a text; null where there are none.
Json PostProcessor(const TokenizerSpec& spec) {
  if (spec.prefix_ids.empty()) return nullptr;
  Json single = Json::array(), special = Json::object();
  for (const TokenId id : spec.prefix_ids) {
    const std::string& text = spec.tokens[id];
    single.push_back({{"SpecialToken", {{"id", text}, {"type_id", 0}}}});
    special[text] = {{"id", text}, {"ids", {id}}, {"tokens", {text}}};
  }
  single.push_back({{"Sequence", {{"id", "A"}, {"type_id", 0}}}});
  Json pair = single;
  pair.push_back({{"Sequence", {{"id", "B"}, {"type_id", 1}}}});
  return {{"type", "TemplateProcessing"}, {"single", single}, {"pair", pair}, {"special_tokens", special}};
}

}  // namespace

std::string HuggingFaceConfigText(const ModelConfig& config) {
  const LayerFacts* const facts = FindFamily(config.family);
  TANDEM_CHECK(facts != nullptr, "a model's family is in the table");
  Json json = {{"architectures", {facts->architecture}},
               {"model_type", facts->family},
               {"dtype", "bfloat16"},
               {"torch_dtype", "bfloat16"},
               {"vocab_size", config.vocab_size},
               {"hidden_size", config.hidden_size},
               {"intermediate_size", config.intermediate_size},
               {"num_hidden_layers", config.num_layers},
               {"num_attention_heads", config.num_heads},
               {"num_key_value_heads", config.num_kv_heads},
               {"head_dim", config.head_dim},
               {"max_position_embeddings", config.max_positions},
               {"rms_norm_eps", static_cast<double>(config.rms_norm_epsilon)},
               {"rope_theta", config.rope_theta},
               {"tie_word_embeddings", config.is_embedding_tied}};
  for (const RequiredField& field : facts->required_fields) json[field.name] = Json::parse(field.value);
  if (config.rope_scaling.has_value()) {
    json["rope_scaling"] = {{"rope_type", "llama3"},
                            {"factor", config.rope_scaling->factor},
                            {"low_freq_factor", config.rope_scaling->low_freq_factor},
                            {"high_freq_factor", config.rope_scaling->high_freq_factor},
                            {"original_max_position_embeddings", config.rope_scaling->original_max_positions}};
  }
  if (config.end_token_ids.size() == 1) json["eos_token_id"] = config.end_token_ids[0];
  if (config.end_token_ids.size() > 1) json["eos_token_id"] = config.end_token_ids;
  return json.dump(2) + "\n";
}

std::map<std::string, std::string> HuggingFaceTokenizerFiles(const TokenizerSpec& spec) {
  Json added = Json::array();
  std::set<TokenId> is_added;
  for (const AddedToken& token : spec.added_tokens) {
    is_added.insert(token.id);
    added.push_back({{"id", token.id},
                     {"content", token.text},
                     {"single_word", false},
                     {"lstrip", token.strips_left},
                     {"rstrip", token.strips_right},
                     {"normalized", token.is_normalized},
                     {"special", token.is_special}});
  }
  Json vocab = Json::object(), merges = Json::array();
  for (TokenId id = 0; id < spec.tokens.size(); ++id) {
    if (!spec.tokens[id].empty() && !is_added.contains(id)) vocab[spec.tokens[id]] = id;
  }
  for (const auto& [left, right] : spec.merges) merges.push_back({left, right});
  const Json byte_level = {{"type", "ByteLevel"}, {"add_prefix_space", true}, {"trim_offsets", true}, {"use_regex", true}};
  const Json tokenizer = {{"version", "1.0"},
                          {"truncation", nullptr},
                          {"padding", nullptr},
                          {"added_tokens", added},
                          {"normalizer", spec.normalize_nfc ? Json({{"type", "NFC"}}) : Json(nullptr)},
                          {"pre_tokenizer", PreTokenizer(spec)},
                          {"post_processor", PostProcessor(spec)},
                          {"decoder", byte_level},
                          {"model",
                           {{"type", "BPE"},
                            {"dropout", nullptr},
                            {"unk_token", nullptr},
                            {"continuing_subword_prefix", nullptr},
                            {"end_of_word_suffix", nullptr},
                            {"fuse_unk", false},
                            {"byte_fallback", false},
                            {"ignore_merges", spec.ignore_merges},
                            {"vocab", vocab},
                            {"merges", merges}}}};
  Json config = {{"tokenizer_class", "PreTrainedTokenizerFast"}};
  if (!spec.bos_text.empty()) config["bos_token"] = spec.bos_text;
  if (!spec.eos_text.empty()) config["eos_token"] = spec.eos_text;
  if (!spec.chat_template.empty()) config["chat_template"] = spec.chat_template;
  return {{"tokenizer.json", tokenizer.dump() + "\n"}, {"tokenizer_config.json", config.dump(2) + "\n"}};
}

}  // namespace tandem
