// The arithmetic of PolicyNetwork on the CPU: LibTorch's GEMM and the loops of common/torch/vector_ops.h, split among LibTorch's
// threads without changing a bit of the result. This class also tells what each operation of a backend does: CudaBackend has the
// same ones. Confined to one thread; throws c10::Error.
//
// T is float, or double for tests against finite differences.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "common/gpu/stage_clock.h"
#include "common/torch/buffer.h"
#include "common/torch/matrix.h"
#include "common/torch/rope_table.h"
#include "common/torch/vector_ops.h"
#include "trainer_server/batch/micro_batch.h"
#include "trainer_server/policy/layer_inputs.h"
#include "trainer_server/policy/linear_logprob.h"
#include "trainer_server/policy/network_weights.h"
#include "trainer_server/policy/packed_attention.h"
#include "trainer_server/policy/policy_memory.h"
#include "trainer_server/policy/policy_model.h"

namespace tandem {

template <typename T>
class CpuBackend {
 public:
  using Element = T;
  using Sum = T;
  template <typename U>
  using Buffer = tandem::Buffer<U>;
  using LayerInputs = HostLayerInputs<T>;
  static constexpr std::int64_t kTileRows = kCpuTileRows;

  // A micro-batch as the operations below want it.
  struct Plan {
    MicroBatch batch;
    PackedAttention<T> attention;
  };
  using AfterQkv = typename NetworkWeights<T>::AfterQkv;

  CpuBackend(const ModelConfig& config, const LinearHead<T>& head, StageClock* clock = nullptr)
      : config_(config), head_(head), clock_(clock), ops_(&vector_ops<T>()), rope_(config) {}

  // What follows belongs to `stage`, a literal, of the pass's time.
  void Enter(const char* stage) {
    if (clock_ != nullptr) clock_->Enter(stage, nullptr);
  }

