#include "tests/support/tiny_model.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "common/base/random.h"
#include "common/model/model_file.h"
#include "common/model/safetensors.h"
#include "common/model/weight_codecs.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::array<std::pair<const char*, const char*>, 21> kMerges = {
    {{"t", "h"}, {"th", "e"},  {"Ġ", "the"},  {"i", "n"}, {"in", "g"}, {"e", "r"}, {"Ġ", "a"},
     {"a", "n"}, {"an", "d"},  {"Ġ", "and"},  {"o", "n"}, {"r", "e"},  {"Ġ", "s"}, {"l", "l"},
     {"h", "e"}, {"he", "ll"}, {"hell", "o"}, {"Ġ", "w"}, {"o", "r"},  {"u", "s"}, {"us", "er"}}};

constexpr const char* kChatTemplate =
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% "
    "endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

// GPT-2's byte alphabet: printable bytes stand for themselves, the others for code points from 256 on.
std::string ByteText(int byte) {
  const auto is_printable = [](int b) { return (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174; };
  int code_point = byte;
  if (!is_printable(byte)) {
    code_point = 256;
    for (int b = 0; b < byte; ++b) code_point += is_printable(b) ? 0 : 1;
  }
  if (code_point < 128) return std::string(1, static_cast<char>(code_point));
  return {static_cast<char>(0xc0 | (code_point >> 6)), static_cast<char>(0x80 | (code_point & 63))};
}

std::vector<std::string> Tokens() {
  std::vector<std::string> tokens = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"};
  for (int byte = 0; byte < 256; ++byte) tokens.push_back(ByteText(byte));
  for (const auto& [left, right] : kMerges) tokens.push_back(absl::StrCat(left, right));
  return tokens;
}

Json TokenizerJson() {
  Json added = Json::array();
  Json vocab = Json::object();
  const std::vector<std::string> tokens = Tokens();
  for (std::size_t id = 0; id < tokens.size(); ++id) {
    vocab[tokens[id]] = id;
    if (id < kTinyFirstByte) {
      added.push_back({{"id", id},
                       {"content", tokens[id]},
                       {"single_word", false},
                       {"lstrip", false},
                       {"rstrip", false},
                       {"normalized", false},
                       {"special", true}});
    }
  }
  Json merges = Json::array();
  for (const auto& [left, right] : kMerges) merges.push_back(absl::StrCat(left, " ", right));
  const Json byte_level = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", true}};
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens", added},
          {"normalizer", nullptr},
          {"pre_tokenizer", byte_level},
          {"post_processor", nullptr},
          {"decoder", byte_level},
          {"model",
           {{"type", "BPE"},
            {"dropout", nullptr},
            {"unk_token", nullptr},
            {"continuing_subword_prefix", nullptr},
            {"end_of_word_suffix", nullptr},
            {"fuse_unk", false},
            {"byte_fallback", false},
            {"ignore_merges", false},
            {"vocab", vocab},
            {"merges", merges}}}};
}

Json ConfigJson(const TinyModelOptions& options, int vocab_size) {
  const std::string dtype = options.dtype == "F32" ? "float32" : options.dtype == "F16" ? "float16" : "bfloat16";
  Json scaling = nullptr;
  if (options.use_llama3_rope_scaling) {
    scaling = {{"rope_type", "llama3"},
               {"factor", 8.0},
               {"low_freq_factor", 1.0},
               {"high_freq_factor", 4.0},
               {"original_max_position_embeddings", 64}};
  }
  return {{"architectures", {"LlamaForCausalLM"}},
          {"model_type", "llama"},
          {"torch_dtype", dtype},
          {"num_hidden_layers", options.num_layers},
          {"hidden_size", options.hidden_size},
          {"intermediate_size", options.intermediate_size},
          {"num_attention_heads", options.num_heads},
          {"num_key_value_heads", options.num_kv_heads},
          {"head_dim", options.head_dim},
          {"vocab_size", vocab_size},
          {"max_position_embeddings", options.max_positions},
          {"rms_norm_eps", 1e-5},
          {"rope_theta", 10000.0},
          {"rope_scaling", scaling},
          {"tie_word_embeddings", options.tie_embeddings},
          {"hidden_act", "silu"},
          {"attention_bias", false},
          {"mlp_bias", false},
          {"bos_token_id", kTinyEndOfText},
          {"eos_token_id", kTinyImEnd}};
}

// To the nearest, ties to even. Requires: |value| is in fp16's normal range or rounds to a subnormal number.
std::uint16_t FloatToHalf(float value) {
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (value == 0.0F) return sign;
  int exponent = 0;
  std::frexp(value, &exponent);
  const int unit = std::max(exponent - 11, -24);  // one step of the result is 2^unit
  const auto steps = static_cast<int>(std::nearbyint(std::ldexp(std::fabs(value), -unit)));
  return static_cast<std::uint16_t>(sign + ((unit + 24) << 10) + steps);
}

struct RandomTensor {
  std::string name;
  std::vector<std::uint64_t> shape;
  std::string bytes;
};

