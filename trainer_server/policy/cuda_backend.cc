#include "trainer_server/policy/cuda_backend.h"

#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <map>
#include <utility>

#include "common/base/log.h"
#include "common/gpu/cuda_status.h"
#include "common/torch/arena_allocator.h"
#include "common/torch/check_status.h"
#include "kernels/embedding/embedding.h"
#include "kernels/kv_cache/kv_cache.h"
#include "kernels/rms_norm/rms_norm.h"
#include "kernels/rope/rope.h"
#include "kernels/row_ops/row_ops.h"
#include "kernels/swiglu/swiglu.h"
#include "kernels/token_logprob/token_logprob.h"
#include "trainer_server/policy/device_arrays.h"
#include "trainer_server/policy/flash_attention.h"

namespace tandem {
namespace {

void CheckCuda(cudaError_t error, const char* what) { CheckStatus(CudaToStatus(error, what)); }

template <typename T>
HeadLogitTransform TransformOf(const LinearHead<T>& head) {
  return {.temperature = static_cast<float>(head.temperature),
          .logit_scale = static_cast<float>(head.logit_scale),
          .softcap = static_cast<float>(head.softcap)};
}

// The arrays of PackedRows on the host.
struct RowRanges {
  std::vector<std::int32_t> prompt_begin, prompt_end, own_begin, own_end, group, readers_begin, readers;

  explicit RowRanges(const MicroBatch& batch) {
    const std::size_t num_rows = batch.token_ids.size();
    for (std::vector<std::int32_t>* array : {&prompt_begin, &prompt_end}) array->assign(num_rows, 0);
    for (std::vector<std::int32_t>* array : {&own_begin, &own_end, &group}) array->assign(num_rows, -1);
    std::map<std::pair<std::int32_t, std::int32_t>, std::size_t> group_of_prompt;
    std::vector<std::vector<std::int32_t>> readers_of_group;
    for (const PackedCompletion& completion : batch.completions) {
      const auto [place, is_new] =
          group_of_prompt.try_emplace({completion.prompt_begin, completion.prompt_end}, readers_of_group.size());
      if (is_new) {
        readers_of_group.emplace_back();
        Take(completion.prompt_begin, completion.prompt_end, static_cast<std::int32_t>(place->second), 0, 0);
      }
      Take(completion.begin, completion.end, -1, completion.prompt_begin, completion.prompt_end);
      if (completion.begin < completion.end) {
        readers_of_group[place->second].insert(readers_of_group[place->second].end(), {completion.begin, completion.end});
      }
    }
    for (const std::vector<std::int32_t>& ranges : readers_of_group) {
      readers_begin.push_back(static_cast<std::int32_t>(readers.size() / 2));
      readers.insert(readers.end(), ranges.begin(), ranges.end());
    }
    readers_begin.push_back(static_cast<std::int32_t>(readers.size() / 2));
  }

