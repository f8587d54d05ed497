#include "common/model/weight_layout.h"

#include <algorithm>
#include <string_view>

#include "common/base/check.h"
#include "common/base/hash.h"
#include "common/base/status.h"
#include "common/base/units.h"

namespace tandem {
namespace {

constexpr std::uint64_t kTensorAlignmentBytes = 64;

std::uint64_t ElementBytes(StorageFormat format) { return format == StorageFormat::kFp32 ? 4 : 2; }

// Puts tensors one after the other.
class Placer {
 public:
  explicit Placer(std::uint64_t element_bytes) : element_bytes_(element_bytes) {}

  TensorPlace Place(std::string name, std::vector<std::int64_t> shape) {
    TensorPlace place;
    place.name = std::move(name);
    place.begin_bytes = end_bytes_;
    place.size_bytes = element_bytes_;
    for (const std::int64_t dimension : shape) place.size_bytes *= static_cast<std::uint64_t>(dimension);
    place.shape = std::move(shape);
    end_bytes_ = RoundUp(end_bytes_ + place.size_bytes, kTensorAlignmentBytes);
    return place;
  }
  std::uint64_t end_bytes() const { return end_bytes_; }

 private:
  const std::uint64_t element_bytes_;
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
  for (const std::uint32_t id : config.end_token_ids) absl::StrAppend(&text, " end ", id);
  return text;
}

std::string Digest(const ModelConfig& config, const WeightLayout& layout) {
  Sha256 sha;
  sha.Update(Fingerprint(config));
  sha.Update(layout.format == StorageFormat::kFp32 ? "\nfp32\n" : "\nbf16\n");
  for (const TensorPlace* place : layout.Tensors()) {
    std::string line = absl::StrCat(place->name, " ", place->begin_bytes, " ", place->size_bytes);
    for (const std::int64_t dimension : place->shape) absl::StrAppend(&line, " ", dimension);
    sha.Update(line + "\n");
  }
  return sha.Finish();
}

}  // namespace

WeightLayout WeightLayout::Create(const ModelConfig& config, StorageFormat format) {
  const std::int64_t hidden = config.hidden_size;
  const std::int64_t intermediate = config.intermediate_size;
  const std::int64_t q_size = config.q_size();
  const std::int64_t kv_size = config.kv_size();
  Placer placer(ElementBytes(format));
  WeightLayout layout;
  layout.format = format;
  layout.embedding = placer.Place("embedding", {config.vocab_size, hidden});
  layout.layers.reserve(static_cast<std::size_t>(config.num_layers));
  for (int i = 0; i < config.num_layers; ++i) {
    const std::string prefix = absl::StrCat("layers.", i, ".");
    LayerPlaces layer;
    layer.input_norm = placer.Place(prefix + "input_norm", {hidden});
    layer.qkv = placer.Place(prefix + "qkv", {q_size + 2 * kv_size, hidden});
    layer.o = placer.Place(prefix + "o", {hidden, q_size});
    layer.post_norm = placer.Place(prefix + "post_norm", {hidden});
    layer.gate_up = placer.Place(prefix + "gate_up", {2 * intermediate, hidden});
    layer.down = placer.Place(prefix + "down", {hidden, intermediate});
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
  for (const LayerPlaces& layer : layers) {
    for (const TensorPlace* place : {&layer.input_norm, &layer.qkv, &layer.o, &layer.post_norm, &layer.gate_up, &layer.down}) {
      tensors.push_back(place);
    }
  }
  tensors.push_back(&final_norm);
  if (head.begin_bytes != embedding.begin_bytes) tensors.push_back(&head);
  return tensors;
}

AdapterLayout AdapterLayout::Create(const ModelConfig& config, int rank, std::vector<LinearKind> targets) {
  TANDEM_CHECK(rank > 0, "rank ", rank);
  std::sort(targets.begin(), targets.end());
  targets.erase(std::unique(targets.begin(), targets.end()), targets.end());
  Placer placer(sizeof(float));
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
