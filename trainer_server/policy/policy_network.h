// The policy's arithmetic: forward over a packed micro-batch that keeps layer inputs only, backward that recomputes one layer at
// a time. Base weights are frozen: no gradient of a dense weight is ever formed, and the down projection is not recomputed.
//
// T is float, or double for tests against finite differences. Confined to one thread; throws c10::Error. Buffers come from
// LibTorch's allocator (common/torch/buffer.h): the leased arena inside an ArenaScope.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "common/model/model_config.h"
#include "common/torch/buffer.h"
#include "common/torch/matrix.h"
#include "common/torch/rope_table.h"
#include "common/torch/vector_ops.h"
#include "trainer_server/batch/micro_batch.h"
#include "trainer_server/policy/linear_logprob.h"
#include "trainer_server/policy/packed_attention.h"

namespace tandem {

template <typename T>
struct NetworkWeights {
  struct Layer {
    const T* input_norm = nullptr;  // shapes as in weight_layout.h
    const T* qkv = nullptr;
    const T* qkv_bias = nullptr;  // null: the family has none; likewise the norms
    const T* q_norm = nullptr;
    const T* k_norm = nullptr;
    const T* o = nullptr;
    const T* post_norm = nullptr;
    const T* gate_up = nullptr;
    const T* down = nullptr;
  };
  const T* embedding = nullptr;
  std::vector<Layer> layers;
  const T* final_norm = nullptr;
  const T* head = nullptr;
};

// One linear layer's adapter: y += scale (drop(x) A^T) B^T.
template <typename T>
struct LoraPair {
  const T* a = nullptr;  // [rank, inputs]; null: this layer has none
  const T* b = nullptr;  // [outputs, rank]
  T* grad_a = nullptr;   // added to
  T* grad_b = nullptr;
};

template <typename T>
struct LoraSet {
  std::int64_t rank = 0;
  double scale = 0;
  std::vector<std::array<LoraPair<T>, kNumLinearKinds>> layers;
};

struct LoraDropout {
  double probability = 0;    // 0: off
  std::uint64_t stream = 0;  // masks are a function of (stream, layer, kind, row, input)
};

template <typename T>
class PolicyNetwork {
 public:
  PolicyNetwork(const ModelConfig& config, NetworkWeights<T> weights, const LinearHead<T>& head);

  // Log-probs of the batch's head rows; nothing is kept. `lora` null: the base.
  LinearLogprobs Score(const MicroBatch& batch, const LoraSet<T>* lora);
  // The same, keeping what one Backward needs. `needs_entropy_gradient`: the two-pass head. `lora` must outlive Backward.
  LinearLogprobs Forward(const MicroBatch& batch, const LoraSet<T>& lora, const LoraDropout& dropout,
                         bool needs_entropy_gradient);
  // Adds to the gradients in `lora`. Frees what Forward kept. Requires: has_kept().
  void Backward(std::span<const double> grad_logprobs, std::span<const double> grad_entropies);
  bool has_kept() const { return kept_.has_value(); }
  std::size_t num_kept_head_rows() const { return kept_->batch.head_rows.size(); }
  bool keeps_entropy_gradient() const { return kept_->unit_gradient.size() == 0; }
  void DropKept() { kept_.reset(); }

 private:
  struct Kept {
    MicroBatch batch;
    const LoraSet<T>* lora = nullptr;
    LoraDropout dropout;
    std::unique_ptr<PackedAttention<T>> attention;
    Buffer<T> layer_inputs;   // [num_layers, num_rows, d]
    Buffer<T> hidden;         // [num_rows, d], before the final norm
    Buffer<T> head_input;     // [head rows, d]; two-pass head only
    Buffer<T> unit_gradient;  // [head rows, d]; one-pass head only
    LinearLogprobs logprobs;
  };
  struct Workspace;  // buffers of one layer
  struct Pass {      // what all layers of one pass share
    const MicroBatch* batch;
    const LoraSet<T>* lora;  // null: none
    LoraDropout dropout;
    PackedAttention<T>* attention;
    Workspace* workspace;
  };
  struct Linear {  // one fused dense layer: its kinds lie side by side in y's columns
    int layer;
    const T* weight;
    std::span<const LinearKind> kinds;
    std::int64_t first_row = 0;  // of x in the micro-batch
  };

  std::int64_t d() const { return config_.hidden_size; }
  std::int64_t f() const { return config_.intermediate_size; }
  std::int64_t qkv_width() const { return config_.q_size() + 2 * config_.kv_size(); }
  // Runs all layers on `hidden`; layer inputs are copied to `layer_inputs` unless that is null.
  void ForwardLayers(const Pass& pass, Buffer<T>* hidden, T* layer_inputs);
  // hidden += attention(norm(hidden)); leaves normed, qkv, attention and lse in the workspace.
  void ForwardAttention(const Pass& pass, int layer, T* hidden);
  void ForwardMlp(const Pass& pass, int layer, T* hidden);
  // `grad`: dL/d(layer output) in, dL/d(layer input) out.
  void BackwardLayer(const Pass& pass, int layer, const T* input, T* grad);
  void BackwardMlp(const Pass& pass, int layer, const T* middle, T* grad);
  void BackwardAttention(const Pass& pass, int layer, const T* input, T* grad);
  // y = beta y + x W^T + adapters.
  void ForwardLinear(const Pass& pass, const Linear& linear, Matrix<const T> x, Matrix<T> y, double beta);
  // grad_x = grad_y W + adapters' part; adds the adapters' gradients. `needs_grad_x` false: gradients of adapters only.
  void BackwardLinear(const Pass& pass, const Linear& linear, Matrix<const T> x, Matrix<const T> grad_y, Matrix<T> grad_x,
                      bool needs_grad_x);
  // x as the adapter of (layer, kind) sees it.
  Matrix<const T> Dropped(const Pass& pass, const Linear& linear, LinearKind kind, Matrix<const T> x);
  void MultiplyByDropoutMask(const LoraDropout& dropout, const Linear& linear, LinearKind kind, Matrix<T> x);
  // Bias, norms of q's and k's heads where the family has them, rotary embedding, in place. `unnormed` (null: not kept) takes q
  // and k as they go into the norms.
  void FinishQkv(const Pass& pass, int layer, T* qkv, T* unnormed);
  // Turns the gradient of what FinishQkv made into that of what it was given.
  void FinishQkvBackward(const Pass& pass, int layer, const T* unnormed, T* grad_qkv);
  void NormHeadsBackward(const T* x, const T* weight, std::int64_t heads, T* grad) const;
  void Norm(const T* x, const T* weight, T* y, std::int64_t rows);
  void NormBackward(const T* x, const T* weight, const T* grad_y, T* grad_x, std::int64_t rows);
  Buffer<T> GatherHeadInput(const MicroBatch& batch, const T* hidden);

  const ModelConfig config_;
  const NetworkWeights<T> weights_;
  const LinearHead<T> head_;
  const VectorOps<T>& ops_;
  RopeTable<T> rope_;
  std::optional<Kept> kept_;
};

}  // namespace tandem
