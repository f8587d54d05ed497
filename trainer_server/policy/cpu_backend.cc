#include "trainer_server/policy/cpu_backend.h"

#include <algorithm>
#include <vector>

#include "common/base/random.h"
#include "common/torch/parallel.h"
#include "trainer_server/policy/policy_network.inc"

namespace tandem {
namespace {

constexpr std::int64_t kRowGrain = 32;

}  // namespace

template <typename T>
std::unique_ptr<typename CpuBackend<T>::Plan> CpuBackend<T>::MakePlan(const MicroBatch& batch) {
  rope_.Ensure(*std::max_element(batch.positions.begin(), batch.positions.end()) + 1);
  return std::make_unique<Plan>(Plan{batch, PackedAttention<T>(config_, batch)});
}

template <typename T>
void CpuBackend<T>::Embed(Plan* plan, const T* embedding, Sum* hidden) {
  for (const std::int64_t token : plan->batch.token_ids) hidden = std::copy_n(embedding + token * d(), d(), hidden);
}

template <typename T>
void CpuBackend<T>::Norm(const Sum* x, const T* weight, T* y, std::int64_t rows) {
  ParallelFor(rows, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
    ops_->rms_norm(x + begin * d(), weight, y + begin * d(), end - begin, d(), epsilon());
  });
}

template <typename T>
void CpuBackend<T>::NormBackward(const Sum* x, const T* weight, const T* grad_y, Sum* grad_x, std::int64_t rows) {
  ParallelFor(rows, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
    ops_->rms_norm_backward(x + begin * d(), weight, grad_y + begin * d(), grad_x + begin * d(), end - begin, d(), epsilon());
  });
}

template <typename T>
void CpuBackend<T>::Swiglu(const Sum* gate_up, T* activated, std::int64_t rows) {
  ParallelFor(rows, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
    ops_->swiglu(gate_up + begin * 2 * f(), activated + begin * f(), end - begin, f());
  });
}

template <typename T>
void CpuBackend<T>::SwigluBackward(T* gate_up, const T* grad_activated, T* activated, std::int64_t rows) {
  ParallelFor(rows, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
    ops_->swiglu(gate_up + begin * 2 * f(), activated + begin * f(), end - begin, f());
    ops_->swiglu_backward(gate_up + begin * 2 * f(), grad_activated + begin * f(), end - begin, f());
  });
}

template <typename T>
void CpuBackend<T>::FinishQkv(Plan* plan, const AfterQkv& weights, std::int64_t first_row, std::int64_t rows, const Sum*, T* qkv,
                              T* unnormed) {
  const std::vector<std::int64_t>& positions = plan->batch.positions;
  const std::int64_t q = config_.q_size(), qk = q + config_.kv_size(), head_dim = config_.head_dim;
  ParallelFor(rows, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      T* row = qkv + i * qkv_width();
      if (weights.bias != nullptr) ops_->add_scaled(row, weights.bias, qkv_width(), 1);
      if (weights.q_norm != nullptr) {
        if (unnormed != nullptr) std::copy_n(row, qk, unnormed + i * qk);
        ops_->rms_norm(row, weights.q_norm, row, config_.num_heads, head_dim, epsilon());
        ops_->rms_norm(row + q, weights.k_norm, row + q, config_.num_kv_heads, head_dim, epsilon());
      }
      const std::int64_t position = positions[static_cast<std::size_t>(first_row + i)];
      ops_->rotate(row, config_.num_heads + config_.num_kv_heads, head_dim, rope_.cosines(position), rope_.sines(position), 1);
    }
  });
}

template <typename T>
void CpuBackend<T>::FinishQkvBackward(Plan* plan, const AfterQkv& weights, const T* unnormed, T* grad_qkv) {
  const std::vector<std::int64_t>& positions = plan->batch.positions;
  const std::int64_t q = config_.q_size(), qk = q + config_.kv_size(), head_dim = config_.head_dim;
  ParallelFor(static_cast<std::int64_t>(positions.size()), kRowGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      T* grad = grad_qkv + i * qkv_width();
      const std::int64_t position = positions[static_cast<std::size_t>(i)];
      ops_->rotate(grad, config_.num_heads + config_.num_kv_heads, head_dim, rope_.cosines(position), rope_.sines(position), -1);
      if (weights.q_norm != nullptr) {
        NormHeadsBackward(unnormed + i * qk, weights.q_norm, config_.num_heads, grad);
        NormHeadsBackward(unnormed + i * qk + q, weights.k_norm, config_.num_kv_heads, grad + q);
      }
    }
  });
}

// `grad` [heads, head_dim]: of the normed heads in, of `x` out.
template <typename T>
void CpuBackend<T>::NormHeadsBackward(const T* x, const T* weight, std::int64_t heads, T* grad) const {
  thread_local std::vector<T> grad_y;  // kept by each thread for its life
  const std::int64_t count = heads * config_.head_dim;
  grad_y.assign(grad, grad + count);
  std::fill_n(grad, count, T{0});
  ops_->rms_norm_backward(x, weight, grad_y.data(), grad, heads, config_.head_dim, epsilon());
}

template <typename T>
void CpuBackend<T>::Dropout(T* x, std::int64_t rows, std::int64_t width, std::int64_t first_row, std::uint64_t seed,
                            double probability) {
  const T keep = static_cast<T>(1 / (1 - probability));
  ParallelFor(rows, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin * width; i < end * width; ++i) {
      const bool is_kept = RandomUniform(seed, static_cast<std::uint64_t>(first_row * width + i)) >= probability;
      x[i] = is_kept ? x[i] * keep : 0;
    }
  });
}

template <typename T>
void CpuBackend<T>::Add(T* y, const T* x, std::int64_t count) {
  ops_->add_scaled(y, x, count, 1);
}

template <typename T>
void CpuBackend<T>::NormHeadRows(Plan* plan, const Sum* hidden, const T* weight, T* head_input) {
  for (const std::int64_t row : plan->batch.head_rows) {
    ops_->rms_norm(hidden + row * d(), weight, head_input, 1, d(), epsilon());
    head_input += d();
  }
}

template <typename T>
void CpuBackend<T>::AddHeadGradient(Plan* plan, const Sum* hidden, const T* weight, T* grad_head, std::span<const double> factors,
                                    Sum* grad) {
  const std::vector<std::int64_t>& rows = plan->batch.head_rows;
  for (std::size_t n = 0; n < rows.size(); ++n) {
    T* const row = grad_head + static_cast<std::int64_t>(n) * d();
    if (!factors.empty()) ops_->scale(row, d(), static_cast<T>(factors[n]));
    ops_->rms_norm_backward(hidden + rows[n] * d(), weight, row, grad + rows[n] * d(), 1, d(), epsilon());
  }
}

template class CpuBackend<float>;
template class CpuBackend<double>;
template class PolicyNetwork<CpuBackend<float>>;
template class PolicyNetwork<CpuBackend<double>>;

}  // namespace tandem
