// A random decoder of two layers (a Llama; with a bias of q, k and v, or norms of q's and k's heads, where the config says so),
// and a naive transformer in double that says what it must compute.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <vector>

#include "common/base/random.h"
#include "common/model/model_config.h"
#include "common/model/weight_layout.h"

namespace tandem::testing {

// Zeroed bytes on a 64-byte boundary, as the pool gives them.
class AlignedBytes {
 public:
  explicit AlignedBytes(std::uint64_t size) : size_(size), data_(new (std::align_val_t(64)) std::byte[size]()) {}
  ~AlignedBytes() { ::operator delete[](data_, std::align_val_t(64)); }
  AlignedBytes(const AlignedBytes&) = delete;
  AlignedBytes& operator=(const AlignedBytes&) = delete;
  std::byte* data() const { return data_; }
  std::span<std::byte> span() const { return {data_, size_}; }
  float* floats(std::uint64_t offset_bytes = 0) const { return reinterpret_cast<float*>(data_ + offset_bytes); }

 private:
  std::uint64_t size_;
  std::byte* data_;
};

inline ModelConfig TinyConfig(bool is_embedding_tied = true) {
  ModelConfig config;
  config.family = "llama";
  config.name = "tiny";
  config.num_layers = 2;
  config.hidden_size = 64;
  config.intermediate_size = 96;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = 16;
  config.vocab_size = 128;
  config.max_positions = 2048;
  config.is_embedding_tied = is_embedding_tied;
  config.end_token_ids = {2};
  return config;
}

// One of each kind of computation: tied and untied head, bias of q, k and v, norms of q's and k's heads.
inline std::vector<ModelConfig> FamilyConfigs() {
  std::vector<ModelConfig> configs = {TinyConfig(), TinyConfig(/*is_embedding_tied=*/false), TinyConfig(), TinyConfig()};
  configs[2].family = "qwen2";
  configs[2].has_qkv_bias = true;
  configs[3].family = "qwen3";
  configs[3].has_qk_norm = true;
  return configs;
}

// Uniform in [-amplitude, amplitude).
inline void FillRandom(std::span<float> values, std::uint64_t seed, double amplitude) {
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>((2 * RandomUniform(seed, i) - 1) * amplitude);
}

struct TinyModel {
  ModelConfig config;
  WeightLayout layout;
  std::unique_ptr<AlignedBytes> weights;

  explicit TinyModel(const ModelConfig& config_in = TinyConfig(), std::uint64_t seed = 1)
      : config(config_in), layout(WeightLayout::Create(config_in, StorageFormat::kFp32)) {
    weights = std::make_unique<AlignedBytes>(layout.total_bytes);
    std::uint64_t tensor = 0;
    for (const TensorPlace* place : layout.Tensors()) {
      const std::span<float> values(weights->floats(place->begin_bytes), place->size_bytes / sizeof(float));
      FillRandom(values, DeriveSeed(seed, tensor++), place->shape.size() == 1 ? 0.3 : 0.25);
      if (place->shape.size() == 1) {
        for (float& value : values) value += 1;
      }
    }
  }
  float* Weight(const TensorPlace& place) const { return weights->floats(place.begin_bytes); }
};

struct TinyAdapter {
  AdapterLayout layout;
  std::unique_ptr<AlignedBytes> slot;
  float scale;

  TinyAdapter(const ModelConfig& config, int rank, std::vector<LinearKind> targets, float scale_in, std::uint64_t seed)
      : layout(AdapterLayout::Create(config, rank, std::move(targets))), scale(scale_in) {
    slot = std::make_unique<AlignedBytes>(layout.total_bytes);
    std::uint64_t part = 0;
    for (const AdapterPlace& place : layout.places) {
      FillRandom({slot->floats(place.a_begin_bytes), static_cast<std::size_t>(rank * place.shape.inputs)},
                 DeriveSeed(seed, part++), 0.3);
      FillRandom({slot->floats(place.b_begin_bytes), static_cast<std::size_t>(rank * place.shape.outputs)},
                 DeriveSeed(seed, part++), 0.3);
    }
  }
};

inline std::vector<LinearKind> AllLinearKinds() {
  std::vector<LinearKind> kinds;
  for (int kind = 0; kind < kNumLinearKinds; ++kind) kinds.push_back(static_cast<LinearKind>(kind));
  return kinds;
}

// One layer that does nothing but add the adapter of o_proj, whose input, A and B are all ones, to the stream (2, 0, 0, 0). The
// head shows the normed stream's components.
struct OnesModel {
  std::unique_ptr<TinyModel> model;
  std::unique_ptr<TinyAdapter> adapter;