  std::unique_ptr<Plan> MakePlan(const MicroBatch& batch);
  // Memory for the layer inputs of a micro-batch.
  std::unique_ptr<LayerInputs> KeepLayerInputs(const PolicyPass& pass) {
    return std::make_unique<LayerInputs>(config_.num_layers, pass.rows * d());
  }
  PassMemory last_pass() const { return {}; }  // what KeepLayerInputs chose
  void Copy(T* to, const T* from, std::int64_t count) { std::copy_n(from, count, to); }
  void Round(const Sum* from, T* to, std::int64_t count) { std::copy_n(from, count, to); }  // sums to elements
  void Widen(const T* from, Sum* to, std::int64_t count) { std::copy_n(from, count, to); }  // elements to sums
  void Zero(Sum* to, std::int64_t count) { std::fill_n(to, count, Sum{0}); }
  // Sums as the products below take them: x itself where they are elements, else rounded into `scratch`, of the same shape.
  Matrix<const T> ToElements(Matrix<const Sum> x, Matrix<T>) { return x; }
  // Rows of the embedding [vocab_size, d] by the plan's tokens.
  void Embed(Plan* plan, const T* embedding, Sum* hidden);
  void Norm(const Sum* x, const T* weight, T* y, std::int64_t rows);                                  // RMSNorm of rows of d
  void NormBackward(const Sum* x, const T* weight, const T* grad_y, Sum* grad_x, std::int64_t rows);  // grad_x: added to
  // A weight as the products below take it: its own memory, or values made of its codes in `scratch`.
  Matrix<const T> Values(const LinearWeight<T>& weight, std::int64_t outputs, std::int64_t inputs, T*) {
    return {weight.values, outputs, inputs};
  }
  // c = beta c + alpha a b; c: of T or Sum.
  void Multiply(Matrix<const T> a, Matrix<const T> b, Matrix<T> c, double alpha = 1, double beta = 0) {
    tandem::Multiply(a, b, c, alpha, beta);
  }
  // c += alpha a b, where c holds sums over rows.
  void AddProduct(Matrix<const T> a, Matrix<const T> b, Matrix<Sum> c, double alpha) { tandem::Multiply(a, b, c, alpha, 1); }
  // gate_up: [rows, 2 f]; activated: [rows, f].
  void Swiglu(const Sum* gate_up, T* activated, std::int64_t rows);
  // Makes `activated` anew; `gate_up` becomes its gradient.
  void SwigluBackward(T* gate_up, const T* grad_activated, T* activated, std::int64_t rows);
  // Bias, norms of q's and k's heads where the family has them, rotary embedding. `product` is qkv where T is Sum, else
  // elsewhere. `unnormed` (null: not kept): [rows, q + kv], q and k as they go into the norms. The three hold the plan's rows
  // from `first_row` on.
  void FinishQkv(Plan* plan, const AfterQkv& weights, std::int64_t first_row, std::int64_t rows, const Sum* product, T* qkv,
                 T* unnormed);
  // Turns the gradient of what FinishQkv made into that of what it was given. The bias is frozen.
  void FinishQkvBackward(Plan* plan, const AfterQkv& weights, const T* unnormed, T* grad_qkv);
  // See packed_attention.h.
  void AttentionForward(Plan* plan, const T* qkv, T* output, Sum* lse) { plan->attention.Forward(qkv, output, lse); }
  void AttentionBackward(Plan* plan, const T* qkv, const T* output, const Sum* lse, const T* grad_output, T* grad_qkv) {
    plan->attention.Backward(qkv, output, lse, grad_output, grad_qkv);
  }
  // x [rows, width] becomes 0 where the mask of (seed, first_row + row, column) says so, else x / (1 - probability).
  void Dropout(T* x, std::int64_t rows, std::int64_t width, std::int64_t first_row, std::uint64_t seed, double probability);
  void Add(T* y, const T* x, std::int64_t count);  // y += x
  // Norms of the plan's head rows of `hidden`, one after the other.
  void NormHeadRows(Plan* plan, const Sum* hidden, const T* weight, T* head_input);
  // See linear_logprob.h.
  LinearLogprobs HeadForward(Plan* plan, const T* head_input, T* unit_gradient) {
    return LinearLogprobForward<T>(head_, head_input, plan->batch.head_targets, unit_gradient);
  }
  void HeadBackward(Plan* plan, const T* head_input, const LinearLogprobs& forward, std::span<const double> grad_logprobs,
                    std::span<const double> grad_entropies, T* grad_head) {
    LinearLogprobBackward<T>(head_, head_input, plan->batch.head_targets, forward, grad_logprobs, grad_entropies, grad_head,
                             nullptr);
  }
  // Adds to `grad`, of rows of `hidden`, what factors[n] x grad_head row n (no factors: 1) gives through the norm of head row n.
  // Several head rows may share a hidden row (a prompt's last): they add up in order. `grad_head` is left undefined.
  void AddHeadGradient(Plan* plan, const Sum* hidden, const T* weight, T* grad_head, std::span<const double> factors, Sum* grad);

  // An adapter's fp32 matrices as elements.
  struct AdapterValues {
    const T* values = nullptr;
  };
  AdapterValues Adapter(std::span<const std::byte> slot) requires(sizeof(T) == sizeof(float)) {
    return {reinterpret_cast<const T*>(slot.data())};
  }
  void Fence() {}  // until everything so far is done

 private:
  std::int64_t d() const { return config_.hidden_size; }
  std::int64_t f() const { return config_.intermediate_size; }
  std::int64_t qkv_width() const { return config_.q_size() + 2 * config_.kv_size(); }
  T epsilon() const { return static_cast<T>(config_.rms_norm_epsilon); }
  void NormHeadsBackward(const T* x, const T* weight, std::int64_t heads, T* grad) const;

  ModelConfig config_;
  LinearHead<T> head_;
  StageClock* clock_;
  const VectorOps<T>* ops_;
  RopeTable<T> rope_;
};

}  // namespace tandem
