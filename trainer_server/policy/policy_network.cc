#include "trainer_server/policy/policy_network.h"

#include <algorithm>
#include <utility>

#include "common/base/check.h"
#include "common/base/random.h"
#include "common/torch/parallel.h"

namespace tandem {
namespace {

constexpr std::int64_t kMlpRows = 1024;  // rows of one MLP tile: its buffers do not grow with the context
constexpr std::int64_t kRowGrain = 32;

constexpr std::array kQkvKinds = {LinearKind::kQProj, LinearKind::kKProj, LinearKind::kVProj};
constexpr std::array kOKinds = {LinearKind::kOProj};
constexpr std::array kGateUpKinds = {LinearKind::kGateProj, LinearKind::kUpProj};
constexpr std::array kDownKinds = {LinearKind::kDownProj};

}  // namespace

// Buffers of one layer, shared by all layers of a pass. The lower half is for the backward pass.
template <typename T>
struct PolicyNetwork<T>::Workspace {
  Buffer<T> normed, qkv, attention, lse;                    // [num_rows, ...]
  Buffer<T> unnormed;                                       // [num_rows, q + kv]: q and k before their norms, for the backward
  Buffer<T> mlp_normed, gate_up, activated;                 // [mlp_rows, ...]
  Buffer<T> lora_x, lora_grad, dropped;                     // [rows, rank], [rows, rank], [rows, inputs]
  Buffer<T> grad_attention, grad_qkv, grad_normed, middle;  // [num_rows, ...]
  Buffer<T> grad_activated, grad_mlp_normed;                // [mlp_rows, ...]