 private:
  void Take(std::int32_t begin, std::int32_t end, std::int32_t of_group, std::int32_t first_seen, std::int32_t last_seen) {
    for (std::size_t row = static_cast<std::size_t>(begin); row < static_cast<std::size_t>(end); ++row) {
      TORCH_CHECK(own_begin[row] < 0, "row ", row, " belongs to two sequences");
      own_begin[row] = begin;
      own_end[row] = end;
      group[row] = of_group;
      prompt_begin[row] = first_seen;
      prompt_end[row] = last_seen;
    }
  }
};

}  // namespace

template <typename T>
void CudaBackend<T>::Fence() {
  CheckStatus(stream_->Synchronize());
}

template <typename T>
std::unique_ptr<typename CudaBackend<T>::Plan> CudaBackend<T>::MakePlan(const MicroBatch& batch) {
  auto plan = std::make_unique<Plan>();
  plan->num_rows = static_cast<std::int64_t>(batch.token_ids.size());
  plan->num_head_rows = static_cast<std::int64_t>(batch.head_rows.size());
  std::map<std::int64_t, std::vector<std::size_t>> members_of_row;
  for (std::size_t n = 0; n < batch.head_rows.size(); ++n) members_of_row[batch.head_rows[n]].push_back(n);
  std::vector<std::int64_t> hidden_rows, offsets = {0}, members;
  for (const auto& [row, head_rows] : members_of_row) {
    hidden_rows.push_back(row);
    members.insert(members.end(), head_rows.begin(), head_rows.end());
    offsets.push_back(static_cast<std::int64_t>(members.size()));
  }
  plan->num_hidden_rows = static_cast<std::int64_t>(hidden_rows.size());
  const RowRanges ranges(batch);
  PackedRows& packed = plan->packed_rows;
  packed.num_rows = plan->num_rows;
  DeviceArrays<std::int32_t> arrays;
  arrays.Add(&plan->token_ids, batch.token_ids);
  arrays.Add(&plan->positions, batch.positions);
  arrays.Add(&plan->head_rows, batch.head_rows);
  arrays.Add(&plan->targets, batch.head_targets);
  arrays.Add(&plan->hidden_rows, hidden_rows);
  arrays.Add(&plan->head_offsets, offsets);
  arrays.Add(&plan->head_members, members);
  arrays.Add(&packed.prompt_begin, ranges.prompt_begin);
  arrays.Add(&packed.prompt_end, ranges.prompt_end);
  arrays.Add(&packed.own_begin, ranges.own_begin);
  arrays.Add(&packed.own_end, ranges.own_end);
  arrays.Add(&packed.group, ranges.group);
  arrays.Add(&packed.readers_begin, ranges.readers_begin);
  arrays.Add(&packed.readers, ranges.readers);
  plan->indices = arrays.Upload(stream_->handle());

  if constexpr (kDType == DType::kBf16) plan->fused_attention = MakeFusedAttention(batch);
  if (kv_scales_.has_value()) {
    const absl::StatusOr<bool> are_set = kv_scales_->AreSet();
    CheckStatus(are_set.status());
    plan->rounds_kv = *are_set;
    if (*are_set && !is_rounding_logged_) {
      is_rounding_logged_ = true;
      TANDEM_LOG(kInfo, "policy", "keys and values are rounded to fp8, as in the rollout server's KV cache");
    }
  }
  const std::int64_t num_positions = *std::max_element(batch.positions.begin(), batch.positions.end()) + 1;
  rope_.Ensure(num_positions);
  const auto table_size = static_cast<std::size_t>(num_positions * (config_.head_dim / 2));
  plan->cosines = Upload(std::span<const float>(rope_.cosines(0), table_size), stream_->handle());
  plan->sines = Upload(std::span<const float>(rope_.sines(0), table_size), stream_->handle());
  return plan;
}

template <typename T>
void CudaBackend<T>::CopyBytes(void* to, const void* from, std::size_t size) {
  CheckCuda(cudaMemcpyAsync(to, from, size, cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream_->handle())), "copy");
}

template <typename T>
std::unique_ptr<typename CudaBackend<T>::LayerInputs> CudaBackend<T>::KeepLayerInputs(PolicyPass pass) {
  pass.logit_chunk = head_.row_tile;
  const PolicyMemory memory = PlanPolicyMemory(config_, format_, attention_, pass);
  // Of the working memory, the pass's indices and adapter are used already.
  const ArenaUse arena = CurrentArenaUse(Device::kCuda);
  const std::uint64_t room_bytes = arena.used_bytes + arena.largest_free_bytes;
  const std::uint64_t spare_bytes = room_bytes - std::min(room_bytes, memory.working_bytes);
  const KeptLayers kept = ChooseKeptLayers(memory, config_.num_layers, spare_bytes, host_limit_bytes_);
  TORCH_CHECK_WITH(OutOfMemoryError, kept.host_bytes <= host_limit_bytes_, "layer inputs of ", pass.rows,
                   " rows: ", kept.host_bytes, " bytes do not stay on the device, and host memory may take ", host_limit_bytes_);
  CheckStatus(layer_input_host_->Reserve(kept.host_bytes, host_limit_bytes_));
  last_pass_ = {kept.num_slots, kept.keeps_attention, kept.host_bytes};
  const typename LayerInputs::Shape shape{.num_layers = config_.num_layers,
                                          .num_rows = pass.rows,
                                          .width = d(),
                                          .attention_width = kept.keeps_attention ? config_.q_size() : 0,
                                          .num_heads = config_.num_heads};
  TORCH_CHECK(shape.slot_bytes() == kept.slot_bytes, "a layer's slot of ", shape.slot_bytes(), " bytes, planned ",
              kept.slot_bytes);
  return std::make_unique<LayerInputs>(shape, kept.num_slots, layer_input_host_.get(), stream_, copy_stream_.get(), clock_);
}

