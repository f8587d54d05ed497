// The arithmetic of PolicyNetwork on the GPU: our kernels and cuBLASLt, put into one stream. Operations are CpuBackend's, and
// only enqueue; the log-probs of HeadForward are fetched, which waits. Pointers are device memory; buffers come from the
// ArenaScope of the GPU. Confined to one thread; throws c10::Error (memory: c10::OutOfMemoryError).
//
// Element is Bf16: weights, activations and their gradients are bf16, every sum is fp32 and is rounded once at its end. Or float,
// all in fp32: the mode that gradients are checked with. The residual stream and its gradient, adapter gradients and
// log-sum-exps are fp32 in both.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/gpu/dtype.h"
#include "common/gpu/stream.h"
#include "common/model/kv_scale_table.h"
#include "common/torch/buffer.h"
#include "common/torch/matrix.h"
#include "common/torch/rope_table.h"
#include "kernels/base/elements.h"
#include "kernels/gemm/gemm.h"
#include "kernels/packed_attention/packed_attention.h"
#include "kernels/row_ops/row_ops.h"
#include "trainer_server/batch/micro_batch.h"
#include "trainer_server/policy/cuda_layer_inputs.h"
#include "trainer_server/policy/cudnn_attention.h"
#include "trainer_server/policy/fused_attention.h"
#include "trainer_server/policy/linear_logprob.h"
#include "trainer_server/policy/network_weights.h"
#include "trainer_server/policy/policy_memory.h"
#include "trainer_server/policy/policy_model.h"

namespace tandem {

template <typename T>
class CudaBackend {
 public:
  using Element = T;
  using Sum = float;
  template <typename U>
  using Buffer = tandem::Buffer<U, Device::kCuda>;
  using AfterQkv = typename NetworkWeights<T>::AfterQkv;
  using LayerInputs = CudaLayerInputs<T>;
  static constexpr std::int64_t kTileRows = kCudaTileRows;

  struct Plan {
    std::int64_t num_rows = 0, num_head_rows = 0, num_hidden_rows = 0;  // hidden rows: those that head rows read, each once
    Buffer<std::int32_t> indices;                                       // all arrays below but the tables
    const std::int32_t* token_ids = nullptr;                            // [num_rows]
    const std::int32_t* positions = nullptr;                            // [num_rows]
    const std::int32_t* head_rows = nullptr;                            // [num_head_rows]
    const std::int32_t* targets = nullptr;                              // [num_head_rows]
    const std::int32_t* hidden_rows = nullptr;                          // [num_hidden_rows], ascending
    const std::int32_t* head_offsets = nullptr;  // [num_hidden_rows + 1]: head rows of each hidden row, in head_members
    const std::int32_t* head_members = nullptr;  // [num_head_rows]
    PackedRows packed_rows;
    Buffer<float> cosines, sines;                     // [positions, head_dim / 2]
    std::unique_ptr<FusedAttention> fused_attention;  // null: the own kernel
    bool rounds_kv = false;                           // keys and values, as the rollout server's cache in fp8 does
  };

  // `head`: weight on the device; its row tile is an upper bound, 0: chosen. `format`: of the base. What `device` names
  // outlives the backend; `copy_stream` carries layer inputs to the host and back. `kv_scales`: of the layers' AfterQkv, looked
  // at by each MakePlan.
  CudaBackend(const ModelConfig& config, StorageFormat format, const LinearHead<T>& head, const PolicyDevice& device,
              std::unique_ptr<Stream> copy_stream, std::optional<KvScaleTable> kv_scales = std::nullopt)
      : config_(config),
        format_(format),
        head_(head),
        stream_(device.stream),
        copy_stream_(std::move(copy_stream)),
        gemm_(device.gemm),
        host_limit_bytes_(device.host_limit_bytes),
        clock_(device.clock),
        kv_scales_(std::move(kv_scales)),
        attention_(device.attention),
        rope_(config),
        layer_input_host_(std::make_unique<LayerInputHost>()) {}

