#include "common/model/model_source.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>

#include <nlohmann/json.hpp>

#include "common/base/hash.h"
#include "common/base/units.h"
#include "common/model/bounded_json.h"
#include "common/model/file_model_source.h"
#include "common/model/random_model_source.h"
#include "common/model/weight_encoders.h"
#include "common/model/weight_loader.h"

namespace tandem {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kDescriptionMagic = "TDMD0002";
constexpr std::uint64_t kMaxConfigBytes = 1 * kMiB;
constexpr const char* kScalesSuffix = "_scale_inv";  // the block scales of tensor X.weight are X.weight_scale_inv

std::string ShapeText(const std::vector<std::uint64_t>& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) absl::StrAppend(&text, i == 0 ? "" : ", ", shape[i]);
  return text + "]";
}

Json ConfigToJson(const ModelConfig& config) {
  Json json = {{"family", config.family},
               {"name", config.name},
               {"num_layers", config.num_layers},
               {"hidden_size", config.hidden_size},
               {"intermediate_size", config.intermediate_size},
               {"num_heads", config.num_heads},
               {"num_kv_heads", config.num_kv_heads},
               {"head_dim", config.head_dim},
               {"vocab_size", config.vocab_size},
               {"max_positions", config.max_positions},
               {"rms_norm_epsilon", config.rms_norm_epsilon},
               {"rope_theta", config.rope_theta},
               {"is_embedding_tied", config.is_embedding_tied},
               {"has_qkv_bias", config.has_qkv_bias},
               {"has_qk_norm", config.has_qk_norm},
               {"end_token_ids", config.end_token_ids}};
  if (config.rope_scaling.has_value()) {
    json["rope_scaling"] = {{"factor", config.rope_scaling->factor},
                            {"low_freq_factor", config.rope_scaling->low_freq_factor},
                            {"high_freq_factor", config.rope_scaling->high_freq_factor},
                            {"original_max_positions", config.rope_scaling->original_max_positions}};
  }
  return json;
}

// Reads fields of one JSON object and keeps the first fault.
class FieldReader {
 public:
  explicit FieldReader(const Json& object) : object_(object) {}

  int Integer(const char* name) {
    const Json* field = Find(name, &Json::is_number_integer, "an integer");
    if (field == nullptr) return 0;
    const auto value = field->get<std::int64_t>();
    if (value < 0 || value > (1 << 30)) Fail(name, "is out of range");
    return status_.ok() ? static_cast<int>(value) : 0;
  }
  double Number(const char* name) {
    const Json* field = Find(name, &Json::is_number, "a number");
    return field == nullptr ? 0 : field->get<double>();
  }
  bool Bool(const char* name) {
    const Json* field = Find(name, &Json::is_boolean, "a boolean");
    return field != nullptr && field->get<bool>();
  }
  std::string String(const char* name) {
    const Json* field = Find(name, &Json::is_string, "a string");
    return field == nullptr ? "" : field->get<std::string>();
  }
  std::vector<std::uint32_t> TokenIds(const char* name) {
    const Json* field = Find(name, &Json::is_array, "an array");
    std::vector<std::uint32_t> ids;
    if (field == nullptr) return ids;
    for (const Json& id : *field) {
      if (!id.is_number_unsigned() || id.get<std::uint64_t>() > UINT32_MAX) {
        Fail(name, "holds something that is no token id");
        break;
      }
      ids.push_back(id.get<std::uint32_t>());
    }
    return ids;
  }
  const absl::Status& status() const { return status_; }

 private:
  const Json* Find(const char* name, bool (Json::*is_wanted)() const noexcept, const char* wanted) {
    const auto found = object_.find(name);
    if (found != object_.end() && ((*found).*is_wanted)()) return &*found;
    Fail(name, absl::StrCat("is not ", wanted));
    return nullptr;
  }
  void Fail(const char* name, const std::string& fault) {
    if (status_.ok()) status_ = absl::InvalidArgumentError(absl::StrCat("model description: ", name, " ", fault));
  }

