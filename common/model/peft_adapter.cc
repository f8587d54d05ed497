#include "common/model/peft_adapter.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

#include <nlohmann/json.hpp>

#include "common/base/units.h"
#include "common/model/bounded_json.h"
#include "common/model/weight_loader.h"

namespace tandem {
namespace {

using Json = nlohmann::json;

constexpr const char* kConfigFile = "adapter_config.json";
constexpr const char* kWeightsFile = "adapter_model.safetensors";
constexpr std::uint64_t kMaxConfigBytes = 16 * kMiB;

// Fields that change the computation. Each is refused unless it is missing, null, false, empty, or the value given here.
struct RefusedField {
  const char* name;
  const char* neutral_value;  // JSON text
};
constexpr std::array<RefusedField, 16> kRefusedFields = {{{"bias", "\"none\""},
                                                          {"use_dora", "false"},
                                                          {"use_qalora", "false"},
                                                          {"lora_bias", "false"},
                                                          {"fan_in_fan_out", "false"},
                                                          {"modules_to_save", "null"},
                                                          {"rank_pattern", "{}"},
                                                          {"alpha_pattern", "{}"},
                                                          {"layers_to_transform", "null"},
                                                          {"layers_pattern", "null"},
                                                          {"exclude_modules", "null"},
                                                          {"layer_replication", "null"},
                                                          {"trainable_token_indices", "null"},
                                                          {"target_parameters", "null"},
                                                          {"alora_invocation_tokens", "null"},
                                                          {"arrow_config", "null"}}};
// Ways to start an adapter that leave the base weights as they are. Others (PiSSA, OLoRA, CorDA, LoftQ) subtract from them.
constexpr std::array<const char*, 3> kHarmlessInits = {"gaussian", "eva", "orthogonal"};

bool IsNeutral(const Json& value, const char* neutral_value) {
  if (value.is_null() || value == Json::parse(neutral_value)) return true;
  if (value.is_boolean()) return !value.get<bool>();
  return (value.is_array() || value.is_object()) && value.empty();
}

absl::StatusOr<std::vector<LinearKind>> ParseTargets(const Json& value) {
  std::vector<LinearKind> targets;
  if (value == "all-linear") {
    for (int i = 0; i < kNumLinearKinds; ++i) targets.push_back(static_cast<LinearKind>(i));
    return targets;
  }
  if (!value.is_array() || value.empty()) {
    return absl::UnimplementedError("target_modules is not a list of names; patterns are not supported");
  }
  for (const Json& name : value) {
    const std::optional<LinearKind> kind = name.is_string() ? ParseLinearKind(name.get<std::string>()) : std::nullopt;
    if (!kind.has_value()) {
      return absl::UnimplementedError(
          absl::StrCat("target_modules holds ", name.dump().substr(0, 100),
                       "; supported are q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"));
    }
    targets.push_back(*kind);
  }
  std::sort(targets.begin(), targets.end());
  targets.erase(std::unique(targets.begin(), targets.end()), targets.end());
  return targets;
}

absl::Status CheckConfig(const PeftConfig& config) {
  if (config.rank < 1 || config.rank > kMaxAdapterRank) {
    return absl::InvalidArgumentError(absl::StrCat("r is ", config.rank, "; it must be from 1 to ", kMaxAdapterRank));
  }
  if (!std::isfinite(config.alpha) || config.alpha <= 0) {
    return absl::InvalidArgumentError(absl::StrCat("lora_alpha is ", config.alpha, "; it must be a finite number above 0"));
  }
  if (config.targets.empty()) return absl::InvalidArgumentError("target_modules is empty");
  return absl::OkStatus();
}

absl::StatusOr<PeftConfig> ParseConfig(const Json& json) {
  if (!json.is_object()) return absl::InvalidArgumentError("the file is not an object");
  const auto find = [&](const char* name) -> const Json* {
    const auto found = json.find(name);
    return found == json.end() || found->is_null() ? nullptr : &*found;
  };
  const Json* const type = find("peft_type");
  if (type == nullptr || *type != "LORA") {
    return absl::UnimplementedError(
        absl::StrCat("peft_type is ", type == nullptr ? "missing" : type->dump().substr(0, 40), "; LORA is supported"));
  }
  for (const RefusedField& field : kRefusedFields) {
    const Json* const value = find(field.name);
    if (value != nullptr && !IsNeutral(*value, field.neutral_value)) {
      return absl::UnimplementedError(
          absl::StrCat(field.name, " is ", value->dump().substr(0, 100), "; supported is ", field.neutral_value));
    }
  }
  if (const Json* init = find("init_lora_weights"); init != nullptr && !init->is_boolean()) {
    if (std::none_of(kHarmlessInits.begin(), kHarmlessInits.end(), [&](const char* name) { return *init == name; })) {
      return absl::UnimplementedError(
          absl::StrCat("init_lora_weights is ", init->dump().substr(0, 40), ", which may change the base weights"));
    }
  }

  PeftConfig config;
  const Json* const rank = find("r");
  if (rank == nullptr) return absl::InvalidArgumentError("r is missing");
  if (!rank->is_number_unsigned() || rank->get<std::uint64_t>() > kMaxAdapterRank) {
    return absl::InvalidArgumentError(
        absl::StrCat("r is ", rank->dump().substr(0, 40), "; it must be an integer from 1 to ", kMaxAdapterRank));
  }
  config.rank = rank->get<int>();
  const Json* const alpha = find("lora_alpha");
  if (alpha == nullptr) return absl::InvalidArgumentError("lora_alpha is missing; it is never taken to be r");
  if (!alpha->is_number()) return absl::InvalidArgumentError("lora_alpha is not a number");
  config.alpha = alpha->get<double>();
  if (const Json* rslora = find("use_rslora"); rslora != nullptr) {
    if (!rslora->is_boolean()) return absl::InvalidArgumentError("use_rslora is not a boolean");
    config.use_rslora = rslora->get<bool>();
  }
  const Json* const targets = find("target_modules");
  if (targets == nullptr) return absl::InvalidArgumentError("target_modules is missing");
  TANDEM_ASSIGN_OR_RETURN(config.targets, ParseTargets(*targets));
  if (const Json* base = find("base_model_name_or_path"); base != nullptr && base->is_string())
    config.base_model = base->get<std::string>();
  TANDEM_RETURN_IF_ERROR(CheckConfig(config));
  return config;
}

// Where one of an adapter's matrices lies in the slot, and its name in the file.
struct AdapterMatrix {
  std::string name;
  std::uint64_t rows = 0;
  std::uint64_t columns = 0;
  std::uint64_t begin_bytes = 0;
};

std::vector<AdapterMatrix> Matrices(const AdapterLayout& layout) {
  std::vector<AdapterMatrix> matrices;
  const auto rank = static_cast<std::uint64_t>(layout.rank);
  for (const AdapterPlace& place : layout.places) {
    const bool is_attention = place.kind <= LinearKind::kOProj;
    const std::string prefix = absl::StrCat("base_model.model.model.layers.", place.layer, is_attention ? ".self_attn." : ".mlp.",
                                            LinearKindName(place.kind));
    matrices.push_back({prefix + ".lora_A.weight", rank, static_cast<std::uint64_t>(place.shape.inputs), place.a_begin_bytes});
    matrices.push_back({prefix + ".lora_B.weight", static_cast<std::uint64_t>(place.shape.outputs), rank, place.b_begin_bytes});
  }
  return matrices;
}

bool IsFloatDtype(const std::string& dtype) { return dtype == "F32" || dtype == "F16" || dtype == "BF16"; }

absl::Status CheckTensors(const SafetensorsFile& file, const AdapterLayout& layout) {
  const std::vector<AdapterMatrix> matrices = Matrices(layout);
  for (const AdapterMatrix& matrix : matrices) {
    const SafetensorsTensor* const tensor = file.Find(matrix.name);
    if (tensor == nullptr) return absl::InvalidArgumentError(absl::StrCat("tensor '", matrix.name, "' is missing"));
    if (tensor->shape != std::vector<std::uint64_t>{matrix.rows, matrix.columns}) {
      return absl::InvalidArgumentError(absl::StrCat("tensor '", matrix.name, "' is not of shape [", matrix.rows, ", ",
                                                     matrix.columns, "], which r and the model ask for"));
    }
    if (!IsFloatDtype(tensor->dtype)) {
      return absl::UnimplementedError(
          absl::StrCat("tensor '", matrix.name, "' is ", tensor->dtype, "; F32, F16 and BF16 are supported"));
    }
  }
  if (file.tensors().size() == matrices.size()) return absl::OkStatus();
  for (const SafetensorsTensor& tensor : file.tensors()) {
    if (std::none_of(matrices.begin(), matrices.end(), [&](const AdapterMatrix& matrix) { return matrix.name == tensor.name; })) {
      return absl::UnimplementedError(absl::StrCat("tensor '", tensor.name, "' belongs to no target module"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

double PeftConfig::scale() const {
  return alpha / (use_rslora ? std::sqrt(static_cast<double>(rank)) : static_cast<double>(rank));
}

absl::StatusOr<PeftAdapter> PeftAdapter::Open(const std::string& directory, const ModelConfig& model) {
  const std::string config_file = directory + "/" + kConfigFile;
  TANDEM_ASSIGN_OR_RETURN(const std::string text, ReadSmallFile(config_file, kMaxConfigBytes));
  absl::StatusOr<Json> json = ParseBoundedJson(text, config_file, "the file");
  if (!json.ok()) return json.status();
  absl::StatusOr<PeftConfig> config = ParseConfig(*json);
  if (!config.ok()) return Annotate(config.status(), config_file);
  TANDEM_ASSIGN_OR_RETURN(SafetensorsFile tensors, SafetensorsFile::Open(directory + "/" + kWeightsFile));
  AdapterLayout layout = AdapterLayout::Create(model, config->rank, config->targets);
  TANDEM_RETURN_IF_ERROR(Annotate(CheckTensors(tensors, layout), tensors.file().path()));
  return PeftAdapter(*std::move(config), std::move(layout), std::move(tensors));
}

absl::Status PeftAdapter::Load(std::span<std::byte> slot) const {
  if (slot.size() < layout_.total_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("loading ", tensors_.file().path(), ": a slot of ", slot.size(), " bytes; ",
                                                   layout_.total_bytes, " are needed"));
  }
  std::vector<TensorLoad> loads;
  for (const AdapterMatrix& matrix : Matrices(layout_)) {
    const SafetensorsTensor& tensor = *tensors_.Find(matrix.name);
    WeightTarget target{.name = matrix.name, .rows = matrix.rows, .columns = matrix.columns, .begin_bytes = matrix.begin_bytes};
    loads.push_back({&tensors_.file(), *ParseCodec(tensor.dtype), tensor.begin_bytes, std::move(target)});
  }
  return LoadTensors(loads, Device::kCpu, slot, nullptr);
}

absl::Status WritePeftAdapter(const std::string& directory, const ModelConfig& model, const PeftConfig& config,
                              std::span<const std::byte> slot) {
  TANDEM_RETURN_IF_ERROR(Annotate(CheckConfig(config), "writing adapter " + directory));
  const AdapterLayout layout = AdapterLayout::Create(model, config.rank, config.targets);
  if (slot.size() < layout.total_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("writing adapter ", directory, ": a slot of ", slot.size(), " bytes; ", layout.total_bytes, " are needed"));
  }
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) return absl::InternalError(absl::StrCat("make directory ", directory, ": ", error.message()));

  std::vector<SafetensorsOutput> tensors;
  for (const AdapterMatrix& matrix : Matrices(layout)) {
    tensors.push_back({matrix.name,
                       "F32",
                       {matrix.rows, matrix.columns},
                       {slot.subspan(matrix.begin_bytes, matrix.rows * matrix.columns * sizeof(float))}});
  }
  TANDEM_RETURN_IF_ERROR(WriteSafetensors(directory + "/" + kWeightsFile, tensors, {{"format", "pt"}}));

  Json target_names = Json::array();
  for (const LinearKind kind : layout.targets) target_names.push_back(LinearKindName(kind));
  Json json = {{"peft_type", "LORA"},
               {"task_type", "CAUSAL_LM"},
               {"base_model_name_or_path", config.base_model},
               {"inference_mode", true},
               {"r", config.rank},
               {"target_modules", target_names},
               {"use_rslora", config.use_rslora},
               {"lora_dropout", 0.0},
               {"bias", "none"},
               {"fan_in_fan_out", false},
               {"init_lora_weights", true},
               {"use_dora", false},
               {"modules_to_save", nullptr},
               {"rank_pattern", Json::object()},
               {"alpha_pattern", Json::object()},
               {"layers_to_transform", nullptr},
               {"layers_pattern", nullptr}};
  // peft declares an int: a whole alpha is written as one.
  if (config.alpha == std::floor(config.alpha) && config.alpha < 1e15) {
    json["lora_alpha"] = static_cast<std::int64_t>(config.alpha);
  } else {
    json["lora_alpha"] = config.alpha;
  }
  return WriteFileAtomically(directory + "/" + kConfigFile, json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
}

}  // namespace tandem