  void Enter(const char* stage) {
    if (clock_ != nullptr) clock_->Enter(stage, stream_->handle());
  }
  std::unique_ptr<Plan> MakePlan(const MicroBatch& batch);
  // What is kept of the last layers, as many as the arena has room for beside the pass, stays on the device.
  std::unique_ptr<LayerInputs> KeepLayerInputs(PolicyPass pass);
  PassMemory last_pass() const { return last_pass_; }
  void Copy(T* to, const T* from, std::int64_t count) { CopyBytes(to, from, static_cast<std::size_t>(count) * sizeof(T)); }
  void Round(const Sum* from, T* to, std::int64_t count);
  void Widen(const T* from, Sum* to, std::int64_t count);
  void Zero(Sum* to, std::int64_t count);
  Matrix<const T> ToElements(Matrix<const Sum> x, Matrix<T> scratch);
  Matrix<const T> Values(const LinearWeight<T>& weight, std::int64_t outputs, std::int64_t inputs, T* scratch);
  void Embed(Plan* plan, const T* embedding, Sum* hidden);
  void Norm(const Sum* x, const T* weight, T* y, std::int64_t rows);
  void NormBackward(const Sum* x, const T* weight, const T* grad_y, Sum* grad_x, std::int64_t rows);
  template <typename C>
  void Multiply(Matrix<const T> a, Matrix<const T> b, Matrix<C> c, double alpha = 1, double beta = 0) {
    Run(View(a), View(b), View(c), alpha, beta);
  }
  void AddProduct(Matrix<const T> a, Matrix<const T> b, Matrix<Sum> c, double alpha);
  void Swiglu(const Sum* gate_up, T* activated, std::int64_t rows);
  void SwigluBackward(T* gate_up, const T* grad_activated, T* activated, std::int64_t rows);
  // Keys and values that are rounded to fp8 pass their gradients straight through, saturated ones too.
  void FinishQkv(Plan* plan, const AfterQkv& weights, std::int64_t first_row, std::int64_t rows, const Sum* product, T* qkv,
                 T* unnormed);
  void FinishQkvBackward(Plan* plan, const AfterQkv& weights, const T* unnormed, T* grad_qkv);
  void AttentionForward(Plan* plan, const T* qkv, T* output, Sum* lse);
  void AttentionBackward(Plan* plan, const T* qkv, const T* output, const Sum* lse, const T* grad_output, T* grad_qkv);
  void Dropout(T* x, std::int64_t rows, std::int64_t width, std::int64_t first_row, std::uint64_t seed, double probability);
  void Add(T* y, const T* x, std::int64_t count);
  void NormHeadRows(Plan* plan, const Sum* hidden, const T* weight, T* head_input);
  LinearLogprobs HeadForward(Plan* plan, const T* head_input, T* unit_gradient);
  void HeadBackward(Plan* plan, const T* head_input, const LinearLogprobs& forward, std::span<const double> grad_logprobs,
                    std::span<const double> grad_entropies, T* grad_head);
  void AddHeadGradient(Plan* plan, const Sum* hidden, const T* weight, T* grad_head, std::span<const double> factors, Sum* grad);

  // An adapter's fp32 matrices as elements: themselves in fp32, else a rounded copy.
  struct AdapterValues {
    Buffer<T> copy;
    const T* values = nullptr;
  };
  AdapterValues Adapter(std::span<const std::byte> slot);
  // Until everything so far is done. Throws where a kernel failed.
  void Fence();

 private:
  static constexpr DType kDType = std::is_same_v<T, float> ? DType::kFp32 : DType::kBf16;

  std::int64_t d() const { return config_.hidden_size; }
  std::int64_t f() const { return config_.intermediate_size; }
  template <typename U>
  static MatrixView View(Matrix<U> matrix) {
    return {.data = matrix.data,
            .dtype = std::is_same_v<std::remove_const_t<U>, float> ? DType::kFp32 : DType::kBf16,
            .rows = matrix.rows,
            .columns = matrix.columns,
            .row_stride = matrix.row_stride,
            .column_stride = matrix.column_stride};
  }
  void CopyBytes(void* to, const void* from, std::size_t size);
  void Run(const MatrixView& a, const MatrixView& b, const MatrixView& c, double alpha, double beta);
  void NormHeadsBackward(const Plan& plan, const T* weight, const T* unnormed, T* grad, std::int64_t num_heads);
  std::unique_ptr<FusedAttention> MakeFusedAttention(const MicroBatch& batch);
  PackedAttentionParams Attention(const Plan& plan, const T* qkv, T* output, Sum* lse) const;
  HeadTile HeadTileOf(std::int64_t num_head_rows) const {
    return ChooseHeadTile(config_, sizeof(T), head_.row_tile, num_head_rows);
  }

  ModelConfig config_;
  StorageFormat format_;
  LinearHead<T> head_;
  Stream* stream_;
  std::unique_ptr<Stream> copy_stream_;
  Gemm* gemm_;
  std::uint64_t host_limit_bytes_;
  StageClock* clock_;
  std::optional<KvScaleTable> kv_scales_;
  bool is_rounding_logged_ = false;
  AttentionOptions attention_;
  std::unique_ptr<CudnnGraphs> cudnn_graphs_;  // from the first micro-batch that cuDNN serves
  RopeTable<float> rope_;
  std::unique_ptr<LayerInputHost> layer_input_host_;
  PassMemory last_pass_;
};

}  // namespace tandem