template <typename T>
void CudaBackend<T>::Round(const Sum* from, T* to, std::int64_t count) {
  if constexpr (kDType == DType::kFp32) {
    CopyBytes(to, from, static_cast<std::size_t>(count) * sizeof(T));
  } else {
    CheckStatus(ConvertToBf16({.input = from, .output = to, .count = count}, stream_->handle()));
  }
}

template <typename T>
void CudaBackend<T>::Widen(const T* from, Sum* to, std::int64_t count) {
  if constexpr (kDType == DType::kFp32) {
    CopyBytes(to, from, static_cast<std::size_t>(count) * sizeof(T));
  } else {
    CheckStatus(ConvertToFp32({.input = from, .output = to, .count = count}, stream_->handle()));
  }
}

template <typename T>
void CudaBackend<T>::Zero(Sum* to, std::int64_t count) {
  CheckCuda(cudaMemsetAsync(to, 0, static_cast<std::size_t>(count) * sizeof(Sum), static_cast<cudaStream_t>(stream_->handle())),
            "memset");
}

template <typename T>
Matrix<const T> CudaBackend<T>::ToElements(Matrix<const Sum> x, Matrix<T> scratch) {
  if constexpr (kDType == DType::kFp32) {
    return x;
  } else {
    CheckStatus(ConvertToBf16({.input = x.data, .output = scratch.data, .count = x.rows * x.columns}, stream_->handle()));
    return scratch;
  }
}

template <typename T>
Matrix<const T> CudaBackend<T>::Values(const LinearWeight<T>& weight, std::int64_t outputs, std::int64_t inputs, T* scratch) {
  if (!weight.codes.has_value()) return {weight.values, outputs, inputs};
  TORCH_CHECK(kDType == DType::kBf16, "weights in codes are multiplied with in bf16");
  CheckStatus(Dequantize(*weight.codes, scratch, Device::kCuda, stream_->handle()));
  return {scratch, outputs, inputs};
}

template <typename T>
void CudaBackend<T>::Embed(Plan* plan, const T* embedding, Sum* hidden) {
  CheckStatus(Embedding({.dtype = kDType,
                         .table = embedding,
                         .token_ids = static_cast<const std::uint32_t*>(static_cast<const void*>(plan->token_ids)),
                         .output = hidden,
                         .num_rows = plan->num_rows,
                         .width = d()},
                        Device::kCuda, stream_->handle()));
}

template <typename T>
void CudaBackend<T>::Norm(const Sum* x, const T* weight, T* y, std::int64_t rows) {
  RmsNormParams params;
  params.dtype = kDType;
  params.input = x;
  params.weight = weight;
  params.output = y;
  params.num_rows = rows;
  params.width = d();
  params.epsilon = config_.rms_norm_epsilon;
  CheckStatus(RmsNorm(params, Device::kCuda, stream_->handle()));
}

template <typename T>
void CudaBackend<T>::NormBackward(const Sum* x, const T* weight, const T* grad_y, Sum* grad_x, std::int64_t rows) {
  RmsNormBackwardParams params;
  params.dtype = kDType;
  params.input = x;
  params.weight = weight;
  params.grad_output = grad_y;
  params.grad_input = grad_x;
  params.num_rows = rows;
  params.width = d();
  params.epsilon = config_.rms_norm_epsilon;
  CheckStatus(RmsNormBackward(params, Device::kCuda, stream_->handle()));
}