  Workspace(const ModelConfig& config, std::int64_t num_rows, std::int64_t rank, bool has_dropout, bool is_backward) {
    const std::int64_t d = config.hidden_size, f = config.intermediate_size, q = config.q_size();
    const std::int64_t mlp_rows = std::min(num_rows, kMlpRows);
    normed = Buffer<T>(num_rows * d);
    qkv = Buffer<T>(num_rows * (q + 2 * config.kv_size()));
    attention = Buffer<T>(num_rows * q);
    lse = Buffer<T>(num_rows * config.num_heads);
    mlp_normed = Buffer<T>(mlp_rows * d);
    gate_up = Buffer<T>(mlp_rows * 2 * f);
    activated = Buffer<T>(mlp_rows * f);
    if (rank > 0) lora_x = Buffer<T>(num_rows * rank);
    if (has_dropout) dropped = Buffer<T>(std::max(num_rows * std::max(d, q), mlp_rows * f));
    if (!is_backward) return;
    if (config.has_qk_norm) unnormed = Buffer<T>(num_rows * (q + config.kv_size()));
    grad_attention = Buffer<T>(num_rows * q);
    grad_qkv = Buffer<T>(num_rows * (q + 2 * config.kv_size()));
    grad_normed = Buffer<T>(num_rows * d);
    middle = Buffer<T>(num_rows * d);
    grad_activated = Buffer<T>(mlp_rows * f);
    grad_mlp_normed = Buffer<T>(mlp_rows * d);
    if (rank > 0) lora_grad = Buffer<T>(num_rows * rank);
  }
};

template <typename T>
PolicyNetwork<T>::PolicyNetwork(const ModelConfig& config, NetworkWeights<T> weights, const LinearHead<T>& head)
    : config_(config), weights_(std::move(weights)), head_(head), ops_(vector_ops<T>()), rope_(config) {}

template <typename T>
LinearLogprobs PolicyNetwork<T>::Score(const MicroBatch& batch, const LoraSet<T>* lora) {
  PackedAttention<T> attention(config_, batch);
  Buffer<T> hidden;
  {
    Workspace workspace(config_, static_cast<std::int64_t>(batch.token_ids.size()), lora == nullptr ? 0 : lora->rank, false,
                        false);
    ForwardLayers({&batch, lora, {}, &attention, &workspace}, &hidden, nullptr);
  }
  const Buffer<T> head_input = GatherHeadInput(batch, hidden.data());
  return LinearLogprobForward<T>(head_, head_input.data(), batch.head_targets, nullptr);
}

template <typename T>
LinearLogprobs PolicyNetwork<T>::Forward(const MicroBatch& batch, const LoraSet<T>& lora, const LoraDropout& dropout,
                                         bool needs_entropy_gradient) {
  kept_.reset();
  Kept kept;
  kept.batch = batch;
  kept.lora = &lora;
  kept.dropout = dropout;
  kept.attention = std::make_unique<PackedAttention<T>>(config_, batch);
  const std::int64_t num_rows = static_cast<std::int64_t>(batch.token_ids.size());
  kept.layer_inputs = Buffer<T>(config_.num_layers * num_rows * d());
  {
    Workspace workspace(config_, num_rows, lora.rank, dropout.probability > 0, false);
    ForwardLayers({&batch, &lora, dropout, kept.attention.get(), &workspace}, &kept.hidden, kept.layer_inputs.data());
  }
  Buffer<T> head_input = GatherHeadInput(batch, kept.hidden.data());
  if (needs_entropy_gradient) {
    kept.logprobs = LinearLogprobForward<T>(head_, head_input.data(), batch.head_targets, nullptr);
    kept.head_input = std::move(head_input);
  } else {  // the unit gradient takes the place of the head's input
    kept.logprobs = LinearLogprobForward<T>(head_, head_input.data(), batch.head_targets, head_input.data());
    kept.unit_gradient = std::move(head_input);
  }
  kept_ = std::move(kept);
  return kept_->logprobs;
}

template <typename T>
void PolicyNetwork<T>::Backward(std::span<const double> grad_logprobs, std::span<const double> grad_entropies) {
  TANDEM_CHECK(kept_.has_value(), "Backward without Forward");
  Kept kept = *std::exchange(kept_, std::nullopt);
  const std::int64_t num_rows = static_cast<std::int64_t>(kept.batch.token_ids.size());
  const std::int64_t num_head_rows = static_cast<std::int64_t>(kept.batch.head_rows.size());

  Buffer<T> grad_head = std::move(kept.unit_gradient);
  if (kept.head_input.size() > 0) {
    grad_head = Buffer<T>(num_head_rows * d());
    LinearLogprobBackward<T>(head_, kept.head_input.data(), kept.batch.head_targets, kept.logprobs, grad_logprobs, grad_entropies,
                             grad_head.data(), nullptr);
  } else {
    for (std::int64_t n = 0; n < num_head_rows; ++n) {
      ops_.scale(grad_head.data() + n * d(), d(), static_cast<T>(grad_logprobs[static_cast<std::size_t>(n)]));
    }
  }
  // Several head rows may share a hidden row (a prompt's last): they add up in order.
  const Buffer<T> grad(num_rows * d());
  std::fill_n(grad.data(), num_rows * d(), T{0});
  for (std::int64_t n = 0; n < num_head_rows; ++n) {
    const std::int64_t row = kept.batch.head_rows[static_cast<std::size_t>(n)];
    ops_.rms_norm_backward(kept.hidden.data() + row * d(), weights_.final_norm, grad_head.data() + n * d(),
                           grad.data() + row * d(), 1, d(), static_cast<T>(config_.rms_norm_epsilon));
  }
  grad_head = Buffer<T>();
  kept.hidden = Buffer<T>();
  Workspace workspace(config_, num_rows, kept.lora->rank, kept.dropout.probability > 0, true);
  const Pass pass{&kept.batch, kept.lora, kept.dropout, kept.attention.get(), &workspace};
  for (int layer = config_.num_layers - 1; layer >= 0; --layer) {
    BackwardLayer(pass, layer, kept.layer_inputs.data() + layer * num_rows * d(), grad.data());
  }
}

template <typename T>
void PolicyNetwork<T>::ForwardLayers(const Pass& pass, Buffer<T>* hidden, T* layer_inputs) {
  const MicroBatch& batch = *pass.batch;
  const std::int64_t num_rows = static_cast<std::int64_t>(batch.token_ids.size());
  rope_.Ensure(*std::max_element(batch.positions.begin(), batch.positions.end()) + 1);
  *hidden = Buffer<T>(num_rows * d());
  for (std::int64_t row = 0; row < num_rows; ++row) {
    std::copy_n(weights_.embedding + batch.token_ids[static_cast<std::size_t>(row)] * d(), d(), hidden->data() + row * d());
  }
  for (int layer = 0; layer < config_.num_layers; ++layer) {
    if (layer_inputs != nullptr) std::copy_n(hidden->data(), num_rows * d(), layer_inputs + layer * num_rows * d());
    ForwardAttention(pass, layer, hidden->data());
    ForwardMlp(pass, layer, hidden->data());
  }
}

template <typename T>
void PolicyNetwork<T>::ForwardAttention(const Pass& pass, int layer, T* hidden) {
  Workspace& work = *pass.workspace;
  const auto& weights = weights_.layers[static_cast<std::size_t>(layer)];
  const std::int64_t rows = static_cast<std::int64_t>(pass.batch->token_ids.size());
  const Matrix<T> normed(work.normed.data(), rows, d()), qkv(work.qkv.data(), rows, qkv_width());
  Norm(hidden, weights.input_norm, normed.data, rows);
  ForwardLinear(pass, {layer, weights.qkv, kQkvKinds}, normed, qkv, 0);
  FinishQkv(pass, layer, qkv.data, work.unnormed.data());
  pass.attention->Forward(qkv.data, work.attention.data(), work.lse.data());
  ForwardLinear(pass, {layer, weights.o, kOKinds}, Matrix<T>(work.attention.data(), rows, config_.q_size()),
                Matrix<T>(hidden, rows, d()), 1);
}

template <typename T>
void PolicyNetwork<T>::ForwardMlp(const Pass& pass, int layer, T* hidden) {
  Workspace& work = *pass.workspace;
  const auto& weights = weights_.layers[static_cast<std::size_t>(layer)];
  const std::int64_t num_rows = static_cast<std::int64_t>(pass.batch->token_ids.size());
  for (std::int64_t first = 0; first < num_rows; first += kMlpRows) {
    const std::int64_t rows = std::min(kMlpRows, num_rows - first);
    const Matrix<T> x(hidden + first * d(), rows, d()), normed(work.mlp_normed.data(), rows, d());
    const Matrix<T> gate_up(work.gate_up.data(), rows, 2 * f()), activated(work.activated.data(), rows, f());
    Norm(x.data, weights.post_norm, normed.data, rows);
    ForwardLinear(pass, {layer, weights.gate_up, kGateUpKinds, first}, normed, gate_up, 0);
    ParallelFor(rows, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
      ops_.swiglu(gate_up.data + begin * 2 * f(), activated.data + begin * f(), end - begin, f());
    });
    ForwardLinear(pass, {layer, weights.down, kDownKinds, first}, activated, x, 1);
  }
}

