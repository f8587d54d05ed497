#include "trainer_server/policy/flash_attention.h"

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "common/torch/check_status.h"
#include "kernels/packed_attention/attention_parts.h"
#include "trainer_server/policy/device_arrays.h"

namespace tandem {
namespace {

constexpr std::int64_t kMaxHeadDim = 256;

// Its backward pass then adds in a fixed order.
void PrepareLibTorchOnce() {
  static std::once_flag once;
  std::call_once(once, [] {
    at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
    at::globalContext().setDeterministicFillUninitializedMemory(false);  // not a pass over memory that nobody reads
  });
}

at::TensorOptions On(at::ScalarType type) { return at::TensorOptions(type).device(c10::Device(c10::DeviceType::CUDA, 0)); }

// [rows, heads, head_dim] bf16 in rows of `row_stride` elements.
at::Tensor Heads(const void* data, std::int64_t rows, std::int64_t heads, std::int64_t head_dim, std::int64_t row_stride) {
  return at::from_blob(const_cast<void*>(data), {rows, heads, head_dim}, {row_stride, head_dim, 1}, On(at::kBFloat16));
}
at::Tensor Ints(const std::int32_t* data, std::int64_t count) {
  return at::from_blob(const_cast<std::int32_t*>(data), {count}, On(at::kInt));
}
at::Tensor Floats(float* data, std::int64_t heads, std::int64_t rows) {
  return at::from_blob(data, {heads, rows}, On(at::kFloat));
}

struct Call {
  at::Tensor query, key, value, query_begins, key_begins;
  std::int64_t longest_query, longest_key;
  bool is_causal;
};

std::pair<at::Tensor, at::Tensor> RunForward(const Call& call) {
  auto [output, lse, seed, offset, mask] =
      at::_flash_attention_forward(call.query, call.key, call.value, call.query_begins, call.key_begins, call.longest_query,
                                   call.longest_key, /*dropout_p=*/0.0, call.is_causal, /*return_debug_mask=*/false);
  TORCH_CHECK(lse.dim() == 2 && lse.size(0) == call.query.size(1) && lse.size(1) == call.query.size(0), "log-sum-exps of ",
              lse.sizes(), " for queries of ", call.query.sizes());
  return {output.contiguous(), lse.contiguous()};
}

struct Gradients {
  at::Tensor query, key, value;
};

Gradients RunBackward(const Call& call, const at::Tensor& grad_output, const at::Tensor& output, const at::Tensor& lse) {
  const at::Tensor no_dropout = at::empty({2}, On(at::kUInt64));
  auto [query, key, value] = at::_flash_attention_backward(
      grad_output, call.query, call.key, call.value, output, lse, call.query_begins, call.key_begins, call.longest_query,
      call.longest_key, /*dropout_p=*/0.0, call.is_causal, no_dropout, no_dropout);
  return {query.contiguous(), key.contiguous(), value.contiguous()};
}

// [rows, heads, head_dim] into rows of `row_stride` elements.
void Write(const at::Tensor& heads, const std::int32_t* rows, void* output, std::int64_t row_stride, bool is_added,
           void* stream) {
  const std::int64_t head_dim = heads.size(2);
  CheckStatus(CopyHeads({.input = {heads.mutable_data_ptr(), heads.size(1) * head_dim, head_dim},
                         .output = {output, row_stride, head_dim},
                         .output_rows = rows,
                         .num_rows = heads.size(0),
                         .num_heads = heads.size(1),
                         .head_dim = head_dim,
                         .is_added = is_added},
                        stream));
}

}  // namespace

bool FlashAttention::Serves(const ModelConfig& config) {
  int major = 0;
  const bool is_known = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess;
  return is_known && major >= 8 && config.head_dim % 8 == 0 && config.head_dim <= kMaxHeadDim;
}

FlashAttention::FlashAttention(const ModelConfig& config, const AttentionRows& rows, void* stream)
    : num_heads_(config.num_heads),
      num_kv_heads_(config.num_kv_heads),
      head_dim_(config.head_dim),
      num_rows_(rows.num_rows),
      num_own_(rows.num_own()),
      num_queries_(rows.num_queries()),
      num_keys_(rows.num_keys()),
      num_segments_(static_cast<std::int64_t>(rows.own_begins.size()) - 1),
      num_groups_(static_cast<std::int64_t>(rows.query_begins.size()) - 1),
      // At least 2: LibTorch folds heads into rows where every sequence has one query, and sequences may then not differ.
      longest_own_(std::max<std::int64_t>(rows.longest_own, 2)),
      longest_query_(std::max<std::int64_t>(rows.longest_query, 2)),
      longest_key_(rows.longest_key),
      stream_(stream) {
  DeviceArrays<std::int32_t> indices;
  indices.Add(&own_begins_, rows.own_begins);
  indices.Add(&query_begins_, rows.query_begins);
  indices.Add(&key_begins_, rows.key_begins);
  indices.Add(&query_rows_, rows.query_rows);
  indices.Add(&key_rows_, rows.key_rows);
  indices_ = indices.Upload(stream);
}

struct FlashAttention::Gathered {
  DeviceBuffer<std::uint16_t> queries, keys, values;
};

FlashAttention::Gathered FlashAttention::Gather(const void* qkv) const {
  const std::int64_t q = num_heads_ * head_dim_, kv = num_kv_heads_ * head_dim_, width = q + 2 * kv;
  Gathered gathered{DeviceBuffer<std::uint16_t>(num_queries_ * q), DeviceBuffer<std::uint16_t>(num_keys_ * kv),
                    DeviceBuffer<std::uint16_t>(num_keys_ * kv)};
  const auto* const elements = static_cast<const std::uint16_t*>(qkv);
  GatherHeads(elements, width, query_rows_, num_queries_, num_heads_, gathered.queries.data());
  GatherHeads(elements + q, width, key_rows_, num_keys_, num_kv_heads_, gathered.keys.data());
  GatherHeads(elements + q + kv, width, key_rows_, num_keys_, num_kv_heads_, gathered.values.data());
  return gathered;
}

void FlashAttention::GatherHeads(const void* input, std::int64_t row_stride, const std::int32_t* rows, std::int64_t num_rows,
                                 std::int64_t num_heads, void* output) const {
  CheckStatus(CopyHeads({.input = {const_cast<void*>(input), row_stride, head_dim_},
                         .input_rows = rows,
                         .output = {output, num_heads * head_dim_, head_dim_},
                         .num_rows = num_rows,
                         .num_heads = num_heads,
                         .head_dim = head_dim_},
                        stream_));
}

// Log-sum-exps outside are [num_rows, num_heads], LibTorch's are [num_heads, rows].
void FlashAttention::Forward(const void* qkv, void* output, float* lse) const {
  PrepareLibTorchOnce();
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromExternal(static_cast<cudaStream_t>(stream_), 0));
  const std::int64_t q = num_heads_ * head_dim_, kv = num_kv_heads_ * head_dim_, width = q + 2 * kv;
  const auto* const elements = static_cast<const std::uint16_t*>(qkv);
  const LseArray all_lse{lse, num_heads_, 1};
  CheckStatus(ZeroRows({.output = output, .row_stride = q, .begin = num_own_, .end = num_rows_}, stream_));
  {
    const at::Tensor own_begins = Ints(own_begins_, num_segments_ + 1);
    const auto [own, own_lse] = RunForward({Heads(elements, num_own_, num_heads_, head_dim_, width),
                                            Heads(elements + q, num_own_, num_kv_heads_, head_dim_, width),
                                            Heads(elements + q + kv, num_own_, num_kv_heads_, head_dim_, width), own_begins,
                                            own_begins, longest_own_, longest_own_, /*is_causal=*/true});
    Write(own, nullptr, output, q, /*is_added=*/false, stream_);
    CheckStatus(GatherLse({.input = {own_lse.mutable_data_ptr<float>(), 1, num_own_},
                           .output = all_lse,
                           .num_rows = num_own_,
                           .num_heads = num_heads_},
                          stream_));
  }
  if (num_queries_ == 0) return;
  const Gathered gathered = Gather(qkv);
  const auto [prompt, prompt_lse] =
      RunForward({Heads(gathered.queries.data(), num_queries_, num_heads_, head_dim_, q),
                  Heads(gathered.keys.data(), num_keys_, num_kv_heads_, head_dim_, kv),
                  Heads(gathered.values.data(), num_keys_, num_kv_heads_, head_dim_, kv), Ints(query_begins_, num_groups_ + 1),
                  Ints(key_begins_, num_groups_ + 1), longest_query_, longest_key_, /*is_causal=*/false});
  CheckStatus(MergeAttention({.part = prompt.const_data_ptr(),
                              .part_lse = {prompt_lse.mutable_data_ptr<float>(), 1, num_queries_},
                              .rows = query_rows_,
                              .output = output,
                              .output_row_stride = q,
                              .lse = all_lse,
                              .num_rows = num_queries_,
                              .num_heads = num_heads_,
                              .head_dim = head_dim_},
                             stream_));
}

