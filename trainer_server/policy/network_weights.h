// Where a network's weights and its adapter's matrices lie. Views: they own nothing.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "common/model/model_config.h"
#include "kernels/quantize/quantized_matrix.h"

namespace tandem {

// Of a linear layer: values, or the codes that a backend makes values of when it multiplies.
template <typename T>
struct LinearWeight {
  LinearWeight() = default;
  LinearWeight(const T* values_in) : values(values_in) {}             // NOLINT(google-explicit-constructor)
  LinearWeight(const QuantizedMatrix& codes_in) : codes(codes_in) {}  // NOLINT(google-explicit-constructor)
  const T* values = nullptr;
  std::optional<QuantizedMatrix> codes;
};

template <typename T>
struct NetworkWeights {
  // What the fused projection gets beside its product, in the order of use.
  struct AfterQkv {
    const T* bias = nullptr;    // [q + 2 kv]; null: the family has none; likewise the norms
    const T* q_norm = nullptr;  // [head_dim]
    const T* k_norm = nullptr;
    const float* kv_scales = nullptr;  // [2 (keys, values), num_kv_heads], on a GPU: of KvScaleTable; count while they are set
  };
  struct Layer {
    const T* input_norm = nullptr;  // shapes as in weight_layout.h
    LinearWeight<T> qkv;
    AfterQkv after_qkv;
    LinearWeight<T> o;
    const T* post_norm = nullptr;
    LinearWeight<T> gate_up;
    LinearWeight<T> down;
  };
  const T* embedding = nullptr;
  std::vector<Layer> layers;
  const T* final_norm = nullptr;
  const T* head = nullptr;
  std::int64_t layer_codes = 0;  // values of one layer's linears in codes, at most; 0: there are none
};

// One linear layer's adapter: y += scale (drop(x) A^T) B^T.
template <typename T, typename Sum>
struct LoraPair {
  const T* a = nullptr;   // [rank, inputs]; null: this layer has none
  const T* b = nullptr;   // [outputs, rank]
  Sum* grad_a = nullptr;  // added to
  Sum* grad_b = nullptr;
};

// T: of activations and weights. Sum: of sums over rows (adapter gradients, log-sum-exps).
template <typename T, typename Sum = T>
struct LoraSet {
  std::int64_t rank = 0;
  double scale = 0;
  std::vector<std::array<LoraPair<T, Sum>, kNumLinearKinds>> layers;
};

struct LoraDropout {
  double probability = 0;    // 0: off
  std::uint64_t stream = 0;  // masks are a function of (stream, layer, kind, row, input)
};

}  // namespace tandem