// Uniform numbers of the given mean and standard deviation.
RandomTensor MakeTensor(const TinyModelOptions& options, std::string name, std::vector<std::uint64_t> shape, double mean,
                        double deviation) {
  std::uint64_t seed = options.seed;
  for (const char c : name) seed = DeriveSeed(seed, static_cast<std::uint64_t>(c));
  std::uint64_t num_values = 1;
  for (const std::uint64_t dimension : shape) num_values *= dimension;
  RandomTensor tensor{std::move(name), std::move(shape), {}};
  for (std::uint64_t i = 0; i < num_values; ++i) {
    const auto value = static_cast<float>(mean + deviation * std::sqrt(12.0) * (RandomUniform(seed, i) - 0.5));
    if (options.dtype == "F32") {
      tensor.bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
    } else {
      const std::uint16_t bits = options.dtype == "F16" ? FloatToHalf(value) : FloatToBf16(value);
      tensor.bytes.append(reinterpret_cast<const char*>(&bits), sizeof(bits));
    }
  }
  return tensor;
}

std::vector<RandomTensor> MakeTensors(const TinyModelOptions& options, int vocab_size) {
  const auto d = static_cast<std::uint64_t>(options.hidden_size);
  const auto f = static_cast<std::uint64_t>(options.intermediate_size);
  const auto q = static_cast<std::uint64_t>(options.num_heads * options.head_dim);
  const auto kv = static_cast<std::uint64_t>(options.num_kv_heads * options.head_dim);
  const auto vocab = static_cast<std::uint64_t>(vocab_size);
  std::vector<RandomTensor> tensors;
  const auto add_norm = [&](const std::string& name) { tensors.push_back(MakeTensor(options, name, {d}, 1.0, 0.1)); };
  const auto add_linear = [&](const std::string& name, std::uint64_t outputs, std::uint64_t inputs) {
    tensors.push_back(MakeTensor(options, name, {outputs, inputs}, 0.0, 1.0 / std::sqrt(static_cast<double>(inputs))));
  };
  tensors.push_back(MakeTensor(options, "model.embed_tokens.weight", {vocab, d}, 0.0, 0.2));
  for (int i = 0; i < options.num_layers; ++i) {
    const std::string prefix = absl::StrCat("model.layers.", i, ".");
    add_norm(prefix + "input_layernorm.weight");
    add_linear(prefix + "self_attn.q_proj.weight", q, d);
    add_linear(prefix + "self_attn.k_proj.weight", kv, d);
    add_linear(prefix + "self_attn.v_proj.weight", kv, d);
    add_linear(prefix + "self_attn.o_proj.weight", d, q);
    add_norm(prefix + "post_attention_layernorm.weight");
    add_linear(prefix + "mlp.gate_proj.weight", f, d);
    add_linear(prefix + "mlp.up_proj.weight", f, d);
    add_linear(prefix + "mlp.down_proj.weight", d, f);
  }
  add_norm("model.norm.weight");
  if (!options.tie_embeddings) add_linear("lm_head.weight", vocab, d);
  return tensors;
}

absl::Status WriteWeights(const std::string& directory, const TinyModelOptions& options, int vocab_size) {
  const std::vector<RandomTensor> tensors = MakeTensors(options, vocab_size);
  const auto num_shards = static_cast<std::size_t>(options.num_shards);
  Json weight_map = Json::object();
  for (std::size_t shard = 0; shard < num_shards; ++shard) {
    const std::string file =
        num_shards == 1 ? "model.safetensors" : absl::StrFormat("model-%05d-of-%05d.safetensors", shard + 1, num_shards);
    std::vector<SafetensorsOutput> outputs;
    for (std::size_t i = shard; i < tensors.size(); i += num_shards) {
      outputs.push_back({tensors[i].name, options.dtype, tensors[i].shape, {std::as_bytes(std::span(tensors[i].bytes))}});
      weight_map[tensors[i].name] = file;
    }
    TANDEM_RETURN_IF_ERROR(WriteSafetensors(directory + "/" + file, outputs, {{"format", "pt"}}));
  }
  if (num_shards == 1) return absl::OkStatus();
  const Json index = {{"metadata", Json::object()}, {"weight_map", weight_map}};
  return WriteFileAtomically(directory + "/model.safetensors.index.json", index.dump(1));
}

}  // namespace

absl::StatusOr<std::string> WriteTinyModel(const std::string& directory, const TinyModelOptions& options) {
  const int vocab_size = options.vocab_size > 0 ? options.vocab_size : static_cast<int>(Tokens().size());
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) return absl::InternalError(absl::StrCat("make directory ", directory, ": ", error.message()));
  const Json tokenizer_config = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                                 {"bos_token", "<|endoftext|>"},
                                 {"eos_token", "<|im_end|>"},
                                 {"add_bos_token", false},
                                 {"add_prefix_space", false},
                                 {"clean_up_tokenization_spaces", false},
                                 {"chat_template", kChatTemplate}};
  TANDEM_RETURN_IF_ERROR(WriteFileAtomically(directory + "/config.json", ConfigJson(options, vocab_size).dump(1)));
  TANDEM_RETURN_IF_ERROR(WriteFileAtomically(directory + "/tokenizer.json", TokenizerJson().dump(1)));
  TANDEM_RETURN_IF_ERROR(WriteFileAtomically(directory + "/tokenizer_config.json", tokenizer_config.dump(1)));
  TANDEM_RETURN_IF_ERROR(WriteWeights(directory, options, vocab_size));
  return directory;
}

}  // namespace tandem
