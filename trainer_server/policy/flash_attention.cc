#include "trainer_server/policy/flash_attention.h"

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <utility>

#include "common/gpu/cuda_status.h"
#include "kernels/packed_attention/attention_parts.h"

namespace tandem {
namespace {

constexpr std::int64_t kMaxHeadDim = 256;

void Check(const absl::Status& status) { TORCH_CHECK(status.ok(), std::string(status.message())); }

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
at::Tensor Floats(const float* data, std::int64_t heads, std::int64_t rows) {
  return at::from_blob(const_cast<float*>(data), {heads, rows}, On(at::kFloat));
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

}  // namespace

FlashRows::FlashRows(const MicroBatch& batch) : num_rows(static_cast<std::int64_t>(batch.token_ids.size())) {
  query_row_of.assign(batch.token_ids.size(), -1);
  key_row_of.assign(batch.token_ids.size(), -1);
  std::int32_t end = 0, prompt_begin = -1, prompt_end = -1;
  query_begins = key_begins = {0};
  // Takes the rows [begin, end of the segment) as the next in order.
  const auto take = [&](std::int32_t segment_begin, std::int32_t segment_end) {
    if (segment_begin != end || segment_begin >= segment_end) return false;
    own_begins.push_back(segment_begin);
    longest_own = std::max<std::int64_t>(longest_own, segment_end - segment_begin);
    end = segment_end;
    return true;
  };
  const auto close_group = [&] {
    const auto queries = static_cast<std::int32_t>(query_rows.size());
    if (prompt_begin < 0 || queries == query_begins.back()) return;
    for (std::int32_t row = prompt_begin; row < prompt_end; ++row) {
      key_row_of[static_cast<std::size_t>(row)] = static_cast<std::int32_t>(key_rows.size());
      key_rows.push_back(row);
    }
    longest_query = std::max<std::int64_t>(longest_query, queries - query_begins.back());
    longest_key = std::max<std::int64_t>(longest_key, prompt_end - prompt_begin);
    query_begins.push_back(queries);
    key_begins.push_back(static_cast<std::int32_t>(key_rows.size()));
  };
  for (const PackedCompletion& completion : batch.completions) {
    if (completion.prompt_begin != prompt_begin || completion.prompt_end != prompt_end) {
      close_group();
      if (!take(completion.prompt_begin, completion.prompt_end)) return;
      prompt_begin = completion.prompt_begin;
      prompt_end = completion.prompt_end;
    }
    if (completion.begin == completion.end) continue;
    if (!take(completion.begin, completion.end)) return;
    for (std::int32_t row = completion.begin; row < completion.end; ++row) {
      query_row_of[static_cast<std::size_t>(row)] = static_cast<std::int32_t>(query_rows.size());
      query_rows.push_back(row);
    }
  }
  close_group();
  own_begins.push_back(end);
  is_served = end > 0;
}

bool FlashAttention::Serves(const ModelConfig& config) {
  int major = 0;
  const bool is_known = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess;
  return is_known && major >= 8 && config.head_dim % 8 == 0 && config.head_dim <= kMaxHeadDim;
}

FlashAttention::FlashAttention(const ModelConfig& config, const FlashRows& rows, void* stream)
    : num_heads_(config.num_heads),
      num_kv_heads_(config.num_kv_heads),
      head_dim_(config.head_dim),
      num_rows_(rows.num_rows),
      num_own_(rows.own_begins.back()),
      num_queries_(static_cast<std::int64_t>(rows.query_rows.size())),
      num_keys_(static_cast<std::int64_t>(rows.key_rows.size())),
      num_segments_(static_cast<std::int64_t>(rows.own_begins.size()) - 1),
      num_groups_(static_cast<std::int64_t>(rows.query_begins.size()) - 1),
      // At least 2: LibTorch folds heads into rows where every sequence has one query, and sequences may then not differ.
      longest_own_(std::max<std::int64_t>(rows.longest_own, 2)),
      longest_query_(std::max<std::int64_t>(rows.longest_query, 2)),
      longest_key_(rows.longest_key),
      stream_(stream) {
  std::vector<std::int32_t> values;
  std::vector<std::pair<const std::int32_t**, std::size_t>> places;
  const auto add = [&](const std::int32_t** place, const std::vector<std::int32_t>& array) {
    places.emplace_back(place, values.size());
    values.insert(values.end(), array.begin(), array.end());
    values.resize((values.size() + 3) / 4 * 4);
  };
  add(&own_begins_, rows.own_begins);
  add(&query_begins_, rows.query_begins);
  add(&key_begins_, rows.key_begins);
  add(&query_rows_, rows.query_rows);
  add(&key_rows_, rows.key_rows);
  add(&query_row_of_, rows.query_row_of);
  add(&key_row_of_, rows.key_row_of);
  indices_ = DeviceBuffer<std::int32_t>(static_cast<std::int64_t>(values.size()));
  // From pageable memory: `values` is read before this returns.
  Check(CudaToStatus(cudaMemcpyAsync(indices_.data(), values.data(), values.size() * sizeof(std::int32_t), cudaMemcpyHostToDevice,
                                     static_cast<cudaStream_t>(stream)),
                     "upload of attention's rows"));
  for (const auto& [place, offset] : places) *place = indices_.data() + offset;
}

struct FlashAttention::Gathered {
  DeviceBuffer<std::uint16_t> queries, keys, values;
};

FlashAttention::Gathered FlashAttention::Gather(const void* qkv) const {
  const std::int64_t q = num_heads_ * head_dim_, kv = num_kv_heads_ * head_dim_;
  Gathered gathered{DeviceBuffer<std::uint16_t>(num_queries_ * q), DeviceBuffer<std::uint16_t>(num_keys_ * kv),
                    DeviceBuffer<std::uint16_t>(num_keys_ * kv)};
  GatherRowsParams params{.input = qkv, .row_stride = q + 2 * kv};
  params.rows = query_rows_;
  params.output = gathered.queries.data();
  params.num_rows = num_queries_;
  params.width = q;
  Check(GatherRows(params, stream_));
  params.rows = key_rows_;
  params.num_rows = num_keys_;
  params.width = kv;
  params.first_column = q;
  params.output = gathered.keys.data();
  Check(GatherRows(params, stream_));
  params.first_column = q + kv;
  params.output = gathered.values.data();
  Check(GatherRows(params, stream_));
  return gathered;
}

void FlashAttention::Forward(const void* qkv, void* output, float* lse) const {
  PrepareLibTorchOnce();
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromExternal(static_cast<cudaStream_t>(stream_), 0));
  const std::int64_t q = num_heads_ * head_dim_, kv = num_kv_heads_ * head_dim_, width = q + 2 * kv;
  const auto* const elements = static_cast<const std::uint16_t*>(qkv);
  const at::Tensor own_begins = Ints(own_begins_, num_segments_ + 1);
  const auto [own, own_lse] = RunForward({Heads(elements, num_own_, num_heads_, head_dim_, width),
                                          Heads(elements + q, num_own_, num_kv_heads_, head_dim_, width),
                                          Heads(elements + q + kv, num_own_, num_kv_heads_, head_dim_, width), own_begins,
                                          own_begins, longest_own_, longest_own_, /*is_causal=*/true});
  MergeAttentionParams merge{.own = own.const_data_ptr(),
                             .own_lse = static_cast<const float*>(own_lse.const_data_ptr()),
                             .prompt_row_of = query_row_of_,
                             .output = output,
                             .lse = lse,
                             .num_rows = num_rows_,
                             .num_own = num_own_,
                             .num_prompt = num_queries_,
                             .num_heads = num_heads_,
                             .head_dim = head_dim_};
  if (num_queries_ == 0) {
    Check(MergeAttention(merge, stream_));
    return;
  }
  const Gathered gathered = Gather(qkv);
  const auto [prompt, prompt_lse] =
      RunForward({Heads(gathered.queries.data(), num_queries_, num_heads_, head_dim_, q),
                  Heads(gathered.keys.data(), num_keys_, num_kv_heads_, head_dim_, kv),
                  Heads(gathered.values.data(), num_keys_, num_kv_heads_, head_dim_, kv), Ints(query_begins_, num_groups_ + 1),
                  Ints(key_begins_, num_groups_ + 1), longest_query_, longest_key_, /*is_causal=*/false});
  merge.prompt = prompt.const_data_ptr();
  merge.prompt_lse = static_cast<const float*>(prompt_lse.const_data_ptr());
  Check(MergeAttention(merge, stream_));
}

void FlashAttention::Backward(const void* qkv, const void* output, const float* lse, const void* grad_output,
                              void* grad_qkv) const {
  PrepareLibTorchOnce();
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromExternal(static_cast<cudaStream_t>(stream_), 0));
  const std::int64_t q = num_heads_ * head_dim_, kv = num_kv_heads_ * head_dim_, width = q + 2 * kv;
  const auto* const elements = static_cast<const std::uint16_t*>(qkv);
  const at::Tensor own_begins = Ints(own_begins_, num_segments_ + 1);
  const Gradients own = RunBackward(
      {Heads(elements, num_own_, num_heads_, head_dim_, width), Heads(elements + q, num_own_, num_kv_heads_, head_dim_, width),
       Heads(elements + q + kv, num_own_, num_kv_heads_, head_dim_, width), own_begins, own_begins, longest_own_, longest_own_,
       /*is_causal=*/true},
      Heads(grad_output, num_own_, num_heads_, head_dim_, q), Heads(output, num_own_, num_heads_, head_dim_, q),
      Floats(lse, num_heads_, num_own_));
  SumAttentionGradientsParams sum{.own_q = own.query.const_data_ptr(),
                                  .own_k = own.key.const_data_ptr(),
                                  .own_v = own.value.const_data_ptr(),
                                  .query_row_of = query_row_of_,
                                  .key_row_of = key_row_of_,
                                  .grad_qkv = grad_qkv,
                                  .num_rows = num_rows_,
                                  .num_own = num_own_,
                                  .q_size = q,
                                  .kv_size = kv};
  if (num_queries_ == 0) {
    Check(SumAttentionGradients(sum, stream_));
    return;
  }
  const Gathered gathered = Gather(qkv);
  const DeviceBuffer<std::uint16_t> outputs(num_queries_ * q), grad_outputs(num_queries_ * q);
  const DeviceBuffer<float> query_lse(num_heads_ * num_queries_);
  GatherRowsParams gather{.input = output, .row_stride = q, .rows = query_rows_, .num_rows = num_queries_, .width = q};
  gather.output = outputs.data();
  Check(GatherRows(gather, stream_));
  gather.input = grad_output;
  gather.output = grad_outputs.data();
  Check(GatherRows(gather, stream_));
  Check(GatherLse({.input = lse,
                   .num_input_rows = num_own_,
                   .rows = query_rows_,
                   .output = query_lse.data(),
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
  sum.prompt_q = prompt.query.const_data_ptr();
  sum.prompt_k = prompt.key.const_data_ptr();
  sum.prompt_v = prompt.value.const_data_ptr();
  Check(SumAttentionGradients(sum, stream_));
}

}  // namespace tandem