template <typename T>
void CudaBackend<T>::Run(const MatrixView& a, const MatrixView& b, const MatrixView& c, double alpha, double beta) {
  CheckStatus(gemm_->Run({.a = a, .b = b, .c = c, .alpha = static_cast<float>(alpha), .beta = static_cast<float>(beta)},
                         stream_->handle()));
}

template <typename T>
void CudaBackend<T>::AddProduct(Matrix<const T> a, Matrix<const T> b, Matrix<Sum> c, double alpha) {
  Run(View(a), View(b), View(c), alpha, 1);
}

template <typename T>
void CudaBackend<T>::Swiglu(const Sum* gate_up, T* activated, std::int64_t rows) {
  CheckStatus(tandem::Swiglu({.dtype = kDType, .gate_up = gate_up, .output = activated, .num_rows = rows, .width = f()},
                             Device::kCuda, stream_->handle()));
}

template <typename T>
void CudaBackend<T>::SwigluBackward(T* gate_up, const T* grad_activated, T* activated, std::int64_t rows) {
  CheckStatus(tandem::SwigluBackward({.dtype = kDType,
                                      .gate_up = gate_up,
                                      .grad_output = grad_activated,
                                      .grad_gate_up = gate_up,
                                      .output = activated,
                                      .num_rows = rows,
                                      .width = f()},
                                     Device::kCuda, stream_->handle()));
}

template <typename T>
void CudaBackend<T>::FinishQkv(Plan* plan, const AfterQkv& weights, std::int64_t first_row, std::int64_t rows, const Sum* product,
                               T* qkv, T* unnormed) {
  const std::int64_t q = config_.q_size(), kv = config_.kv_size(), width = q + 2 * kv;
  // Rows for pages.
  CheckStatus(RopeAndCache({.dtype = kDType,
                            .qkv = product,
                            .queries = qkv,
                            .query_row_stride = width,
                            .unnormed = weights.q_norm != nullptr ? unnormed : nullptr,
                            .bias = weights.bias,
                            .q_norm = weights.q_norm,
                            .k_norm = weights.k_norm,
                            .epsilon = config_.rms_norm_epsilon,
                            .num_rows = rows,
                            .num_heads = config_.num_heads,
                            .num_kv_heads = config_.num_kv_heads,
                            .head_dim = config_.head_dim,
                            .positions = plan->positions + first_row,
                            .cosines = plan->cosines.data(),
                            .sines = plan->sines.data(),
                            .keys = qkv + q,
                            .values = qkv + q + kv,
                            .page_stride = width,
                            .page_tokens = 1,
                            .kv_scales = plan->rounds_kv ? weights.kv_scales : nullptr},
                           Device::kCuda, stream_->handle()));
}

template <typename T>
void CudaBackend<T>::NormHeadsBackward(const Plan& plan, const T* weight, const T* unnormed, T* grad, std::int64_t num_heads) {
  CheckStatus(tandem::NormHeadsBackward({.dtype = kDType,
                                         .grad = grad,
                                         .row_stride = config_.q_size() + 2 * config_.kv_size(),
                                         .unnormed = unnormed,
                                         .unnormed_stride = config_.q_size() + config_.kv_size(),
                                         .weight = weight,
                                         .num_rows = plan.num_rows,
                                         .num_heads = num_heads,
                                         .head_dim = config_.head_dim,
                                         .epsilon = config_.rms_norm_epsilon},
                                        stream_->handle()));
}

template <typename T>
void CudaBackend<T>::FinishQkvBackward(Plan* plan, const AfterQkv& weights, const T* unnormed, T* grad_qkv) {
  const std::int64_t q = config_.q_size();
  CheckStatus(Rope({.dtype = kDType,
                    .x = grad_qkv,
                    .num_rows = plan->num_rows,
                    .row_stride = q + 2 * config_.kv_size(),
                    .num_heads = config_.num_heads + config_.num_kv_heads,
                    .head_dim = config_.head_dim,
                    .positions = plan->positions,
                    .cosines = plan->cosines.data(),
                    .sines = plan->sines.data(),
                    .sign = -1},
                   Device::kCuda, stream_->handle()));
  if (weights.q_norm == nullptr) return;
  NormHeadsBackward(*plan, weights.q_norm, unnormed, grad_qkv, config_.num_heads);
  NormHeadsBackward(*plan, weights.k_norm, unnormed + q, grad_qkv + q, config_.num_kv_heads);
}

