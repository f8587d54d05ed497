// A model in one GGUF file, as llama.cpp's converter writes it.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <optional>
#include <utility>

#include "common/model/file_model_source.h"
#include "common/model/gguf.h"
#include "common/model/rope_scaling.h"

namespace tandem {
namespace {

constexpr const char* kRopeFactorsTensor = "rope_freqs.weight";

// Metadata of the model's architecture: Integer("block_count") is llama.block_count.
class ArchitectureValues {
 public:
  ArchitectureValues(const GgufFile& gguf, std::string architecture) : gguf_(gguf), architecture_(std::move(architecture)) {}

  std::string Key(const char* name) const { return architecture_ + "." + name; }
  bool Has(const char* name) const { return gguf_.Has(Key(name)); }
  absl::StatusOr<int> Integer(const char* name, std::optional<int> value_if_missing = std::nullopt) const {
    if (!Has(name) && value_if_missing.has_value()) return *value_if_missing;
    TANDEM_ASSIGN_OR_RETURN(const std::int64_t value, gguf_.GetInteger(Key(name)));
    if (value < 0 || value > (1 << 30)) {
      return absl::InvalidArgumentError(
          absl::StrCat(gguf_.file().path(), ": ", Key(name), " is ", value, "; it must be from 0 to 2^30"));
    }
    return static_cast<int>(value);
  }
  absl::StatusOr<double> Number(const char* name, std::optional<double> value_if_missing = std::nullopt) const {
    if (!Has(name) && value_if_missing.has_value()) return *value_if_missing;
    return gguf_.GetNumber(Key(name));
  }