template <typename T>
void PolicyNetwork<T>::BackwardLayer(const Pass& pass, int layer, const T* input, T* grad) {
  Workspace& work = *pass.workspace;
  const std::int64_t rows = static_cast<std::int64_t>(pass.batch->token_ids.size());
  std::copy_n(input, rows * d(), work.middle.data());
  ForwardAttention(pass, layer, work.middle.data());
  BackwardMlp(pass, layer, work.middle.data(), grad);
  BackwardAttention(pass, layer, input, grad);
}

template <typename T>
void PolicyNetwork<T>::BackwardMlp(const Pass& pass, int layer, const T* middle, T* grad) {
  Workspace& work = *pass.workspace;
  const auto& weights = weights_.layers[static_cast<std::size_t>(layer)];
  const std::int64_t num_rows = static_cast<std::int64_t>(pass.batch->token_ids.size());
  for (std::int64_t first = 0; first < num_rows; first += kMlpRows) {
    const std::int64_t rows = std::min(kMlpRows, num_rows - first);
    const T* x = middle + first * d();
    const Matrix<T> grad_y(grad + first * d(), rows, d()), normed(work.mlp_normed.data(), rows, d());
    const Matrix<T> gate_up(work.gate_up.data(), rows, 2 * f()), activated(work.activated.data(), rows, f());
    const Matrix<T> grad_activated(work.grad_activated.data(), rows, f()), grad_normed(work.grad_mlp_normed.data(), rows, d());
    const Linear gate_up_linear{layer, weights.gate_up, kGateUpKinds, first}, down_linear{layer, weights.down, kDownKinds, first};
    Norm(x, weights.post_norm, normed.data, rows);
    ForwardLinear(pass, gate_up_linear, normed, gate_up, 0);
    ParallelFor(rows, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
      ops_.swiglu(gate_up.data + begin * 2 * f(), activated.data + begin * f(), end - begin, f());
    });
    BackwardLinear(pass, down_linear, activated, grad_y, grad_activated, true);
    ParallelFor(rows, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
      ops_.swiglu_backward(gate_up.data + begin * 2 * f(), grad_activated.data + begin * f(), end - begin, f());
    });
    BackwardLinear(pass, gate_up_linear, normed, gate_up, grad_normed, true);
    NormBackward(x, weights.post_norm, grad_normed.data, grad_y.data, rows);
  }
}