  OnesModel() {
    ModelConfig config = TinyConfig(/*is_embedding_tied=*/false);
    config.num_layers = 1;
    config.hidden_size = 4;
    config.num_heads = 2;
    config.num_kv_heads = 1;
    config.head_dim = 2;
    config.intermediate_size = 4;
    config.vocab_size = 4;
    config.rms_norm_epsilon = 0;
    model = std::make_unique<TinyModel>(config);
    for (const TensorPlace* place : model->layout.Tensors()) {
      const float value = place->shape.size() == 1 ? 1.f : 0.f;
      std::fill_n(model->Weight(*place), place->size_bytes / sizeof(float), value);
    }
    model->Weight(model->layout.embedding)[0] = 2;  // token 0: norm 1, so the stream after the norm is (2, 0, 0, 0) too
    for (int row = 6; row < 8; ++row) model->Weight(model->layout.layers[0].qkv)[row * 4] = 0.5f;  // values are 1
    for (int token = 0; token < 4; ++token) model->Weight(model->layout.head)[token * 4 + token] = 1;
    const int rank = 8, alpha = 16;
    adapter = std::make_unique<TinyAdapter>(config, rank, std::vector<LinearKind>{LinearKind::kOProj},
                                            static_cast<float>(alpha) / static_cast<float>(rank), 1);
    std::fill_n(adapter->slot->floats(), adapter->layout.total_bytes / sizeof(float), 1.f);
  }

  // What was added to each component: logits are (2 + added, added, ...) / rms.
  static double Added(double logit0, double logit1) { return 2 * logit1 / (logit0 - logit1); }
};

// Logits [token_ids.size()][vocab_size] of one sequence, straight from the formulas.
class NaiveTransformer {
 public:
  using Row = std::vector<double>;

  explicit NaiveTransformer(const TinyModel& model, const TinyAdapter* adapter = nullptr) : model_(model), adapter_(adapter) {}

  std::vector<Row> Logits(std::span<const std::uint32_t> token_ids) const {
    const ModelConfig& config = model_.config;
    std::vector<Row> hidden;
    for (const std::uint32_t id : token_ids) {
      const float* row = model_.Weight(model_.layout.embedding) + id * static_cast<std::size_t>(config.hidden_size);
      hidden.emplace_back(row, row + config.hidden_size);
    }
    for (int layer = 0; layer < config.num_layers; ++layer) Layer(layer, &hidden);
    std::vector<Row> logits;
    for (const Row& row : hidden) {
      logits.push_back(Project(Norm(row, model_.layout.final_norm), model_.Weight(model_.layout.head), config.vocab_size));
    }
    return logits;
  }

  static double LogProb(const Row& logits, std::uint32_t token) {
    double sum = 0, top = logits[0];
    for (const double z : logits) top = std::max(top, z);
    for (const double z : logits) sum += std::exp(z - top);
    return logits[token] - top - std::log(sum);
  }

 private:
  static Row Project(const Row& x, const float* weight, int outputs) {
    Row y(static_cast<std::size_t>(outputs));
    for (std::size_t o = 0; o < y.size(); ++o) {
      for (std::size_t i = 0; i < x.size(); ++i) y[o] += x[i] * static_cast<double>(weight[o * x.size() + i]);
    }
    return y;
  }

  void NormHeads(Row* heads, const TensorPlace& place) const {
    const auto dim = static_cast<std::ptrdiff_t>(model_.config.head_dim);
    for (auto head = heads->begin(); head != heads->end(); head += dim) {
      const Row normed = Norm(Row(head, head + dim), place);
      std::copy(normed.begin(), normed.end(), head);
    }
  }

  Row Norm(const Row& x, const TensorPlace& place) const {
    double squares = 0;
    for (const double v : x) squares += v * v;
    const double inverse =
        1 / std::sqrt(squares / static_cast<double>(x.size()) + static_cast<double>(model_.config.rms_norm_epsilon));
    Row y(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) y[i] = x[i] * inverse * static_cast<double>(model_.Weight(place)[i]);
    return y;
  }

