// A directory as the Hugging Face hub lays it out: config.json, model.safetensors or shards with an index, tokenizer.json.
#include <algorithm>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include <nlohmann/json.hpp>

#include "common/base/units.h"
#include "common/model/bounded_json.h"
#include "common/model/file_model_source.h"
#include "common/model/safetensors.h"
#include "common/model/weight_loader.h"

namespace tandem {
namespace {

using Json = nlohmann::json;

constexpr std::uint64_t kMaxConfigBytes = 16 * kMiB;
constexpr std::uint64_t kMaxIndexBytes = 64 * kMiB;
constexpr std::uint64_t kMaxTokenizerBytes = 256 * kMiB;
constexpr std::size_t kMaxShards = 1024;
constexpr const char* kWeightsFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";

// The text of a file that may be missing: empty then.
absl::StatusOr<std::string> ReadOptionalFile(const std::string& path, std::uint64_t max_bytes) {
  absl::StatusOr<std::string> text = ReadSmallFile(path, max_bytes);
  if (absl::IsNotFound(text.status())) return std::string();
  return text;
}

absl::StatusOr<Json> ParseObject(const std::string& text, const std::string& file) {
  absl::StatusOr<Json> json = ParseBoundedJson(text, file, "the file");
  if (json.ok() && !json->is_object()) return absl::InvalidArgumentError(absl::StrCat(file, ": the file is not an object"));
  return json;
}

// Fields of config.json, or of an object inside it. A null field is a missing one.
class ConfigFields {
 public:
  ConfigFields(const Json& object, std::string file) : object_(object), file_(std::move(file)) {}

  const Json* Find(const char* name) const {
    const auto found = object_.find(name);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }
  absl::StatusOr<int> Integer(const char* name, std::optional<int> value_if_missing = std::nullopt) const {
    const Json* field = Find(name);
    if (field == nullptr && value_if_missing.has_value()) return *value_if_missing;
    if (field == nullptr) return Fail(name, "is missing");
    if (!field->is_number_unsigned() || field->get<std::uint64_t>() > (1U << 30)) {
      return Fail(name, absl::StrCat("is ", field->dump().substr(0, 40), "; it must be an integer from 0 to 2^30"));
    }
    return field->get<int>();
  }
  absl::StatusOr<double> Number(const char* name, std::optional<double> value_if_missing = std::nullopt) const {
    const Json* field = Find(name);
    if (field == nullptr && value_if_missing.has_value()) return *value_if_missing;
    if (field == nullptr) return Fail(name, "is missing");
    if (!field->is_number()) return Fail(name, "is not a number");
    return field->get<double>();
  }
  absl::StatusOr<bool> Bool(const char* name, bool value_if_missing) const {
    const Json* field = Find(name);
    if (field == nullptr) return value_if_missing;
    if (!field->is_boolean()) return Fail(name, "is not a boolean");
    return field->get<bool>();
  }
  absl::Status Fail(const char* name, const std::string& fault) const {
    return absl::InvalidArgumentError(absl::StrCat(file_, ": ", name, " ", fault));
  }
  const std::string& file() const { return file_; }

