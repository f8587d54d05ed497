#include "common/model/weight_layout.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "common/base/check.h"
#include "common/base/hash.h"
#include "common/base/status.h"
#include "common/base/units.h"

namespace tandem {
namespace {

constexpr std::uint64_t kTensorAlignmentBytes = 64;
constexpr std::uint64_t kQuantizedAlignmentBytes = 256;

constexpr std::array<const char*, 5> kFormatNames = {"fp32", "bf16", "fp8", "nf4", "fp8_block"};

// Rows of so many values are whole blocks of codes, and products over them have kernels.
int ColumnMultiple(StorageFormat format) {
  switch (format) {
    case StorageFormat::kFp32:
    case StorageFormat::kBf16:
      return 1;
    case StorageFormat::kFp8Row:
    case StorageFormat::kFp8Block:
      return 16;
    case StorageFormat::kNf4:
      return kNf4BlockValues;
  }
  return 1;
}

// Puts tensors one after the other.
class Placer {
 public:
  explicit Placer(StorageFormat format)
      : format_(format), alignment_bytes_(IsQuantized(format) ? kQuantizedAlignmentBytes : kTensorAlignmentBytes) {}

  // A tensor of the format that is no linear layer's.
  TensorPlace Place(std::string name, std::vector<std::int64_t> shape) {
    const std::uint64_t value_bytes = RowBytes(PlainFormat(format_), 1);
    return PlaceBytes(std::move(name), std::move(shape), value_bytes);
  }

  // `part_rows`: of each tensor of the file, in order.
  LinearPlace PlaceLinear(const std::string& name, std::vector<std::int64_t> part_rows, std::int64_t inputs) {
    LinearPlace place;
    const std::int64_t blocks_per_row = inputs / kNf4BlockValues;
    std::int64_t rows = 0, num_nested = 0, num_scale_rows = 0;
    for (const std::int64_t count : part_rows) {
      place.parts.push_back(
          {.row_begin = rows, .row_end = rows + count, .nested_begin = num_nested, .scale_row_begin = num_scale_rows});
      rows += count;
      if (format_ == StorageFormat::kFp8Block) num_scale_rows += NumScaleBlocks(count);
      if (format_ == StorageFormat::kNf4) num_nested += (count * blocks_per_row + kNf4NestedBlocks - 1) / kNf4NestedBlocks;
    }
    place.name = name;
    place.shape = {rows, inputs};
    place.begin_bytes = end_bytes_;
    place.size_bytes = static_cast<std::uint64_t>(rows) * RowBytes(format_, static_cast<std::uint64_t>(inputs));
    end_bytes_ = RoundUp(end_bytes_ + place.size_bytes, alignment_bytes_);
    if (format_ == StorageFormat::kFp8Row) place.scales = PlaceBytes(name + ".scales", {rows}, sizeof(float));
    if (format_ == StorageFormat::kFp8Block) {
      place.scales = PlaceBytes(name + ".scales", {num_scale_rows, NumScaleBlocks(inputs)}, sizeof(float));
    }
    if (format_ == StorageFormat::kNf4) {
      place.scales = PlaceBytes(name + ".scales", {rows, blocks_per_row}, 1);
      place.nested_absmax = PlaceBytes(name + ".nested_absmax", {num_nested}, sizeof(float));
      place.nested_offset = PlaceBytes(name + ".nested_offset", {static_cast<std::int64_t>(part_rows.size())}, sizeof(float));
    }
    return place;
  }

  TensorPlace PlaceBytes(std::string name, std::vector<std::int64_t> shape, std::uint64_t value_bytes) {
    TensorPlace place;
    place.name = std::move(name);
    place.begin_bytes = end_bytes_;
    place.size_bytes = value_bytes;
    for (const std::int64_t dimension : shape) place.size_bytes *= static_cast<std::uint64_t>(dimension);
    place.shape = std::move(shape);
    end_bytes_ = RoundUp(end_bytes_ + place.size_bytes, alignment_bytes_);
    return place;
  }
  std::uint64_t end_bytes() const { return end_bytes_; }