// The workspace holds what ForwardAttention left.
template <typename T>
void PolicyNetwork<T>::BackwardAttention(const Pass& pass, int layer, const T* input, T* grad) {
  Workspace& work = *pass.workspace;
  const auto& weights = weights_.layers[static_cast<std::size_t>(layer)];
  const std::int64_t rows = static_cast<std::int64_t>(pass.batch->token_ids.size());
  const Matrix<T> attention(work.attention.data(), rows, config_.q_size()),
      grad_attention(work.grad_attention.data(), rows, config_.q_size());
  const Matrix<T> normed(work.normed.data(), rows, d()), grad_normed(work.grad_normed.data(), rows, d());
  const Matrix<T> grad_qkv(work.grad_qkv.data(), rows, qkv_width());
  BackwardLinear(pass, {layer, weights.o, kOKinds}, attention, Matrix<T>(grad, rows, d()), grad_attention, true);
  pass.attention->Backward(work.qkv.data(), attention.data, work.lse.data(), grad_attention.data, grad_qkv.data);
  FinishQkvBackward(pass, layer, work.unnormed.data(), grad_qkv.data);
  const bool needs_input_gradient = layer > 0;  // embeddings are frozen
  BackwardLinear(pass, {layer, weights.qkv, kQkvKinds}, normed, grad_qkv, grad_normed, needs_input_gradient);
  if (needs_input_gradient) NormBackward(input, weights.input_norm, grad_normed.data, grad, rows);
}

template <typename T>
void PolicyNetwork<T>::ForwardLinear(const Pass& pass, const Linear& linear, Matrix<const T> x, Matrix<T> y, double beta) {
  Multiply(x, Matrix<const T>(linear.weight, y.columns, x.columns).Transposed(), y, 1, beta);
  if (pass.lora == nullptr) return;
  const LoraSet<T>& lora = *pass.lora;
  const Matrix<T> xa(pass.workspace->lora_x.data(), x.rows, lora.rank);
  std::int64_t column = 0;
  for (const LinearKind kind : linear.kinds) {
    const std::int64_t outputs = ShapeOf(config_, kind).outputs;
    const LoraPair<T>& pair = lora.layers[static_cast<std::size_t>(linear.layer)][static_cast<std::size_t>(kind)];
    if (pair.a != nullptr) {
      Multiply(Dropped(pass, linear, kind, x), Matrix<const T>(pair.a, lora.rank, x.columns).Transposed(), xa);
      Multiply(xa, Matrix<const T>(pair.b, outputs, lora.rank).Transposed(), y.Columns(column, column + outputs), lora.scale, 1);
    }
    column += outputs;
  }
}