 private:
  const GgufFile& gguf_;
  const std::string architecture_;
};

// By how much llama3 scaling divides the frequency of rotary pair `pair`.
double RopeDivisor(const ModelConfig& config, const RopeScaling& scaling, int pair) {
  const double frequency = std::pow(config.rope_theta, -2.0 * pair / config.head_dim);
  return frequency / ScaledRopeFrequency(frequency, scaling);
}

// The converter writes llama3 scaling as the divisors that it gives. Llama 3.1 to 3.3 differ in `factor` alone, which is the
// largest divisor; what does not follow from it is refused.
absl::Status ReadRopeFactors(const GgufFile& gguf, ModelConfig* config) {
  const GgufTensor* tensor = gguf.Find(kRopeFactorsTensor);
  if (tensor == nullptr) return absl::OkStatus();
  const auto num_pairs = static_cast<std::size_t>(config->head_dim / 2);
  if (tensor->type_name != "F32" || tensor->size_bytes != num_pairs * sizeof(float)) {
    return absl::InvalidArgumentError(absl::StrCat(gguf.file().path(), ": tensor '", kRopeFactorsTensor,
                                                   "': ", tensor->size_bytes, " bytes of ", tensor->type_name, "; ", num_pairs,
                                                   " values of F32 are expected"));
  }
  std::vector<float> divisors(num_pairs);
  TANDEM_RETURN_IF_ERROR(gguf.file().ReadAt(tensor->begin_bytes, std::as_writable_bytes(std::span(divisors))));
  RopeScaling scaling{.factor = 1, .low_freq_factor = 1, .high_freq_factor = 4, .original_max_positions = 8192};
  for (const float divisor : divisors) scaling.factor = std::max(scaling.factor, static_cast<double>(divisor));
  for (std::size_t i = 0; i < num_pairs; ++i) {
    const double expected = RopeDivisor(*config, scaling, static_cast<int>(i));
    const double found = static_cast<double>(divisors[i]);
    if (!(std::abs(found - expected) <= 1e-4 * expected)) {
      return absl::UnimplementedError(absl::StrCat(gguf.file().path(), ": tensor '", kRopeFactorsTensor, "': value ", i, " is ",
                                                   found, "; llama3 scaling of factor ", scaling.factor, " has ", expected));
    }
  }
  config->rope_scaling = scaling;
  return absl::OkStatus();
}

absl::Status ReadRope(const GgufFile& gguf, const ArchitectureValues& values, ModelConfig* config) {
  TANDEM_ASSIGN_OR_RETURN(config->rope_theta, values.Number("rope.freq_base", 10000.0));
  TANDEM_ASSIGN_OR_RETURN(const int rotary_dim, values.Integer("rope.dimension_count", config->head_dim));
  if (rotary_dim != config->head_dim) {
    return absl::UnimplementedError(absl::StrCat(gguf.file().path(), ": ", values.Key("rope.dimension_count"), " is ", rotary_dim,
                                                 "; only the whole head of ", config->head_dim, " is rotated"));
  }
  if (values.Has("rope.scaling.type")) {
    TANDEM_ASSIGN_OR_RETURN(const std::string type, gguf.GetString(values.Key("rope.scaling.type")));
    if (type != "none") {
      return absl::UnimplementedError(
          absl::StrCat(gguf.file().path(), ": ", values.Key("rope.scaling.type"), " '", type, "' is not supported"));
    }
  }
  return ReadRopeFactors(gguf, config);
}

absl::Status ReadEndTokens(const GgufFile& gguf, std::vector<std::uint32_t>* ids) {
  for (const char* key : {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"}) {
    if (!gguf.Has(key)) continue;
    TANDEM_ASSIGN_OR_RETURN(const std::int64_t id, gguf.GetInteger(key));
    if (id < 0 || id > std::numeric_limits<std::int32_t>::max()) {
      return absl::InvalidArgumentError(absl::StrCat(gguf.file().path(), ": ", key, " is ", id, ", no token id"));
    }
    const auto value = static_cast<std::uint32_t>(id);
    if (std::find(ids->begin(), ids->end(), value) == ids->end()) ids->push_back(value);
  }
  return absl::OkStatus();
}

absl::StatusOr<ModelConfig> ReadConfig(const GgufFile& gguf) {
  const std::string& path = gguf.file().path();
  TANDEM_ASSIGN_OR_RETURN(const std::string architecture, gguf.GetString("general.architecture"));
  const LayerFacts* const facts = FindArchitecture(ModelFileKind::kGguf, architecture);
  if (facts == nullptr) {
    return absl::UnimplementedError(absl::StrCat(path, ": architecture '", architecture,
                                                 "' is not supported; these are: ", KnownArchitectures(ModelFileKind::kGguf)));
  }
  const ArchitectureValues values(gguf, architecture);
  ModelConfig config;
  config.family = facts->family;
  config.has_qkv_bias = facts->has_qkv_bias;
  config.has_qk_norm = facts->has_qk_norm;
  config.name = std::filesystem::path(path).stem().string();
  TANDEM_ASSIGN_OR_RETURN(config.num_layers, values.Integer("block_count"));
  TANDEM_ASSIGN_OR_RETURN(config.hidden_size, values.Integer("embedding_length"));
  TANDEM_ASSIGN_OR_RETURN(config.intermediate_size, values.Integer("feed_forward_length"));
  TANDEM_ASSIGN_OR_RETURN(config.num_heads, values.Integer("attention.head_count"));
  if (config.num_heads == 0)
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", values.Key("attention.head_count"), " is 0"));
  TANDEM_ASSIGN_OR_RETURN(config.num_kv_heads, values.Integer("attention.head_count_kv", config.num_heads));
  TANDEM_ASSIGN_OR_RETURN(config.head_dim, values.Integer("attention.key_length", config.hidden_size / config.num_heads));
  TANDEM_ASSIGN_OR_RETURN(const int value_dim, values.Integer("attention.value_length", config.head_dim));
  TANDEM_ASSIGN_OR_RETURN(const int num_experts, values.Integer("expert_count", 0));
  if (value_dim != config.head_dim || num_experts != 0) {
    return absl::UnimplementedError(
        absl::StrCat(path, ": value_length ", value_dim, " and ", num_experts, " experts; the family ", facts->family,
                     " is supported with value_length = key_length = ", config.head_dim, " and without experts"));
  }
  TANDEM_ASSIGN_OR_RETURN(config.max_positions, values.Integer("context_length"));
  TANDEM_ASSIGN_OR_RETURN(const double epsilon, values.Number("attention.layer_norm_rms_epsilon"));
  config.rms_norm_epsilon = static_cast<float>(epsilon);
  const GgufTensor* const embedding = gguf.Find("token_embd.weight");
  if (embedding == nullptr || embedding->dimensions.size() != 2 || embedding->dimensions[1] > (1 << 30)) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": tensor 'token_embd.weight' is missing or is no matrix"));
  }
  config.vocab_size = static_cast<int>(embedding->dimensions[1]);
  config.is_embedding_tied = gguf.Find("output.weight") == nullptr;
  TANDEM_RETURN_IF_ERROR(ReadEndTokens(gguf, &config.end_token_ids));
  TANDEM_RETURN_IF_ERROR(Annotate(ValidateModelConfig(config), path));
  TANDEM_RETURN_IF_ERROR(ReadRope(gguf, values, &config));
  return config;
}