template <typename T>
std::unique_ptr<FusedAttention> CudaBackend<T>::MakeFusedAttention(const MicroBatch& batch) {
  const AttentionRows rows(batch);
  const AttentionKernel kernel = ChooseAttention(config_, format_, attention_);
  if (!rows.is_served || kernel == AttentionKernel::kOwn) return nullptr;
  if (kernel == AttentionKernel::kCudnn && CudnnAttention::Serves(config_)) {
    if (cudnn_graphs_ == nullptr) cudnn_graphs_ = std::make_unique<CudnnGraphs>(config_);
    return std::make_unique<CudnnAttention>(config_, rows, attention_.scratch_limit_bytes, cudnn_graphs_.get(),
                                            stream_->handle());
  }
  if (!FlashAttention::Serves(config_)) return nullptr;
  return std::make_unique<FlashAttention>(config_, rows, stream_->handle());
}

template <typename T>
PackedAttentionParams CudaBackend<T>::Attention(const Plan& plan, const T* qkv, T* output, Sum* lse) const {
  return {.dtype = kDType,
          .rows = plan.packed_rows,
          .num_heads = config_.num_heads,
          .num_kv_heads = config_.num_kv_heads,
          .head_dim = config_.head_dim,
          .qkv = qkv,
          .output = output,
          .lse = lse};
}

template <typename T>
void CudaBackend<T>::AttentionForward(Plan* plan, const T* qkv, T* output, Sum* lse) {
  if (plan->fused_attention != nullptr) {
    plan->fused_attention->Forward(qkv, output, lse);
    return;
  }
  CheckStatus(PackedAttentionForward(Attention(*plan, qkv, output, lse), stream_->handle()));
}

template <typename T>
void CudaBackend<T>::AttentionBackward(Plan* plan, const T* qkv, const T* output, const Sum* lse, const T* grad_output,
                                       T* grad_qkv) {
  if (plan->fused_attention != nullptr) {
    plan->fused_attention->Backward(qkv, output, lse, grad_output, grad_qkv);
    return;
  }
  const Buffer<float> delta(plan->num_rows * config_.num_heads);
  CheckStatus(PackedAttentionBackward({.forward = Attention(*plan, qkv, const_cast<T*>(output), const_cast<Sum*>(lse)),
                                       .grad_output = grad_output,
                                       .delta = delta.data(),
                                       .grad_qkv = grad_qkv},
                                      stream_->handle()));
}

template <typename T>
void CudaBackend<T>::Dropout(T* x, std::int64_t rows, std::int64_t width, std::int64_t first_row, std::uint64_t seed,
                             double probability) {
  CheckStatus(tandem::Dropout({.dtype = kDType,
                               .x = x,
                               .num_rows = rows,
                               .width = width,
                               .first_row = first_row,
                               .seed = seed,
                               .probability = probability},
                              stream_->handle()));
}

template <typename T>
void CudaBackend<T>::Add(T* y, const T* x, std::int64_t count) {
  CheckStatus(tandem::Add({.dtype = kDType, .y = y, .x = x, .count = count}, stream_->handle()));
}

template <typename T>
void CudaBackend<T>::NormHeadRows(Plan* plan, const Sum* hidden, const T* weight, T* head_input) {
  RmsNormParams params;
  params.dtype = kDType;
  params.input = hidden;
  params.weight = weight;
  params.output = head_input;
  params.rows = plan->head_rows;
  params.num_rows = plan->num_head_rows;
  params.width = d();
  params.epsilon = config_.rms_norm_epsilon;
  CheckStatus(RmsNorm(params, Device::kCuda, stream_->handle()));
}