  const Json& object_;
  absl::Status status_;
};

absl::StatusOr<ModelConfig> ConfigFromJson(const Json& json) {
  if (!json.is_object()) return absl::InvalidArgumentError("model description: the config is not an object");
  FieldReader fields(json);
  ModelConfig config;
  config.family = fields.String("family");
  config.name = fields.String("name");
  config.num_layers = fields.Integer("num_layers");
  config.hidden_size = fields.Integer("hidden_size");
  config.intermediate_size = fields.Integer("intermediate_size");
  config.num_heads = fields.Integer("num_heads");
  config.num_kv_heads = fields.Integer("num_kv_heads");
  config.head_dim = fields.Integer("head_dim");
  config.vocab_size = fields.Integer("vocab_size");
  config.max_positions = fields.Integer("max_positions");
  config.rms_norm_epsilon = static_cast<float>(fields.Number("rms_norm_epsilon"));
  config.rope_theta = fields.Number("rope_theta");
  config.is_embedding_tied = fields.Bool("is_embedding_tied");
  config.has_qkv_bias = fields.Bool("has_qkv_bias");
  config.has_qk_norm = fields.Bool("has_qk_norm");
  config.end_token_ids = fields.TokenIds("end_token_ids");
  TANDEM_RETURN_IF_ERROR(fields.status());
  if (const auto found = json.find("rope_scaling"); found != json.end()) {
    if (!found->is_object()) return absl::InvalidArgumentError("model description: rope_scaling is not an object");
    FieldReader scaling_fields(*found);
    RopeScaling scaling;
    scaling.factor = scaling_fields.Number("factor");
    scaling.low_freq_factor = scaling_fields.Number("low_freq_factor");
    scaling.high_freq_factor = scaling_fields.Number("high_freq_factor");
    scaling.original_max_positions = scaling_fields.Integer("original_max_positions");
    TANDEM_RETURN_IF_ERROR(scaling_fields.status());
    config.rope_scaling = scaling;
  }
  TANDEM_RETURN_IF_ERROR(Annotate(ValidateModelConfig(config), "model description"));
  if (FindFamily(config.family) == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("model description: unknown family '", config.family, "'"));
  }
  return config;
}

}  // namespace

// Magic, length of the config as uint64, the config as JSON, the format as one byte, the tokenizer.
std::string SerializeModelDescription(const ModelDescription& description) {
  const std::string config = ConfigToJson(description.config).dump(-1, ' ', false, Json::error_handler_t::replace);
  const std::uint64_t config_bytes = config.size();
  std::string bytes(kDescriptionMagic);
  bytes.append(reinterpret_cast<const char*>(&config_bytes), sizeof(config_bytes));
  bytes.append(config);
  bytes.push_back(static_cast<char>(description.format));
  bytes.append(SerializeTokenizerSpec(description.tokenizer));
  return bytes;
}

absl::StatusOr<ModelDescription> ParseModelDescription(std::string_view bytes) {
  std::uint64_t config_bytes = 0;
  if (bytes.size() < kDescriptionMagic.size() + sizeof(config_bytes) + 1 || !bytes.starts_with(kDescriptionMagic)) {
    return absl::InvalidArgumentError(
        absl::StrCat("model description: ", bytes.size(), " bytes that do not begin with ", ToAbsl(kDescriptionMagic)));
  }
  bytes.remove_prefix(kDescriptionMagic.size());
  std::memcpy(&config_bytes, bytes.data(), sizeof(config_bytes));
  bytes.remove_prefix(sizeof(config_bytes));
  if (config_bytes > kMaxConfigBytes || config_bytes > bytes.size() - 1) {
    return absl::InvalidArgumentError(absl::StrCat("model description: a config of ", config_bytes, " bytes in ", bytes.size()));
  }
  absl::StatusOr<Json> json = ParseBoundedJson(bytes.substr(0, config_bytes), "model description", "config");
  if (!json.ok()) return json.status();
  bytes.remove_prefix(config_bytes);
  ModelDescription description;
  TANDEM_ASSIGN_OR_RETURN(description.config, ConfigFromJson(*json));
  const int format = static_cast<unsigned char>(bytes.front());
  if (format > static_cast<int>(StorageFormat::kFp8Block)) {
    return absl::InvalidArgumentError(absl::StrCat("model description: unknown storage format ", format));
  }
  description.format = static_cast<StorageFormat>(format);
  TANDEM_RETURN_IF_ERROR(Annotate(CheckStorageFormat(description.config, description.format), "model description"));
  TANDEM_ASSIGN_OR_RETURN(description.tokenizer, ParseTokenizerSpec(bytes.substr(1)));
  return description;
}

