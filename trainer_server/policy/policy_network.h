// The policy's structure: forward over a packed micro-batch that keeps layer inputs only, backward that recomputes one layer at
// a time. Base weights are frozen: no gradient of a dense weight is ever formed, and the down projection is not recomputed.
//
// The arithmetic and the memory that it works on are a Backend's: CpuBackend (cpu_backend.h, which tells what each operation
// does) or CudaBackend (cuda_backend.h). The residual stream, its gradient, what the forward's products give, and sums over rows
// are of the backend's Sum, all else is of its Element. Pointers are the backend's: this code never dereferences one. Confined to
// one thread; throws c10::Error. Buffers come from the leased arena inside an ArenaScope. Defined in policy_network.inc.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "common/model/model_config.h"
#include "common/torch/matrix.h"
#include "trainer_server/batch/micro_batch.h"
#include "trainer_server/policy/linear_logprob.h"
#include "trainer_server/policy/network_weights.h"

namespace tandem {

template <typename Backend>
class PolicyNetwork {
 public:
  using T = typename Backend::Element;
  using Sum = typename Backend::Sum;
  template <typename U>
  using Buffer = typename Backend::template Buffer<U>;
  using Plan = typename Backend::Plan;  // a micro-batch as the backend's operations want it
  using Lora = LoraSet<T, Sum>;

  PolicyNetwork(const ModelConfig& config, NetworkWeights<T> weights, Backend backend);

  // Log-probs of the batch's head rows; nothing is kept. `lora` null: the base.
  LinearLogprobs Score(const MicroBatch& batch, const Lora* lora);
  // The same, keeping what one Backward needs. `needs_entropy_gradient`: the two-pass head. `lora` must outlive Backward.
  LinearLogprobs Forward(const MicroBatch& batch, const Lora& lora, const LoraDropout& dropout, bool needs_entropy_gradient);
  // Adds to the gradients in `lora`. Frees what Forward kept. Requires: has_kept().
  void Backward(std::span<const double> grad_logprobs, std::span<const double> grad_entropies);
  bool has_kept() const { return kept_.has_value(); }
  std::size_t num_kept_head_rows() const { return kept_->logprobs.logprobs.size(); }
  bool keeps_entropy_gradient() const { return kept_->unit_gradient.size() == 0; }
  void DropKept() { kept_.reset(); }
  Backend& backend() { return backend_; }

 private:
  struct Kept {
    std::unique_ptr<Plan> plan;
    const Lora* lora = nullptr;
    LoraDropout dropout;
    Buffer<Sum> layer_inputs;  // [num_layers, num_rows, d]
    Buffer<Sum> hidden;        // [num_rows, d], before the final norm
    Buffer<T> head_input;      // [head rows, d]; two-pass head only
    Buffer<T> unit_gradient;   // [head rows, d]; one-pass head only
    LinearLogprobs logprobs;
  };
  struct Workspace;  // buffers of one layer
  struct Pass {      // what all layers of one pass share
    Plan* plan;
    std::int64_t num_rows;
    const Lora* lora;  // null: none
    LoraDropout dropout;
    Workspace* workspace;
  };
  struct Linear {  // one fused dense layer: its kinds lie side by side in y's columns
    int layer;
    const LinearWeight<T>& weight;
    std::span<const LinearKind> kinds;
    std::int64_t first_row = 0;  // of x in the micro-batch
  };

  std::int64_t d() const { return config_.hidden_size; }
  std::int64_t f() const { return config_.intermediate_size; }
  std::int64_t qkv_width() const { return config_.q_size() + 2 * config_.kv_size(); }
  // Runs all layers on `hidden`; layer inputs are copied to `layer_inputs` unless that is null.
  void ForwardLayers(const Pass& pass, Buffer<Sum>* hidden, Sum* layer_inputs);
  // hidden += attention(norm(hidden)); leaves normed, qkv, attention and lse in the workspace.
  void ForwardAttention(const Pass& pass, int layer, Sum* hidden);
  void ForwardMlp(const Pass& pass, int layer, Sum* hidden);
  // `grad`: dL/d(layer output) in, dL/d(layer input) out.
  void BackwardLayer(const Pass& pass, int layer, const Sum* input, Sum* grad);
  void BackwardMlp(const Pass& pass, int layer, const Sum* middle, Sum* grad);
  void BackwardAttention(const Pass& pass, int layer, const Sum* input, Sum* grad);
  // y = beta y + x W^T + adapters.
  void ForwardLinear(const Pass& pass, const Linear& linear, Matrix<const T> x, Matrix<Sum> y, double beta);
  // grad_x = grad_y W + adapters' part; adds the adapters' gradients. `needs_grad_x` false: gradients of adapters only.
  void BackwardLinear(const Pass& pass, const Linear& linear, Matrix<const T> x, Matrix<const T> grad_y, Matrix<T> grad_x,
                      bool needs_grad_x);
  // x as the adapter of (layer, kind) sees it.
  Matrix<const T> Dropped(const Pass& pass, const Linear& linear, LinearKind kind, Matrix<const T> x);
  void MultiplyByDropoutMask(const LoraDropout& dropout, const Linear& linear, LinearKind kind, Matrix<T> x);
  Buffer<T> GatherHeadInput(Plan* plan, std::int64_t num_head_rows, const Sum* hidden);

  const ModelConfig config_;
  const NetworkWeights<T> weights_;
  Backend backend_;
  std::optional<Kept> kept_;
};

}  // namespace tandem