absl::StatusOr<std::string> StringOrEmpty(const GgufFile& gguf, const char* key) {
  if (!gguf.Has(key)) return std::string();
  return gguf.GetString(key);
}

absl::StatusOr<TokenizerSpec> ReadTokenizer(const GgufFile& gguf) {
  GgufTokenizerValues values;
  TANDEM_ASSIGN_OR_RETURN(values.model, gguf.GetString("tokenizer.ggml.model"));
  TANDEM_ASSIGN_OR_RETURN(values.pre, StringOrEmpty(gguf, "tokenizer.ggml.pre"));
  TANDEM_ASSIGN_OR_RETURN(values.chat_template, StringOrEmpty(gguf, "tokenizer.chat_template"));
  TANDEM_ASSIGN_OR_RETURN(values.tokens, gguf.GetStrings("tokenizer.ggml.tokens"));
  if (gguf.Has("tokenizer.ggml.merges")) { TANDEM_ASSIGN_OR_RETURN(values.merges, gguf.GetStrings("tokenizer.ggml.merges")); }
  if (gguf.Has("tokenizer.ggml.token_type")) {
    TANDEM_ASSIGN_OR_RETURN(const std::vector<std::int64_t> types, gguf.GetIntegers("tokenizer.ggml.token_type"));
    values.token_types.reserve(types.size());
    for (const std::int64_t type : types) {
      if (type < 0 || type > 255) {
        return absl::InvalidArgumentError(absl::StrCat(gguf.file().path(), ": tokenizer.ggml.token_type holds ", type));
      }
      values.token_types.push_back(static_cast<std::int32_t>(type));
    }
  }
  if (gguf.Has("tokenizer.ggml.bos_token_id")) {
    TANDEM_ASSIGN_OR_RETURN(values.bos_token_id, gguf.GetInteger("tokenizer.ggml.bos_token_id"));
  }
  if (gguf.Has("tokenizer.ggml.eos_token_id")) {
    TANDEM_ASSIGN_OR_RETURN(values.eos_token_id, gguf.GetInteger("tokenizer.ggml.eos_token_id"));
  }
  if (gguf.Has("tokenizer.ggml.add_bos_token")) {
    TANDEM_ASSIGN_OR_RETURN(values.add_bos_token, gguf.GetBool("tokenizer.ggml.add_bos_token"));
  }
  absl::StatusOr<TokenizerSpec> spec = TokenizerSpecFromGguf(std::move(values));
  if (!spec.ok()) return Annotate(spec.status(), gguf.file().path());
  return spec;
}

absl::StatusOr<std::unique_ptr<ModelSource>> Open(const std::string& path) {
  TANDEM_ASSIGN_OR_RETURN(GgufFile gguf, GgufFile::Open(path));
  ModelDescription description;
  TANDEM_ASSIGN_OR_RETURN(description.config, ReadConfig(gguf));
  TANDEM_ASSIGN_OR_RETURN(description.tokenizer, ReadTokenizer(gguf));
  std::vector<StoredTensor> tensors;
  for (const GgufTensor& tensor : gguf.tensors()) {
    const std::vector<std::uint64_t> shape(tensor.dimensions.rbegin(), tensor.dimensions.rend());
    tensors.push_back({tensor.name, tensor.type_name, shape, 0, tensor.begin_bytes, tensor.size_bytes});
  }
  std::vector<ModelFile> files;
  files.push_back(std::move(gguf).TakeFile());
  return FileModelSource::Create(std::move(description), ModelFileKind::kGguf, std::move(files), std::move(tensors));
}

}  // namespace

absl::StatusOr<std::unique_ptr<ModelSource>> OpenGgufModel(const std::string& path) {
  absl::StatusOr<std::unique_ptr<ModelSource>> source = Open(path);
  if (source.ok()) return source;
  // A value that the file lacks is the file's fault; NOT_FOUND is for the path alone, which Open of the model has checked.
  const absl::StatusCode code = absl::IsNotFound(source.status()) ? absl::StatusCode::kInvalidArgument : source.status().code();
  return Annotate(absl::Status(code, source.status().message()), absl::StrCat("model ", path));
}

}  // namespace tandem