void FlashAttention::Backward(const void* qkv, const void* output, const float* lse, const void* grad_output,
                              void* grad_qkv) const {
  PrepareLibTorchOnce();
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromExternal(static_cast<cudaStream_t>(stream_), 0));
  const std::int64_t q = num_heads_ * head_dim_, kv = num_kv_heads_ * head_dim_, width = q + 2 * kv;
  const auto* const elements = static_cast<const std::uint16_t*>(qkv);
  auto* const gradients = static_cast<std::uint16_t*>(grad_qkv);
  const LseArray all_lse{const_cast<float*>(lse), num_heads_, 1};
  CheckStatus(ZeroRows({.output = grad_qkv, .row_stride = width, .begin = num_own_, .end = num_rows_}, stream_));
  {
    const DeviceBuffer<float> own_lse(num_heads_ * num_own_);
    CheckStatus(GatherLse(
        {.input = all_lse, .output = {own_lse.data(), 1, num_own_}, .num_rows = num_own_, .num_heads = num_heads_}, stream_));
    const at::Tensor own_begins = Ints(own_begins_, num_segments_ + 1);
    const Gradients own = RunBackward(
        {Heads(elements, num_own_, num_heads_, head_dim_, width), Heads(elements + q, num_own_, num_kv_heads_, head_dim_, width),
         Heads(elements + q + kv, num_own_, num_kv_heads_, head_dim_, width), own_begins, own_begins, longest_own_, longest_own_,
         /*is_causal=*/true},
        Heads(grad_output, num_own_, num_heads_, head_dim_, q), Heads(output, num_own_, num_heads_, head_dim_, q),
        Floats(own_lse.data(), num_heads_, num_own_));
    Write(own.query, nullptr, gradients, width, /*is_added=*/false, stream_);
    Write(own.key, nullptr, gradients + q, width, /*is_added=*/false, stream_);
    Write(own.value, nullptr, gradients + q + kv, width, /*is_added=*/false, stream_);
  }
  if (num_queries_ == 0) return;
  const Gathered gathered = Gather(qkv);
  const DeviceBuffer<std::uint16_t> outputs(num_queries_ * q), grad_outputs(num_queries_ * q);
  const DeviceBuffer<float> query_lse(num_heads_ * num_queries_);
  GatherHeads(output, q, query_rows_, num_queries_, num_heads_, outputs.data());
  GatherHeads(grad_output, q, query_rows_, num_queries_, num_heads_, grad_outputs.data());
  CheckStatus(GatherLse({.input = all_lse,
                         .rows = query_rows_,
                         .output = {query_lse.data(), 1, num_queries_},
                         .num_rows = num_queries_,
                         .num_heads = num_heads_},
                        stream_));
  const Gradients prompt = RunBackward(
      {Heads(gathered.queries.data(), num_queries_, num_heads_, head_dim_, q),
       Heads(gathered.keys.data(), num_keys_, num_kv_heads_, head_dim_, kv),
       Heads(gathered.values.data(), num_keys_, num_kv_heads_, head_dim_, kv), Ints(query_begins_, num_groups_ + 1),
       Ints(key_begins_, num_groups_ + 1), longest_query_, longest_key_, /*is_causal=*/false},
      Heads(grad_outputs.data(), num_queries_, num_heads_, head_dim_, q),
      Heads(outputs.data(), num_queries_, num_heads_, head_dim_, q), Floats(query_lse.data(), num_heads_, num_queries_));
  Write(prompt.query, query_rows_, gradients, width, /*is_added=*/true, stream_);
  Write(prompt.key, key_rows_, gradients + q, width, /*is_added=*/true, stream_);
  Write(prompt.value, key_rows_, gradients + q + kv, width, /*is_added=*/true, stream_);
}

}  // namespace tandem