// With t = scale grad_y B: grad_x += mask (t A); grad_A += t^T drop(x); grad_B += scale grad_y^T (drop(x) A^T).
template <typename T>
void PolicyNetwork<T>::BackwardLinear(const Pass& pass, const Linear& linear, Matrix<const T> x, Matrix<const T> grad_y,
                                      Matrix<T> grad_x, bool needs_grad_x) {
  if (needs_grad_x) Multiply(grad_y, Matrix<const T>(linear.weight, grad_y.columns, x.columns), grad_x);
  const LoraSet<T>& lora = *pass.lora;
  const Matrix<T> xa(pass.workspace->lora_x.data(), x.rows, lora.rank),
      grad_xa(pass.workspace->lora_grad.data(), x.rows, lora.rank);
  std::int64_t column = 0;
  for (const LinearKind kind : linear.kinds) {
    const std::int64_t outputs = ShapeOf(config_, kind).outputs;
    const Matrix<const T> grad_part = grad_y.Columns(column, column + outputs);
    column += outputs;
    const LoraPair<T>& pair = lora.layers[static_cast<std::size_t>(linear.layer)][static_cast<std::size_t>(kind)];
    if (pair.a == nullptr) continue;
    const Matrix<const T> a(pair.a, lora.rank, x.columns), b(pair.b, outputs, lora.rank);
    const Matrix<const T> seen = Dropped(pass, linear, kind, x);
    Multiply(seen, a.Transposed(), xa);
    Multiply(grad_part, b, grad_xa, lora.scale);
    Multiply(grad_xa.Transposed(), seen, Matrix<T>(pair.grad_a, lora.rank, x.columns), 1, 1);
    Multiply(grad_part.Transposed(), xa, Matrix<T>(pair.grad_b, outputs, lora.rank), lora.scale, 1);
    if (!needs_grad_x) continue;
    if (pass.dropout.probability > 0) {
      const Matrix<T> through(pass.workspace->dropped.data(), x.rows, x.columns);
      Multiply(grad_xa, a, through);
      MultiplyByDropoutMask(pass.dropout, linear, kind, through);
      ops_.add_scaled(grad_x.data, through.data, x.rows * x.columns, 1);
    } else {
      Multiply(grad_xa, a, grad_x, 1, 1);
    }
  }
}

template <typename T>
Matrix<const T> PolicyNetwork<T>::Dropped(const Pass& pass, const Linear& linear, LinearKind kind, Matrix<const T> x) {
  if (pass.dropout.probability == 0) return x;
  const Matrix<T> dropped(pass.workspace->dropped.data(), x.rows, x.columns);
  std::copy_n(x.data, x.rows * x.columns, dropped.data);
  MultiplyByDropoutMask(pass.dropout, linear, kind, dropped);
  return dropped;
}

template <typename T>
void PolicyNetwork<T>::MultiplyByDropoutMask(const LoraDropout& dropout, const Linear& linear, LinearKind kind, Matrix<T> x) {
  const std::uint64_t seed =
      DeriveSeed(dropout.stream, static_cast<std::uint64_t>(linear.layer) * kNumLinearKinds + static_cast<std::uint64_t>(kind));
  const T keep = static_cast<T>(1 / (1 - dropout.probability));
  ParallelFor(x.rows, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const std::uint64_t first = static_cast<std::uint64_t>((linear.first_row + row) * x.columns);
      for (std::int64_t i = 0; i < x.columns; ++i) {
        const bool is_kept = RandomUniform(seed, first + static_cast<std::uint64_t>(i)) >= dropout.probability;
        T& value = x.data[row * x.row_stride + i];
        value = is_kept ? value * keep : 0;
      }
    }
  });
}

