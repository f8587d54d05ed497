#include "common/model/model_config.h"

#include <array>
#include <cmath>

namespace tandem {
namespace {

constexpr std::array<const char*, kNumLinearKinds> kLinearKindNames = {"q_proj",    "k_proj",  "v_proj",   "o_proj",
                                                                       "gate_proj", "up_proj", "down_proj"};

absl::Status CheckRange(const char* field, std::int64_t value, std::int64_t least, std::int64_t most) {
  if (value >= least && value <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", value, "; it must be from ", least, " to ", most));
}

absl::Status CheckPositive(const char* field, double value) {
  if (std::isfinite(value) && value > 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", value, "; it must be a finite number above 0"));
}

}  // namespace

const char* LinearKindName(LinearKind kind) { return kLinearKindNames[static_cast<std::size_t>(kind)]; }

std::optional<LinearKind> ParseLinearKind(const std::string& name) {
  for (std::size_t i = 0; i < kLinearKindNames.size(); ++i) {
    if (name == kLinearKindNames[i]) return static_cast<LinearKind>(i);
  }
  return std::nullopt;
}

LinearShape ShapeOf(const ModelConfig& config, LinearKind kind) {
  switch (kind) {
    case LinearKind::kQProj:
      return {config.hidden_size, config.q_size()};
    case LinearKind::kKProj:
    case LinearKind::kVProj:
      return {config.hidden_size, config.kv_size()};
    case LinearKind::kOProj:
      return {config.q_size(), config.hidden_size};
    case LinearKind::kGateProj:
    case LinearKind::kUpProj:
      return {config.hidden_size, config.intermediate_size};
    case LinearKind::kDownProj:
      return {config.intermediate_size, config.hidden_size};
  }
  return {};
}

absl::Status ValidateModelConfig(const ModelConfig& config) {
  TANDEM_RETURN_IF_ERROR(CheckRange("num_layers", config.num_layers, 1, 1024));
  TANDEM_RETURN_IF_ERROR(CheckRange("hidden_size", config.hidden_size, 1, 1 << 17));
  TANDEM_RETURN_IF_ERROR(CheckRange("intermediate_size", config.intermediate_size, 1, 1 << 20));
  TANDEM_RETURN_IF_ERROR(CheckRange("num_heads", config.num_heads, 1, 1024));
  TANDEM_RETURN_IF_ERROR(CheckRange("num_kv_heads", config.num_kv_heads, 1, config.num_heads));
  TANDEM_RETURN_IF_ERROR(CheckRange("head_dim", config.head_dim, 2, 1024));
  TANDEM_RETURN_IF_ERROR(CheckRange("vocab_size", config.vocab_size, 1, 1 << 24));
  TANDEM_RETURN_IF_ERROR(CheckRange("max_positions", config.max_positions, 1, 1 << 28));
  if (config.num_heads % config.num_kv_heads != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("num_heads is ", config.num_heads, ", no multiple of num_kv_heads ", config.num_kv_heads));
  }
  if (config.head_dim % 2 != 0) {
    return absl::InvalidArgumentError(absl::StrCat("head_dim is ", config.head_dim, "; rotary embedding needs an even number"));
  }
  TANDEM_RETURN_IF_ERROR(CheckPositive("rms_norm_epsilon", config.rms_norm_epsilon));
  TANDEM_RETURN_IF_ERROR(CheckPositive("rope_theta", config.rope_theta));
  if (config.rope_scaling.has_value()) {
    const RopeScaling& scaling = *config.rope_scaling;
    TANDEM_RETURN_IF_ERROR(CheckPositive("rope_scaling.factor", scaling.factor));
    TANDEM_RETURN_IF_ERROR(CheckPositive("rope_scaling.low_freq_factor", scaling.low_freq_factor));
    TANDEM_RETURN_IF_ERROR(CheckPositive("rope_scaling.high_freq_factor", scaling.high_freq_factor));
    TANDEM_RETURN_IF_ERROR(
        CheckRange("rope_scaling.original_max_position_embeddings", scaling.original_max_positions, 1, 1 << 28));
    if (scaling.high_freq_factor <= scaling.low_freq_factor) {
      return absl::InvalidArgumentError(absl::StrCat("rope_scaling.high_freq_factor is ", scaling.high_freq_factor,
                                                     "; it must be above low_freq_factor ", scaling.low_freq_factor));
    }
  }
  if (config.end_token_ids.size() > 64) {
    return absl::InvalidArgumentError(absl::StrCat(config.end_token_ids.size(), " end tokens; at most 64 are taken"));
  }
  for (const std::uint32_t id : config.end_token_ids) {
    TANDEM_RETURN_IF_ERROR(CheckRange("end token id", id, 0, config.vocab_size - 1));
  }
  return absl::OkStatus();
}

}  // namespace tandem
