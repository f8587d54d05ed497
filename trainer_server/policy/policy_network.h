// The policy's structure: forward over a packed micro-batch that keeps layer inputs, rounded to elements, and attention's
// outputs where there is room; backward that recomputes one layer at a time. Base weights are frozen: no gradient of a dense
// weight is ever formed, and the down projection is not recomputed. Only attention sees all rows at once; everything else goes by
// tiles of rows (tiled MLP: Arctic Long Sequence Training, 2025, arXiv 2506.13996, section 3.3), so that what is live of a row
// beside the layer inputs is its residual gradient, q, k, v and the attention output with their gradients.
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
#include <type_traits>

#include "common/model/model_config.h"
#include "common/torch/matrix.h"
#include "trainer_server/batch/micro_batch.h"
#include "trainer_server/policy/layer_inputs.h"
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
  using LayerInputs = typename Backend::LayerInputs;
  using Lora = LoraSet<T, Sum>;

  PolicyNetwork(const ModelConfig& config, NetworkWeights<T> weights, Backend backend);

  // Log-probs of the batch's head rows; nothing is kept. `lora` null: the base.
  LinearLogprobs Score(const MicroBatch& batch, const Lora* lora);
  // The same, keeping what one Backward needs. `needs_entropy_gradient`: the two-pass head. `lora` must outlive Backward.
  LinearLogprobs Forward(const MicroBatch& batch, const Lora& lora, const LoraDropout& dropout, bool needs_entropy_gradient);
  // Adds to the gradients in `lora`. Frees what Forward kept. Requires: has_kept().
  void Backward(std::span<const double> grad_logprobs, std::span<const double> grad_entropies);
  bool has_kept() const { return pending_.has_value(); }
  std::size_t num_kept_head_rows() const { return pending_->logprobs.logprobs.size(); }
  bool keeps_entropy_gradient() const { return pending_->unit_gradient.size() == 0; }
  void DropKept() { pending_.reset(); }
  Backend& backend() { return backend_; }
  const Backend& backend() const { return backend_; }

 private:
  using Kept = KeptLayer<T, Sum>;
  struct Pending {  // between Forward and Backward
    std::unique_ptr<Plan> plan;
    const Lora* lora = nullptr;
    LoraDropout dropout;
    std::unique_ptr<LayerInputs> layer_inputs;
    // [num_rows, d]. What lives throughout is taken first: what is freed leaves one piece, whole.
    Buffer<Sum> grad;         // of the residual stream, from Backward on
    Buffer<Sum> hidden;       // before the final norm
    Buffer<T> head_input;     // [head rows, d]; two-pass head only
    Buffer<T> unit_gradient;  // [head rows, d]; one-pass head only
    LinearLogprobs logprobs;
  };
  struct Workspace;
  struct Tile;
  struct LayerValues;
  struct Pass {  // what all layers of one pass share
    Plan* plan;
    std::int64_t num_rows;
    const Lora* lora;  // null: none
    LoraDropout dropout;
    Workspace* workspace;
    bool is_backward = false;
  };
  struct Linear {  // one fused dense layer: its kinds lie side by side in y's columns
    int layer;
    Matrix<const T> weight;
    std::span<const LinearKind> kinds;
    std::int64_t first_row;  // of x in the micro-batch
  };
  static constexpr bool kHasSeparateSums = !std::is_same_v<T, Sum>;

  std::int64_t d() const { return config_.hidden_size; }
  std::int64_t f() const { return config_.intermediate_size; }
  std::int64_t qkv_width() const { return config_.q_size() + 2 * config_.kv_size(); }
  // Calls on_tile(first, rows) for each tile of the pass's rows.
  template <typename OnTile>
  static void ForEachTile(const Pass& pass, OnTile on_tile);
  // Makes values of the layer's codes in the workspace, once for all tiles.
  LayerValues ValuesOf(const Pass& pass, int layer);
  // Leaves in `hidden` what all layers make of the embedding; layer inputs go to `inputs` unless that is null.
  void ForwardLayers(const Pass& pass, Sum* hidden, LayerInputs* inputs);
  // rows_at(first, rows, scratch): the layer's input, in scratch [rows, d] where it has to be made. Leaves qkv in the workspace.
  template <typename RowsAt>
  void ProjectQkv(const Pass& pass, int layer, const LayerValues& values, RowsAt rows_at);
  // Computes attention into its place in `kept`, or in the workspace if it has none there; returns `kept` with it.
  Kept Attend(const Pass& pass, Kept kept);
  static Matrix<Sum> QkvProduct(const Tile& tile, Matrix<T> qkv);
  // x += the output projection of the attention's rows from `first` on.
  void AddAttention(const Pass& pass, const Tile& tile, int layer, const LayerValues& values, const T* attention,
                    std::int64_t first, Matrix<Sum> x);
  // hidden += output projection of attention; hidden += mlp(norm(hidden)).
  void ForwardMlp(const Pass& pass, int layer, const LayerValues& values, const T* attention, Sum* hidden);
  // `grad`: dL/d(layer output) in, dL/d(layer input) out.
  void BackwardLayer(const Pass& pass, int layer, const Kept& kept, Sum* grad);
  void BackwardMlp(const Pass& pass, int layer, const LayerValues& values, const Kept& kept, Sum* grad);
  void BackwardAttention(const Pass& pass, int layer, const LayerValues& values, const Kept& kept, Sum* grad);
  // Calls on_adapter(k, kind, pair, first column of y, end) for each of the linear's kinds that has an adapter.
  template <typename OnAdapter>
  void ForEachAdapter(const Pass& pass, const Linear& linear, OnAdapter on_adapter);
  // y = beta y + x W^T + adapters; y: of sums or elements.
  template <typename Y>
  void ForwardLinear(const Pass& pass, const Tile& tile, const Linear& linear, Matrix<const T> x, Matrix<Y> y, double beta);
  // grad_x = grad_y W + adapters' part (no data: not wanted); leaves in the tile what BackwardAdapters of the same linear needs.
  void BackwardInput(const Pass& pass, const Tile& tile, const Linear& linear, Matrix<const T> grad_y, Matrix<T> grad_x);
  // Adds the adapters' gradients.
  void BackwardAdapters(const Pass& pass, const Tile& tile, const Linear& linear, Matrix<const T> x, Matrix<const T> grad_y);
  // x as the adapter of (layer, kind) sees it.
  Matrix<const T> Dropped(const Pass& pass, const Tile& tile, const Linear& linear, LinearKind kind, Matrix<const T> x);
  void MultiplyByDropoutMask(const LoraDropout& dropout, const Linear& linear, LinearKind kind, Matrix<T> x);
  Buffer<T> GatherHeadInput(Plan* plan, std::int64_t num_head_rows, const Sum* hidden);

  const ModelConfig config_;
  const NetworkWeights<T> weights_;
  Backend backend_;
  std::optional<Pending> pending_;
};

}  // namespace tandem