 private:
  const StorageFormat format_;
  const std::uint64_t alignment_bytes_;
  std::uint64_t end_bytes_ = 0;
};

// Everything of the config that changes what the model computes, and nothing else: not its name.
std::string Fingerprint(const ModelConfig& config) {
  std::string text = absl::StrFormat("%s %d %d %d %d %d %d %d %d %.9g %.17g %d", config.family, config.num_layers,
                                     config.hidden_size, config.intermediate_size, config.num_heads, config.num_kv_heads,
                                     config.head_dim, config.vocab_size, config.max_positions,
                                     static_cast<double>(config.rms_norm_epsilon), config.rope_theta, config.is_embedding_tied);
  if (config.rope_scaling.has_value()) {
    const RopeScaling& scaling = *config.rope_scaling;
    absl::StrAppendFormat(&text, " llama3 %.17g %.17g %.17g %d", scaling.factor, scaling.low_freq_factor,
                          scaling.high_freq_factor, scaling.original_max_positions);
  }
  if (config.has_qkv_bias) absl::StrAppend(&text, " qkv_bias");
  if (config.has_qk_norm) absl::StrAppend(&text, " qk_norm");
  for (const std::uint32_t id : config.end_token_ids) absl::StrAppend(&text, " end ", id);
  return text;
}

std::string Digest(const ModelConfig& config, const WeightLayout& layout) {
  Sha256 sha;
  sha.Update(Fingerprint(config));
  sha.Update(absl::StrCat("\n", StorageFormatName(layout.format), "\n"));
  for (const TensorPlace* place : layout.Tensors()) {
    std::string line = absl::StrCat(place->name, " ", place->begin_bytes, " ", place->size_bytes);
    for (const std::int64_t dimension : place->shape) absl::StrAppend(&line, " ", dimension);
    sha.Update(line + "\n");
  }
  return sha.Finish();
}

}  // namespace

const char* StorageFormatName(StorageFormat format) { return kFormatNames[static_cast<std::size_t>(format)]; }

std::optional<StorageFormat> ParseStorageFormat(std::string_view name) {
  for (std::size_t i = 0; i < kFormatNames.size(); ++i) {
    if (name == kFormatNames[i]) return static_cast<StorageFormat>(i);
  }
  return std::nullopt;
}

std::uint64_t RowBytes(StorageFormat format, std::uint64_t columns) {
  switch (format) {
    case StorageFormat::kFp32:
      return columns * 4;
    case StorageFormat::kBf16:
      return columns * 2;
    case StorageFormat::kFp8Row:
    case StorageFormat::kFp8Block:
      return columns;
    case StorageFormat::kNf4:
      return columns / 2;
  }
  return 0;
}

absl::Status CheckStorageFormat(const ModelConfig& config, StorageFormat format) {
  const int multiple = ColumnMultiple(format);
  for (int kind = 0; kind < kNumLinearKinds; ++kind) {
    const int inputs = ShapeOf(config, static_cast<LinearKind>(kind)).inputs;
    if (inputs % multiple != 0) {
      return absl::InvalidArgumentError(absl::StrCat("weights in ", StorageFormatName(format), ": ",
                                                     LinearKindName(static_cast<LinearKind>(kind)), " of ", config.name, " has ",
                                                     inputs, " inputs, no multiple of ", multiple));
    }
  }
  return absl::OkStatus();
}

WeightLayout WeightLayout::Create(const ModelConfig& config, StorageFormat format) {
  TANDEM_CHECK(CheckStorageFormat(config, format).ok(), StorageFormatName(format), " cannot hold ", config.name);
  const std::int64_t hidden = config.hidden_size;
  const std::int64_t intermediate = config.intermediate_size;
  const std::int64_t q_size = config.q_size();
  const std::int64_t kv_size = config.kv_size();
  Placer placer(format);
  WeightLayout layout;
  layout.format = format;
  layout.embedding = placer.Place("embedding", {config.vocab_size, hidden});
  if (format == StorageFormat::kNf4) layout.nested_map = placer.PlaceBytes("nested_map", {256}, sizeof(float));
  layout.layers.reserve(static_cast<std::size_t>(config.num_layers));
  for (int i = 0; i < config.num_layers; ++i) {
    const std::string prefix = absl::StrCat("layers.", i, ".");
    LayerPlaces layer;
    layer.input_norm = placer.Place(prefix + "input_norm", {hidden});
    layer.qkv = placer.PlaceLinear(prefix + "qkv", {q_size, kv_size, kv_size}, hidden);
    if (config.has_qkv_bias) layer.qkv_bias = placer.Place(prefix + "qkv_bias", {q_size + 2 * kv_size});
    if (config.has_qk_norm) {
      layer.q_norm = placer.Place(prefix + "q_norm", {config.head_dim});
      layer.k_norm = placer.Place(prefix + "k_norm", {config.head_dim});
    }
    layer.o = placer.PlaceLinear(prefix + "o", {hidden}, q_size);
    layer.post_norm = placer.Place(prefix + "post_norm", {hidden});
    layer.gate_up = placer.PlaceLinear(prefix + "gate_up", {intermediate, intermediate}, hidden);
    layer.down = placer.PlaceLinear(prefix + "down", {hidden}, intermediate);
    layout.layers.push_back(std::move(layer));
  }
  layout.final_norm = placer.Place("final_norm", {hidden});
  layout.head = config.is_embedding_tied ? layout.embedding : placer.Place("head", {config.vocab_size, hidden});
  layout.total_bytes = placer.end_bytes();
  layout.digest = Digest(config, layout);
  return layout;
}

std::vector<const TensorPlace*> WeightLayout::Tensors() const {
  std::vector<const TensorPlace*> tensors = {&embedding};
  const auto add_optional = [&](const std::optional<TensorPlace>& place) {
    if (place.has_value()) tensors.push_back(&*place);
  };
  const auto add_linear = [&](const LinearPlace& place) {
    tensors.push_back(&place);
    add_optional(place.scales);
    add_optional(place.nested_absmax);
    add_optional(place.nested_offset);
  };
  add_optional(nested_map);
  for (const LayerPlaces& layer : layers) {
    tensors.push_back(&layer.input_norm);
    add_linear(layer.qkv);
    add_optional(layer.qkv_bias);
    add_optional(layer.q_norm);
    add_optional(layer.k_norm);
    add_linear(layer.o);
    tensors.push_back(&layer.post_norm);
    add_linear(layer.gate_up);
    add_linear(layer.down);
  }
  tensors.push_back(&final_norm);
  if (head.begin_bytes != embedding.begin_bytes) tensors.push_back(&head);
  return tensors;
}

AdapterLayout AdapterLayout::Create(const ModelConfig& config, int rank, std::vector<LinearKind> targets) {
  TANDEM_CHECK(rank > 0, "rank ", rank);
  std::sort(targets.begin(), targets.end());
  targets.erase(std::unique(targets.begin(), targets.end()), targets.end());
  Placer placer(StorageFormat::kFp32);
  AdapterLayout layout;
  layout.rank = rank;
  layout.targets = std::move(targets);
  layout.places.reserve(static_cast<std::size_t>(config.num_layers) * layout.targets.size());
  for (int i = 0; i < config.num_layers; ++i) {
    for (const LinearKind kind : layout.targets) {
      AdapterPlace place;
      place.layer = i;
      place.kind = kind;
      place.shape = ShapeOf(config, kind);
      place.a_begin_bytes = placer.Place("A", {rank, place.shape.inputs}).begin_bytes;
      place.b_begin_bytes = placer.Place("B", {place.shape.outputs, rank}).begin_bytes;
      layout.num_parameters += static_cast<std::uint64_t>(rank) *
                               (static_cast<std::uint64_t>(place.shape.inputs) + static_cast<std::uint64_t>(place.shape.outputs));
      layout.places.push_back(place);
    }
  }
  layout.total_bytes = placer.end_bytes();
  return layout;
}

}  // namespace tandem