absl::StatusOr<std::unique_ptr<ModelSource>> ModelSource::Open(const std::string& path) {
  if (path.starts_with(kRandomModelPrefix)) return OpenRandomModel(path.substr(kRandomModelPrefix.size()));
  struct stat attributes = {};
  if (::stat(path.c_str(), &attributes) != 0) {
    return absl::NotFoundError(absl::StrCat("model ", path, ": ", std::strerror(errno)));
  }
  return S_ISDIR(attributes.st_mode) ? OpenHuggingFaceModel(path) : OpenGgufModel(path);
}

absl::StatusOr<StorageFormat> ChooseStorageFormat(std::optional<StorageFormat> wanted, Device device, const ModelSource& source) {
  const bool is_on_gpu = device == Device::kCuda;
  StorageFormat format = wanted.value_or(is_on_gpu ? StorageFormat::kBf16 : StorageFormat::kFp32);
  if (is_on_gpu && source.holds_fp8_blocks() && (!wanted.has_value() || format == StorageFormat::kFp8Row)) {
    format = StorageFormat::kFp8Block;
  }
  const auto refuse = [format](const char* why) {
    return absl::InvalidArgumentError(absl::StrCat("weights in ", StorageFormatName(format), ": ", why));
  };
  if (is_on_gpu == (format == StorageFormat::kFp32)) {
    return refuse(is_on_gpu ? "a GPU computes with bf16, fp8, fp8_block or nf4" : "the CPU computes with fp32");
  }
  if (format == StorageFormat::kFp8Block && !source.holds_fp8_blocks()) {
    return refuse("the model's files do not hold every linear layer in E4M3 with block scales; fp8 makes codes of any");
  }
  TANDEM_RETURN_IF_ERROR(CheckStorageFormat(source.description().config, format));
  return format;
}

absl::StatusOr<std::unique_ptr<ModelSource>> FileModelSource::Create(ModelDescription description, ModelFileKind kind,
                                                                     std::vector<ModelFile> files,
                                                                     std::vector<StoredTensor> tensors) {
  TANDEM_RETURN_IF_ERROR(ValidateModelConfig(description.config));
  const auto vocab_size = static_cast<std::size_t>(description.config.vocab_size);
  if (description.tokenizer.tokens.size() > vocab_size) {
    return absl::InvalidArgumentError(absl::StrCat("the tokenizer has ", description.tokenizer.tokens.size(),
                                                   " tokens, the embedding only ", vocab_size, " rows"));
  }
  std::unique_ptr<FileModelSource> source(new FileModelSource(std::move(description), kind, std::move(files)));
  for (StoredTensor& tensor : tensors) {
    std::string name = tensor.name;
    if (!source->tensors_.emplace(name, std::move(tensor)).second) {
      return absl::InvalidArgumentError(absl::StrCat("tensor named twice: '", name, "'"));
    }
  }
  TANDEM_RETURN_IF_ERROR(source->CheckTensors());
  source->ComputeDigest();
  return source;
}