template <typename T>
LinearLogprobs CudaBackend<T>::HeadForward(Plan* plan, const T* head_input, T* unit_gradient) {
  const std::int64_t num_rows = plan->num_head_rows;
  const HeadTile tile = HeadTileOf(num_rows);
  const bool is_separate = kDType != DType::kFp32 && unit_gradient != nullptr;
  const Buffer<float> products(tile.rows * tile.columns), pulled(unit_gradient == nullptr ? 0 : tile.rows * d());
  const Buffer<T> separate(is_separate ? tile.rows * tile.columns : 0);
  const Buffer<TokenLogprobState> states(tile.rows);
  const Buffer<double> results(3 * num_rows);  // log-probs, log-sum-exps, entropies
  T* const gradient = unit_gradient == nullptr ? nullptr
                      : is_separate            ? separate.data()
                                               : static_cast<T*>(static_cast<void*>(products.data()));
  for (std::int64_t first = 0; first < num_rows; first += tile.rows) {
    const std::int64_t rows = std::min(tile.rows, num_rows - first);
    for (std::int64_t column = 0; column < head_.vocab_size; column += tile.columns) {
      const std::int64_t columns = std::min(tile.columns, head_.vocab_size - column);
      const Matrix<const T> weight(head_.weight + column * d(), columns, d());
      Run(View(Matrix<const T>(head_input + first * d(), rows, d())), View(weight.Transposed()),
          View(Matrix<float>(products.data(), rows, columns)), 1, 0);
      CheckStatus(TokenLogprobTile({.products = products.data(),
                                    .num_rows = rows,
                                    .num_columns = columns,
                                    .first_column = column,
                                    .targets = plan->targets + first,
                                    .states = states.data(),
                                    .transform = TransformOf(head_),
                                    .gradient_dtype = kDType,
                                    .gradient = gradient,
                                    .pulled = pulled.data(),
                                    .width = d()},
                                   stream_->handle()));
      if (gradient != nullptr) {
        Run(View(Matrix<const T>(gradient, rows, columns)), View(weight), View(Matrix<float>(pulled.data(), rows, d())), 1,
            column == 0 ? 0 : 1);
      }
    }
    CheckStatus(TokenLogprobFinish({.num_rows = rows,
                                    .targets = plan->targets + first,
                                    .states = states.data(),
                                    .transform = TransformOf(head_),
                                    .logprobs = results.data() + first,
                                    .lse = results.data() + num_rows + first,
                                    .entropies = results.data() + 2 * num_rows + first,
                                    .dtype = kDType,
                                    .pulled = gradient == nullptr ? nullptr : pulled.data(),
                                    .weight = head_.weight,
                                    .unit_gradient = gradient == nullptr ? nullptr : unit_gradient + first * d(),
                                    .width = d()},
                                   stream_->handle()));
  }
  LinearLogprobs logprobs;
  const double* source = results.data();
  for (std::vector<double>* values : {&logprobs.logprobs, &logprobs.lse, &logprobs.entropies}) {
    values->resize(static_cast<std::size_t>(num_rows));
    CheckCuda(cudaMemcpyAsync(values->data(), source, values->size() * sizeof(double), cudaMemcpyDeviceToHost,
                              static_cast<cudaStream_t>(stream_->handle())),
              "fetching log-probs");
    source += num_rows;
  }
  Fence();
  return logprobs;
}