  Row Linear(const Row& x, const float* weight, int layer, LinearKind kind) const {
    Row y = Project(x, weight, ShapeOf(model_.config, kind).outputs);
    if (adapter_ == nullptr) return y;
    for (const AdapterPlace& place : adapter_->layout.places) {
      if (place.layer != layer || place.kind != kind) continue;
      const Row xa = Project(x, adapter_->slot->floats(place.a_begin_bytes), adapter_->layout.rank);
      const Row delta = Project(xa, adapter_->slot->floats(place.b_begin_bytes), place.shape.outputs);
      for (std::size_t o = 0; o < y.size(); ++o) y[o] += static_cast<double>(adapter_->scale) * delta[o];
    }
    return y;
  }

  void Rotate(Row* heads, std::size_t position) const {
    const std::size_t dim = static_cast<std::size_t>(model_.config.head_dim), half = dim / 2;
    for (std::size_t begin = 0; begin < heads->size(); begin += dim) {
      for (std::size_t i = 0; i < half; ++i) {
        const double angle = static_cast<double>(position) *
                             std::pow(model_.config.rope_theta, -2.0 * static_cast<double>(i) / static_cast<double>(dim));
        const double a = (*heads)[begin + i], b = (*heads)[begin + i + half];
        (*heads)[begin + i] = a * std::cos(angle) - b * std::sin(angle);
        (*heads)[begin + i + half] = b * std::cos(angle) + a * std::sin(angle);
      }
    }
  }

  void Layer(int layer, std::vector<Row>* hidden) const {
    const ModelConfig& config = model_.config;
    const LayerPlaces& places = model_.layout.layers[static_cast<std::size_t>(layer)];
    const std::size_t d = static_cast<std::size_t>(config.hidden_size), f = static_cast<std::size_t>(config.intermediate_size);
    const float* qkv = model_.Weight(places.qkv);
    std::vector<Row> q, k, v;
    for (std::size_t t = 0; t < hidden->size(); ++t) {
      const Row x = Norm((*hidden)[t], places.input_norm);
      q.push_back(Linear(x, qkv, layer, LinearKind::kQProj));
      k.push_back(Linear(x, qkv + static_cast<std::size_t>(config.q_size()) * d, layer, LinearKind::kKProj));
      v.push_back(Linear(x, qkv + static_cast<std::size_t>(config.q_size() + config.kv_size()) * d, layer, LinearKind::kVProj));
      if (places.qkv_bias.has_value()) {
        const float* bias = model_.Weight(*places.qkv_bias);
        for (Row* part : {&q.back(), &k.back(), &v.back()}) {
          for (double& value : *part) value += static_cast<double>(*bias++);
        }
      }
      if (places.q_norm.has_value()) NormHeads(&q.back(), *places.q_norm);
      if (places.k_norm.has_value()) NormHeads(&k.back(), *places.k_norm);
      Rotate(&q.back(), t);
      Rotate(&k.back(), t);
    }
    const std::size_t dim = static_cast<std::size_t>(config.head_dim),
                      group = static_cast<std::size_t>(config.num_heads / config.num_kv_heads);
    for (std::size_t t = 0; t < hidden->size(); ++t) {
      Row mixed(static_cast<std::size_t>(config.q_size()));
      for (std::size_t h = 0; h < static_cast<std::size_t>(config.num_heads); ++h) {
        std::vector<double> weights(t + 1);
        double sum = 0;
        for (std::size_t s = 0; s <= t; ++s) {
          for (std::size_t i = 0; i < dim; ++i) weights[s] += q[t][h * dim + i] * k[s][h / group * dim + i];
          weights[s] = std::exp(weights[s] / std::sqrt(static_cast<double>(dim)));
          sum += weights[s];
        }
        for (std::size_t s = 0; s <= t; ++s) {
          for (std::size_t i = 0; i < dim; ++i) mixed[h * dim + i] += weights[s] / sum * v[s][h / group * dim + i];
        }
      }
      Row& x = (*hidden)[t];
      const Row attended = Linear(mixed, model_.Weight(places.o), layer, LinearKind::kOProj);
      for (std::size_t i = 0; i < d; ++i) x[i] += attended[i];
      const Row normed = Norm(x, places.post_norm);
      Row gate = Linear(normed, model_.Weight(places.gate_up), layer, LinearKind::kGateProj);
      const Row up = Linear(normed, model_.Weight(places.gate_up) + f * d, layer, LinearKind::kUpProj);
      for (std::size_t i = 0; i < f; ++i) gate[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
      const Row down = Linear(gate, model_.Weight(places.down), layer, LinearKind::kDownProj);
      for (std::size_t i = 0; i < d; ++i) x[i] += down[i];
    }
  }

  const TinyModel& model_;
  const TinyAdapter* adapter_;
};

}  // namespace tandem::testing