bool FileModelSource::holds_fp8_blocks() const {
  const WeightLayout layout = WeightLayout::Create(description_.config, description_.format);
  const std::vector<WeightTarget> targets = WeightTargets(description_.config, layout, kind_);
  return std::all_of(targets.begin(), targets.end(),
                     [this](const WeightTarget& target) { return !target.is_linear || HasBlockScales(target.name); });
}

bool FileModelSource::HasBlockScales(const std::string& name) const {
  const auto found = tensors_.find(name);
  return found != tensors_.end() && found->second.type_name == CodecName(WeightCodec::kF8E4M3);
}

absl::Status FileModelSource::CheckTensors() const {
  const WeightLayout layout = WeightLayout::Create(description_.config, description_.format);
  struct Wanted {
    std::vector<std::uint64_t> shape;
    bool is_scale = false;
  };
  std::map<std::string, Wanted> wanted;
  for (const WeightTarget& target : WeightTargets(description_.config, layout, kind_)) {
    wanted[target.name] = {{target.rows, target.columns}};
    if (!HasBlockScales(target.name)) continue;
    const auto num_blocks = [](std::uint64_t size) {
      return static_cast<std::uint64_t>(NumScaleBlocks(static_cast<std::int64_t>(size)));
    };
    wanted[target.name + kScalesSuffix] = {{num_blocks(target.rows), num_blocks(target.columns)}, true};
  }

  for (const auto& [name, tensor] : tensors_) {
    if (IsIgnoredTensor(description_.config, kind_, name)) continue;
    const auto fail = [&, &name = name, &tensor = tensor](const auto&... message) {
      return absl::StrCat(files_[tensor.file_index].path(), ": tensor '", name, "': ", message...);
    };
    const auto found = wanted.find(name);
    if (found == wanted.end()) {
      return absl::UnimplementedError(fail("the family ", description_.config.family, " of ", description_.config.num_layers,
                                           " layers has no such tensor; leaving it out would change what the model computes"));
    }
    std::vector<std::uint64_t> shape = found->second.shape;
    if (shape[0] == 1 && tensor.shape.size() == 1) shape.erase(shape.begin());
    if (tensor.shape != shape) {
      return absl::InvalidArgumentError(
          fail("shape ", ShapeText(tensor.shape), "; the sizes in the config ask for ", ShapeText(shape)));
    }
    const std::optional<WeightCodec> codec = ParseCodec(tensor.type_name);
    if (!codec.has_value() || (found->second.is_scale && BlockOf(*codec).size_bytes < sizeof(std::uint16_t)))
      return absl::UnimplementedError(fail("type ", tensor.type_name, " has no decoder"));
  }
  for (const auto& [name, facts] : wanted) {
    if (!tensors_.contains(name)) {
      return absl::InvalidArgumentError(absl::StrCat(files_[0].path(), ": tensor '", name, "' is missing; the config has ",
                                                     description_.config.num_layers, " layers"));
    }
  }
  return absl::OkStatus();
}

void FileModelSource::ComputeDigest() {
  Sha256 sha;
  sha.Update(WeightLayout::Create(description_.config, description_.format).digest);
  for (const ModelFile& file : files_) sha.Update(absl::StrCat("\nfile ", file.size_bytes()));
  for (const auto& [name, tensor] : tensors_) {
    sha.Update(absl::StrCat("\n", name, " ", tensor.type_name, " ", ShapeText(tensor.shape), " ", tensor.file_index, " ",
                            tensor.begin_bytes, " ", tensor.size_bytes));
  }
  digest_ = sha.Finish();
}