template <typename T>
void CudaBackend<T>::HeadBackward(Plan* plan, const T* head_input, const LinearLogprobs& forward,
                                  std::span<const double> grad_logprobs, std::span<const double> grad_entropies, T* grad_head) {
  const std::int64_t num_rows = plan->num_head_rows;
  const HeadTile tile = HeadTileOf(num_rows);
  constexpr bool kIsSeparate = kDType != DType::kFp32;
  const Buffer<float> products(tile.rows * tile.columns), sum(tile.rows * d());
  const Buffer<T> separate(kIsSeparate ? tile.rows * tile.columns : 0);
  T* const gradient = kIsSeparate ? separate.data() : static_cast<T*>(static_cast<void*>(products.data()));
  const Buffer<double> logprobs = Upload(std::span<const double>(forward.logprobs), stream_->handle()),
                       lse = Upload(std::span<const double>(forward.lse), stream_->handle()),
                       entropies = Upload(std::span<const double>(forward.entropies), stream_->handle()),
                       g = Upload(grad_logprobs, stream_->handle()), e = Upload(grad_entropies, stream_->handle());
  for (std::int64_t first = 0; first < num_rows; first += tile.rows) {
    const std::int64_t rows = std::min(tile.rows, num_rows - first);
    for (std::int64_t column = 0; column < head_.vocab_size; column += tile.columns) {
      const std::int64_t columns = std::min(tile.columns, head_.vocab_size - column);
      const Matrix<const T> weight(head_.weight + column * d(), columns, d());
      Run(View(Matrix<const T>(head_input + first * d(), rows, d())), View(weight.Transposed()),
          View(Matrix<float>(products.data(), rows, columns)), 1, 0);
      CheckStatus(TokenLogprobGradient({.products = products.data(),
                                        .num_rows = rows,
                                        .num_columns = columns,
                                        .first_column = column,
                                        .targets = plan->targets + first,
                                        .transform = TransformOf(head_),
                                        .logprobs = logprobs.data() + first,
                                        .lse = lse.data() + first,
                                        .entropies = entropies.data() + first,
                                        .grad_logprobs = g.data() + first,
                                        .grad_entropies = grad_entropies.empty() ? nullptr : e.data() + first,
                                        .gradient_dtype = kDType,
                                        .gradient = gradient},
                                       stream_->handle()));
      Run(View(Matrix<const T>(gradient, rows, columns)), View(weight), View(Matrix<float>(sum.data(), rows, d())), 1,
          column == 0 ? 0 : 1);
    }
    if constexpr (kIsSeparate) {
      CheckStatus(
          ConvertToBf16({.input = sum.data(), .output = grad_head + first * d(), .count = rows * d()}, stream_->handle()));
    } else {
      Copy(grad_head + first * d(), sum.data(), rows * d());
    }
  }
}

template <typename T>
void CudaBackend<T>::AddHeadGradient(Plan* plan, const Sum* hidden, const T* weight, T* grad_head,
                                     std::span<const double> factors, Sum* grad) {
  const std::vector<float> rounded(factors.begin(), factors.end());
  const Buffer<float> on_device = Upload(std::span<const float>(rounded), stream_->handle());
  const Buffer<T> summed(plan->num_hidden_rows * d());
  CheckStatus(SumRows({.dtype = kDType,
                       .input = grad_head,
                       .factors = factors.empty() ? nullptr : on_device.data(),
                       .offsets = plan->head_offsets,
                       .members = plan->head_members,
                       .output = summed.data(),
                       .num_rows = plan->num_hidden_rows,
                       .width = d()},
                      stream_->handle()));
  RmsNormBackwardParams params;
  params.dtype = kDType;
  params.input = hidden;
  params.weight = weight;
  params.grad_output = summed.data();
  params.grad_input = grad;
  params.rows = plan->hidden_rows;
  params.num_rows = plan->num_hidden_rows;
  params.width = d();
  params.epsilon = config_.rms_norm_epsilon;
  CheckStatus(RmsNormBackward(params, Device::kCuda, stream_->handle()));
}

template <typename T>
typename CudaBackend<T>::AdapterValues CudaBackend<T>::Adapter(std::span<const std::byte> slot) {
  const float* const masters = static_cast<const float*>(static_cast<const void*>(slot.data()));
  AdapterValues adapter;
  if constexpr (kDType == DType::kFp32) {
    adapter.values = masters;
  } else {
    const auto count = static_cast<std::int64_t>(slot.size() / sizeof(float));
    adapter.copy = Buffer<T>(count);
    CheckStatus(ConvertToBf16({.input = masters, .output = adapter.copy.data(), .count = count}, stream_->handle()));
    adapter.values = adapter.copy.data();
  }
  return adapter;
}

template class CudaBackend<float>;
template class CudaBackend<Bf16>;

}  // namespace tandem