 private:
  const Json& object_;
  const std::string file_;
};

// Weights in E4M3 with a factor for each block of 128 x 128 are read; what else "quantization_config" may ask for is refused. How
// it would have activations rounded does not matter: here they are not.
absl::Status CheckQuantization(const ConfigFields& fields) {
  const Json* config = fields.Find("quantization_config");
  if (config == nullptr) return absl::OkStatus();
  const Json wanted = {{"quant_method", "fp8"}, {"fmt", "e4m3"}, {"weight_block_size", {kScaleBlock, kScaleBlock}}};
  for (const auto& [name, value] : wanted.items()) {
    const auto found = config->find(name);
    if (found == config->end() ? name == "fmt" : *found == value) continue;
    return absl::UnimplementedError(absl::StrCat(fields.file(), ": quantization_config is ", config->dump().substr(0, 200), "; ",
                                                 name, " ", value.dump(), " is supported"));
  }
  return absl::OkStatus();
}

absl::StatusOr<const LayerFacts*> ReadFamily(const ConfigFields& fields) {
  const Json* architectures = fields.Find("architectures");
  if (architectures == nullptr || !architectures->is_array() || architectures->size() != 1 || !(*architectures)[0].is_string()) {
    return fields.Fail("architectures", "is not an array of one string");
  }
  const std::string architecture = (*architectures)[0].get<std::string>();
  const LayerFacts* const facts = FindArchitecture(ModelFileKind::kHuggingFace, architecture);
  if (facts == nullptr) {
    return absl::UnimplementedError(
        absl::StrCat(fields.file(), ": architecture '", architecture,
                     "' is not supported; these are: ", KnownArchitectures(ModelFileKind::kHuggingFace)));
  }
  if (const Json* types = fields.Find("layer_types"); types != nullptr) {
    if (!types->is_array()) return fields.Fail("layer_types", "is not an array");
    for (const Json& type : *types) {
      if (type == "full_attention") continue;
      return absl::UnimplementedError(absl::StrCat(fields.file(), ": layer_types holds ", type.dump().substr(0, 100),
                                                   "; \"full_attention\" alone is supported"));
    }
  }
  TANDEM_RETURN_IF_ERROR(CheckQuantization(fields));
  for (const RequiredField& required : facts->required_fields) {
    const Json* field = fields.Find(required.name);
    if (field != nullptr && *field != Json::parse(required.value)) {
      return absl::UnimplementedError(absl::StrCat(fields.file(), ": ", required.name, " is ", field->dump().substr(0, 100),
                                                   "; the family ", facts->family, " is supported with ", required.value,
                                                   " only"));
    }
  }
  return facts;
}

// rope_theta and rope_scaling; newer files hold both in rope_parameters.
absl::Status ReadRope(const ConfigFields& fields, ModelConfig* config) {
  const Json* parameters = fields.Find("rope_parameters");
  const char* const name = parameters != nullptr ? "rope_parameters" : "rope_scaling";
  const Json* object = parameters != nullptr ? parameters : fields.Find("rope_scaling");
  TANDEM_ASSIGN_OR_RETURN(config->rope_theta, fields.Number("rope_theta", 10000.0));
  if (object == nullptr) return absl::OkStatus();
  if (!object->is_object()) return fields.Fail(name, "is not an object");
  const ConfigFields inner(*object, absl::StrCat(fields.file(), ": ", name));
  TANDEM_ASSIGN_OR_RETURN(config->rope_theta, inner.Number("rope_theta", config->rope_theta));
  const Json* type = inner.Find("rope_type");
  if (type == nullptr) type = inner.Find("type");
  if (type == nullptr || *type == "default") return absl::OkStatus();
  if (*type != "llama3") {
    return absl::UnimplementedError(
        absl::StrCat(inner.file(), ": rope_type is ", type->dump().substr(0, 40), "; \"llama3\" and \"default\" are supported"));
  }
  RopeScaling scaling;
  TANDEM_ASSIGN_OR_RETURN(scaling.factor, inner.Number("factor"));
  TANDEM_ASSIGN_OR_RETURN(scaling.low_freq_factor, inner.Number("low_freq_factor"));
  TANDEM_ASSIGN_OR_RETURN(scaling.high_freq_factor, inner.Number("high_freq_factor"));
  TANDEM_ASSIGN_OR_RETURN(scaling.original_max_positions, inner.Integer("original_max_position_embeddings"));
  config->rope_scaling = scaling;
  return absl::OkStatus();
}

// eos_token_id: one id or several.
absl::Status AddEndTokens(const ConfigFields& fields, std::vector<std::uint32_t>* ids) {
  const Json* field = fields.Find("eos_token_id");
  if (field == nullptr) return absl::OkStatus();
  const Json list = field->is_array() ? *field : Json::array({*field});
  for (const Json& id : list) {
    if (!id.is_number_unsigned() || id.get<std::uint64_t>() > UINT32_MAX)
      return fields.Fail("eos_token_id", "is not a token id or several");
    const auto value = id.get<std::uint32_t>();
    if (std::find(ids->begin(), ids->end(), value) == ids->end()) ids->push_back(value);
  }
  return absl::OkStatus();
}

absl::StatusOr<ModelConfig> ReadConfig(const std::string& directory) {
  const std::string file = directory + "/config.json";
  TANDEM_ASSIGN_OR_RETURN(const std::string text, ReadSmallFile(file, kMaxConfigBytes));
  absl::StatusOr<Json> json = ParseObject(text, file);
  if (!json.ok()) return json.status();
  const ConfigFields fields(*json, file);
  TANDEM_ASSIGN_OR_RETURN(const LayerFacts* facts, ReadFamily(fields));
  ModelConfig config;
  config.family = facts->family;
  config.has_qkv_bias = facts->has_qkv_bias;
  config.has_qk_norm = facts->has_qk_norm;
  std::filesystem::path path = std::filesystem::path(directory).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();
  config.name = path.filename().string();
  TANDEM_ASSIGN_OR_RETURN(config.num_layers, fields.Integer("num_hidden_layers"));
  TANDEM_ASSIGN_OR_RETURN(config.hidden_size, fields.Integer("hidden_size"));
  TANDEM_ASSIGN_OR_RETURN(config.intermediate_size, fields.Integer("intermediate_size"));
  TANDEM_ASSIGN_OR_RETURN(config.num_heads, fields.Integer("num_attention_heads"));
  if (config.num_heads == 0) return fields.Fail("num_attention_heads", "is 0");
  TANDEM_ASSIGN_OR_RETURN(config.num_kv_heads, fields.Integer("num_key_value_heads", config.num_heads));
  TANDEM_ASSIGN_OR_RETURN(config.head_dim, fields.Integer("head_dim", config.hidden_size / config.num_heads));
  TANDEM_ASSIGN_OR_RETURN(config.vocab_size, fields.Integer("vocab_size"));
  TANDEM_ASSIGN_OR_RETURN(config.max_positions, fields.Integer("max_position_embeddings"));
  TANDEM_ASSIGN_OR_RETURN(const double epsilon, fields.Number("rms_norm_eps"));
  config.rms_norm_epsilon = static_cast<float>(epsilon);
  TANDEM_ASSIGN_OR_RETURN(config.is_embedding_tied, fields.Bool("tie_word_embeddings", facts->is_tied_by_default));
  TANDEM_RETURN_IF_ERROR(ReadRope(fields, &config));
  TANDEM_RETURN_IF_ERROR(AddEndTokens(fields, &config.end_token_ids));

  // What transformers generates with: it may name more ends than the config does.
  const std::string generation_file = directory + "/generation_config.json";
  TANDEM_ASSIGN_OR_RETURN(const std::string generation_text, ReadOptionalFile(generation_file, kMaxConfigBytes));
  if (!generation_text.empty()) {
    absl::StatusOr<Json> generation = ParseObject(generation_text, generation_file);
    if (!generation.ok()) return generation.status();
    TANDEM_RETURN_IF_ERROR(AddEndTokens(ConfigFields(*generation, generation_file), &config.end_token_ids));
  }
  TANDEM_RETURN_IF_ERROR(Annotate(ValidateModelConfig(config), file));
  return config;
}

absl::StatusOr<TokenizerSpec> ReadTokenizer(const std::string& directory) {
  TANDEM_ASSIGN_OR_RETURN(const std::string tokenizer, ReadSmallFile(directory + "/tokenizer.json", kMaxTokenizerBytes));
  TANDEM_ASSIGN_OR_RETURN(const std::string config, ReadOptionalFile(directory + "/tokenizer_config.json", kMaxConfigBytes));
  TANDEM_ASSIGN_OR_RETURN(const std::string chat_template, ReadOptionalFile(directory + "/chat_template.jinja", kMaxConfigBytes));
  absl::StatusOr<TokenizerSpec> spec = TokenizerSpecFromJson(tokenizer, config, chat_template);
  if (!spec.ok()) return Annotate(spec.status(), directory);
  return spec;
}

// Which shard each tensor lies in. A shard is a plain file name: nothing outside the directory is ever opened.
absl::StatusOr<std::map<std::string, std::string>> ReadIndex(const std::string& file, const std::string& text) {
  absl::StatusOr<Json> json = ParseObject(text, file);
  if (!json.ok()) return json.status();
  const auto weight_map = json->find("weight_map");
  if (weight_map == json->end() || !weight_map->is_object())
    return absl::InvalidArgumentError(absl::StrCat(file, ": weight_map is not an object"));
  std::map<std::string, std::string> shards;
  for (const auto& [tensor, shard] : weight_map->items()) {
    if (!shard.is_string())
      return absl::InvalidArgumentError(absl::StrCat(file, ": tensor '", tensor, "': its shard is not a string"));
    const std::string name = shard.get<std::string>();
    if (name.empty() || name == "." || name == ".." || name.find('/') != std::string::npos ||
        name.find('\0') != std::string::npos) {
      return absl::InvalidArgumentError(
          absl::StrCat(file, ": tensor '", tensor, "': shard '", name, "' is not the name of a file in the directory"));
    }
    shards[tensor] = name;
  }
  return shards;
}

struct TensorTable {
  std::vector<ModelFile> files;
  std::vector<StoredTensor> tensors;
};

void AddFile(SafetensorsFile file, TensorTable* table) {
  for (const SafetensorsTensor& tensor : file.tensors()) {
    table->tensors.push_back(
        {tensor.name, tensor.dtype, tensor.shape, table->files.size(), tensor.begin_bytes, tensor.size_bytes});
  }
  table->files.push_back(std::move(file).TakeFile());
}

absl::StatusOr<TensorTable> ReadTensors(const std::string& directory) {
  TensorTable table;
  absl::StatusOr<SafetensorsFile> single = SafetensorsFile::Open(directory + "/" + kWeightsFile);
  if (!absl::IsNotFound(single.status())) {
    if (!single.ok()) return single.status();
    AddFile(*std::move(single), &table);
    return table;
  }
  const std::string index_file = directory + "/" + kIndexFile;
  const absl::StatusOr<std::string> index = ReadSmallFile(index_file, kMaxIndexBytes);
  if (absl::IsNotFound(index.status())) {
    return absl::NotFoundError(absl::StrCat(directory, ": neither ", kWeightsFile, " nor ", kIndexFile));
  }
  if (!index.ok()) return index.status();
  TANDEM_ASSIGN_OR_RETURN(const auto shards, ReadIndex(index_file, *index));
  std::set<std::string> names;
  for (const auto& [tensor, shard] : shards) names.insert(shard);
  if (names.size() > kMaxShards) {
    return absl::InvalidArgumentError(
        absl::StrCat(index_file, ": ", names.size(), " shards; at most ", kMaxShards, " are taken"));
  }
  std::size_t num_tensors = 0;
  for (const std::string& name : names) {
    TANDEM_ASSIGN_OR_RETURN(SafetensorsFile file, SafetensorsFile::Open(directory + "/" + name));
    for (const SafetensorsTensor& tensor : file.tensors()) {
      const auto found = shards.find(tensor.name);
      if (found == shards.end() || found->second != name) {
        return absl::InvalidArgumentError(
            absl::StrCat(index_file, ": tensor '", tensor.name, "' lies in ", name, ", which the index does not say"));
      }
      ++num_tensors;
    }
    AddFile(std::move(file), &table);
  }
  // Each tensor found lies where the index says, so an equal number means that none is missing.
  if (num_tensors != shards.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(index_file, ": names ", shards.size(), " tensors, the shards hold ", num_tensors));
  }
  return table;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ModelSource>> OpenHuggingFaceModel(const std::string& directory) {
  ModelDescription description;
  TANDEM_ASSIGN_OR_RETURN(description.config, ReadConfig(directory));
  TANDEM_ASSIGN_OR_RETURN(description.tokenizer, ReadTokenizer(directory));
  TANDEM_ASSIGN_OR_RETURN(TensorTable table, ReadTensors(directory));
  absl::StatusOr<std::unique_ptr<ModelSource>> source = FileModelSource::Create(
      std::move(description), ModelFileKind::kHuggingFace, std::move(table.files), std::move(table.tensors));
  if (!source.ok()) return Annotate(source.status(), absl::StrCat("model ", directory));
  return source;
}

}  // namespace tandem