absl::Status LoadTargets(const ModelConfig& config, ModelFileKind kind, const WeightLayout& layout, Device device,
                         std::span<std::byte> region, const std::function<TensorLoad(WeightTarget)>& load_of,
                         const std::function<void(std::uint64_t)>& progress) {
  TANDEM_RETURN_IF_ERROR(CheckStorageFormat(config, layout.format));
  if (layout.digest != WeightLayout::Create(config, layout.format).digest) {
    return absl::InvalidArgumentError(absl::StrCat("loading ", config.name, ": the layout belongs to another model"));
  }
  if (region.size() < layout.total_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("loading ", config.name, ": a region of ", region.size(), " bytes; ", layout.total_bytes, " are needed"));
  }
  if (layout.nested_map.has_value()) {
    const std::span<const float> map = Nf4NestedMap();
    TANDEM_RETURN_IF_ERROR(CopyFromHost(device, region.data() + layout.nested_map->begin_bytes, map.data(), map.size_bytes()));
  }
  std::vector<TensorLoad> loads;
  for (WeightTarget& target : WeightTargets(config, layout, kind)) {
    const TensorLoad& load = loads.emplace_back(load_of(std::move(target)));
    const bool is_in_blocks = load.codec == WeightCodec::kF8E4M3 && load.block_scales.has_value();
    if (load.target.format != StorageFormat::kFp8Block || is_in_blocks) continue;
    return absl::InvalidArgumentError(absl::StrCat("loading ", config.name, ": tensor '", load.target.name, "' is in ",
                                                   CodecName(load.codec), "; ", StorageFormatName(layout.format),
                                                   " takes E4M3 with block scales as the files have it"));
  }
  return Annotate(LoadTensors(loads, device, region, progress), absl::StrCat("loading ", config.name));
}

absl::Status FileModelSource::LoadWeights(const WeightLayout& layout, Device device, std::span<std::byte> region,
                                          const std::function<void(std::uint64_t)>& progress) const {
  const auto load_of = [this](WeightTarget target) { return LoadOf(std::move(target)); };
  return LoadTargets(description_.config, kind_, layout, device, region, load_of, progress);
}

absl::Status FileModelSource::ReadRows(std::size_t tensor_index, std::uint64_t row_begin, std::uint64_t row_end,
                                       std::span<float> values) const {
  const auto load_of = [this](WeightTarget target) { return LoadOf(std::move(target)); };
  return ReadTargetRows(description_.config, kind_, tensor_index, row_begin, row_end, values, load_of);
}

TensorLoad FileModelSource::LoadOf(WeightTarget target) const {
  const StoredTensor& tensor = tensors_.at(target.name);
  TensorLoad load{&files_[tensor.file_index], *ParseCodec(tensor.type_name), tensor.begin_bytes, std::move(target)};
  if (HasBlockScales(load.target.name)) {
    const StoredTensor& scales = tensors_.at(load.target.name + kScalesSuffix);
    load.block_scales = BlockScales{&files_[scales.file_index], *ParseCodec(scales.type_name), scales.begin_bytes};
  }
  return load;
}

std::uint64_t ReadRowsUnit(const ModelConfig& config) {
  return std::lcm(static_cast<std::uint64_t>(config.head_dim), kScaleBlock);
}

absl::Status ReadTargetRows(const ModelConfig& config, ModelFileKind kind, std::size_t tensor_index, std::uint64_t row_begin,
                            std::uint64_t row_end, std::span<float> values,
                            const std::function<TensorLoad(WeightTarget)>& load_of) {
  WeightTarget target = WeightTargets(config, WeightLayout::Create(config, StorageFormat::kFp32), kind).at(tensor_index);
  target.begin_bytes = 0;
  TensorLoad load = load_of(std::move(target));
  const std::uint64_t columns = load.target.columns;
  const CodecBlock block = BlockOf(load.codec);
  load.target.rows = row_end - row_begin;
  load.file_begin_bytes += row_begin * columns / block.num_values * block.size_bytes;
  if (load.block_scales.has_value()) {
    const std::uint64_t blocks_a_row = (columns + kScaleBlock - 1) / kScaleBlock;
    load.block_scales->file_begin_bytes += row_begin / kScaleBlock * blocks_a_row * BlockOf(load.block_scales->codec).size_bytes;
  }
  return Annotate(LoadTensors({&load, 1}, Device::kCpu, std::as_writable_bytes(values), {}),
                  absl::StrCat("reading ", config.name));
}

}  // namespace tandem
