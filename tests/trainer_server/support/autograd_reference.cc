#include "tests/trainer_server/support/autograd_reference.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <cmath>

#include "common/torch/rope_table.h"

namespace tandem::testing {
namespace {

at::Tensor View(float* values, at::IntArrayRef shape) { return at::from_blob(values, shape, at::kFloat); }

class Network {
 public:
  Network(const TinyModel& base, const PolicyOptions& options, const TinyAdapter& start, at::ScalarType dtype)
      : base_(base), options_(options), dtype_(dtype), layout_(start.layout) {
    float* masters = start.slot->floats();
    for (const AdapterPlace& place : layout_.places) {
      const auto leaf = [&](std::uint64_t begin_bytes, std::int64_t rows, std::int64_t columns) {
        return View(masters + begin_bytes / sizeof(float), {rows, columns}).clone().requires_grad_();
      };
      a_.push_back(leaf(place.a_begin_bytes, layout_.rank, place.shape.inputs));
      b_.push_back(leaf(place.b_begin_bytes, place.shape.outputs, layout_.rank));
    }
  }

  at::Tensor Logprobs(const MicroBatch& batch) {
    const ModelConfig& config = base_.config;
    const auto rows = static_cast<std::int64_t>(batch.token_ids.size());
    const at::Tensor ids = at::tensor(batch.token_ids, at::kLong);
    at::Tensor x = Weight(base_.layout.embedding).index_select(0, ids);
    RopeTable<float> rope(config);
    rope.Ensure(rows);
    const std::int64_t half = config.head_dim / 2;
    const at::Tensor cosines = View(const_cast<float*>(rope.cosines(0)), {rows, 1, half}).clone(),
                     sines = View(const_cast<float*>(rope.sines(0)), {rows, 1, half}).clone();
    const auto rotate = [&](const at::Tensor& heads) {
      const at::Tensor low = heads.narrow(-1, 0, half).to(at::kFloat), high = heads.narrow(-1, half, half).to(at::kFloat);
      return at::cat({low * cosines - high * sines, high * cosines + low * sines}, -1).to(dtype_);
    };
    const at::Tensor future = at::ones({rows, rows}, at::kBool).triu(1);
    for (int layer = 0; layer < config.num_layers; ++layer) {
      const LayerPlaces& places = base_.layout.layers[static_cast<std::size_t>(layer)];
      const at::Tensor h = Norm(x, places.input_norm);
      const std::int64_t q = config.q_size(), kv = config.kv_size();
      const at::Tensor qkv = Weight(places.qkv);
      const auto heads = [&](LinearKind kind, std::int64_t first, std::int64_t count) {
        return Linear(h, qkv.narrow(0, first, count), layer, kind).reshape({rows, -1, config.head_dim});
      };
      const std::int64_t group = config.num_heads / config.num_kv_heads;
      const at::Tensor query = rotate(heads(LinearKind::kQProj, 0, q)),
                       key = rotate(heads(LinearKind::kKProj, q, kv)).repeat_interleave(group, 1),
                       value = heads(LinearKind::kVProj, q + kv, kv).repeat_interleave(group, 1);
      const at::Tensor scores = at::matmul(query.transpose(0, 1), key.permute({1, 2, 0})).to(at::kFloat) /
                                std::sqrt(static_cast<double>(config.head_dim));
      const at::Tensor shares = at::softmax(scores.masked_fill(future, -INFINITY), -1).to(dtype_);
      const at::Tensor attention = at::matmul(shares, value.transpose(0, 1)).transpose(0, 1).reshape({rows, q});
      x = x + Linear(attention, Weight(places.o), layer, LinearKind::kOProj);
      const at::Tensor n = Norm(x, places.post_norm), gate_up = Weight(places.gate_up);
      const std::int64_t f = config.intermediate_size;
      const at::Tensor gate = Linear(n, gate_up.narrow(0, 0, f), layer, LinearKind::kGateProj),
                       up = Linear(n, gate_up.narrow(0, f, f), layer, LinearKind::kUpProj);
      x = x + Linear(at::silu(gate) * up, Weight(places.down), layer, LinearKind::kDownProj);
    }
    const at::Tensor scored = Norm(x, base_.layout.final_norm).index_select(0, at::tensor(batch.head_rows, at::kLong));
    const at::Tensor logits = at::linear(scored, Weight(base_.layout.head)).to(at::kFloat) / options_.temperature;
    return at::log_softmax(logits, -1).gather(1, at::tensor(batch.head_targets, at::kLong).unsqueeze(1)).squeeze(1);
  }

  std::vector<double> Gradient() const {
    std::vector<double> gradient(layout_.total_bytes / sizeof(float));
    const auto put = [&](const at::Tensor& leaf, std::uint64_t begin_bytes) {
      const at::Tensor grad = leaf.grad().contiguous();
      std::copy_n(grad.const_data_ptr<float>(), grad.numel(),
                  gradient.begin() + static_cast<std::ptrdiff_t>(begin_bytes / sizeof(float)));
    };
    for (std::size_t i = 0; i < layout_.places.size(); ++i) {
      put(a_[i], layout_.places[i].a_begin_bytes);
      put(b_[i], layout_.places[i].b_begin_bytes);
    }
    return gradient;
  }

 private:
  template <typename Place>
  at::Tensor Weight(const Place& place) const {
    return View(base_.Weight(place), place.shape).to(dtype_);
  }
  at::Tensor Norm(const at::Tensor& x, const TensorPlace& weight) const {
    const at::Tensor wide = x.to(at::kFloat);
    const at::Tensor scale = at::rsqrt(wide.pow(2).mean(-1, true) + base_.config.rms_norm_epsilon);
    return (wide * scale).to(dtype_) * Weight(weight);
  }
  at::Tensor Linear(const at::Tensor& x, const at::Tensor& weight, int layer, LinearKind kind) const {
    at::Tensor y = at::linear(x, weight);
    for (std::size_t i = 0; i < layout_.places.size(); ++i) {
      if (layout_.places[i].layer != layer || layout_.places[i].kind != kind) continue;
      y = y + at::linear(at::linear(x, a_[i].to(dtype_)), b_[i].to(dtype_)) * options_.scale;
    }
    return y;
  }

  const TinyModel& base_;
  const PolicyOptions& options_;
  const at::ScalarType dtype_;
  const AdapterLayout& layout_;
  std::vector<at::Tensor> a_, b_;
};

}  // namespace

AutogradResult RunAutograd(const TinyModel& base, const PolicyOptions& options, const TinyAdapter& start, const MicroBatch& batch,
                           const std::vector<double>& grad_logprobs, bool is_bf16) {
  const c10::AutoGradMode with_gradients(true);
  Network network(base, options, start, is_bf16 ? at::kBFloat16 : at::kFloat);
  const at::Tensor logprobs = network.Logprobs(batch);
  (logprobs * at::tensor(grad_logprobs, at::kFloat)).sum().backward();
  const at::Tensor wide = logprobs.detach().to(at::kDouble).contiguous();
  return {{wide.const_data_ptr<double>(), wide.const_data_ptr<double>() + wide.numel()}, network.Gradient()};
}

}  // namespace tandem::testing