template <typename T>
void PolicyNetwork<T>::FinishQkv(const Pass& pass, int layer, T* qkv, T* unnormed) {
  const auto& weights = weights_.layers[static_cast<std::size_t>(layer)];
  const MicroBatch& batch = *pass.batch;
  const std::int64_t q = config_.q_size(), qk = q + config_.kv_size(), head_dim = config_.head_dim;
  const T epsilon = static_cast<T>(config_.rms_norm_epsilon);
  ParallelFor(static_cast<std::int64_t>(batch.positions.size()), kRowGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      T* row = qkv + i * qkv_width();
      if (weights.qkv_bias != nullptr) ops_.add_scaled(row, weights.qkv_bias, qkv_width(), 1);
      if (weights.q_norm != nullptr) {
        if (unnormed != nullptr) std::copy_n(row, qk, unnormed + i * qk);
        ops_.rms_norm(row, weights.q_norm, row, config_.num_heads, head_dim, epsilon);
        ops_.rms_norm(row + q, weights.k_norm, row + q, config_.num_kv_heads, head_dim, epsilon);
      }
      const std::int64_t position = batch.positions[static_cast<std::size_t>(i)];
      ops_.rotate(row, config_.num_heads + config_.num_kv_heads, head_dim, rope_.cosines(position), rope_.sines(position), 1);
    }
  });
}

// The bias is frozen: its gradient is nobody's, and that of what it was added to is the same.
template <typename T>
void PolicyNetwork<T>::FinishQkvBackward(const Pass& pass, int layer, const T* unnormed, T* grad_qkv) {
  const auto& weights = weights_.layers[static_cast<std::size_t>(layer)];
  const MicroBatch& batch = *pass.batch;
  const std::int64_t q = config_.q_size(), qk = q + config_.kv_size(), head_dim = config_.head_dim;
  ParallelFor(static_cast<std::int64_t>(batch.positions.size()), kRowGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      T* grad = grad_qkv + i * qkv_width();
      const std::int64_t position = batch.positions[static_cast<std::size_t>(i)];
      ops_.rotate(grad, config_.num_heads + config_.num_kv_heads, head_dim, rope_.cosines(position), rope_.sines(position), -1);
      if (weights.q_norm != nullptr) {
        NormHeadsBackward(unnormed + i * qk, weights.q_norm, config_.num_heads, grad);
        NormHeadsBackward(unnormed + i * qk + q, weights.k_norm, config_.num_kv_heads, grad + q);
      }
    }
  });
}

// `grad` [heads, head_dim]: of the normed heads in, of `x` out.
template <typename T>
void PolicyNetwork<T>::NormHeadsBackward(const T* x, const T* weight, std::int64_t heads, T* grad) const {
  thread_local std::vector<T> grad_y;  // kept by each thread for its life
  const std::int64_t count = heads * config_.head_dim;
  grad_y.assign(grad, grad + count);
  std::fill_n(grad, count, T{0});
  ops_.rms_norm_backward(x, weight, grad_y.data(), grad, heads, config_.head_dim, static_cast<T>(config_.rms_norm_epsilon));
}

template <typename T>
void PolicyNetwork<T>::Norm(const T* x, const T* weight, T* y, std::int64_t rows) {
  ParallelFor(rows, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
    ops_.rms_norm(x + begin * d(), weight, y + begin * d(), end - begin, d(), static_cast<T>(config_.rms_norm_epsilon));
  });
}

template <typename T>
void PolicyNetwork<T>::NormBackward(const T* x, const T* weight, const T* grad_y, T* grad_x, std::int64_t rows) {
  ParallelFor(rows, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
    ops_.rms_norm_backward(x + begin * d(), weight, grad_y + begin * d(), grad_x + begin * d(), end - begin, d(),
                           static_cast<T>(config_.rms_norm_epsilon));
  });
}

template <typename T>
Buffer<T> PolicyNetwork<T>::GatherHeadInput(const MicroBatch& batch, const T* hidden) {
  Buffer<T> gathered(static_cast<std::int64_t>(batch.head_rows.size()) * d());
  for (std::size_t n = 0; n < batch.head_rows.size(); ++n) {
    ops_.rms_norm(hidden + batch.head_rows[n] * d(), weights_.final_norm, gathered.data() + static_cast<std::int64_t>(n) * d(), 1,
                  d(), static_cast<T>(config_.rms_norm_epsilon));
  }
  return gathered;
}

template class PolicyNetwork<float>;
template class PolicyNetwork<double>;

}  // namespace tandem
