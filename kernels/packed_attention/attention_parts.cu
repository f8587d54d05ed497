// One block of 128 threads a row; bound by memory, a few percent of the attention beside them.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "common/gpu/cuda_status.h"
#include "kernels/base/device_elements.cuh"
#include "kernels/packed_attention/attention_parts.h"

namespace tandem {
namespace {

constexpr int kThreads = 128;

__global__ void GatherRowsKernel(GatherRowsParams params) {
  const auto* input =
      static_cast<const __nv_bfloat16*>(params.input) + params.rows[blockIdx.x] * params.row_stride + params.first_column;
  auto* output = static_cast<__nv_bfloat16*>(params.output) + static_cast<std::int64_t>(blockIdx.x) * params.width;
  for (std::int64_t i = threadIdx.x; i < params.width; i += kThreads) output[i] = input[i];
}

__global__ void GatherLseKernel(GatherLseParams params) {
  const std::int64_t row = params.rows[blockIdx.x];
  for (std::int64_t head = threadIdx.x; head < params.num_heads; head += kThreads) {
    params.output[head * params.num_rows + blockIdx.x] = params.input[head * params.num_input_rows + row];
  }
}

__global__ void MergeAttentionKernel(MergeAttentionParams params) {
  const std::int64_t row = blockIdx.x, width = params.num_heads * params.head_dim;
  auto* output = static_cast<__nv_bfloat16*>(params.output) + row * width;
  if (row >= params.num_own) {
    for (std::int64_t i = threadIdx.x; i < width; i += kThreads) output[i] = __float2bfloat16(0);
    return;
  }
  const std::int64_t prompt_row = params.prompt_row_of[row];
  const auto* own = static_cast<const __nv_bfloat16*>(params.own) + row * width;
  const auto* prompt = static_cast<const __nv_bfloat16*>(params.prompt) + prompt_row * width;
  for (std::int64_t i = threadIdx.x; i < width; i += kThreads) {
    const std::int64_t head = i / params.head_dim;
    const float own_lse = params.own_lse[head * params.num_own + row];
    float lse = own_lse;
    if (prompt_row < 0) {
      output[i] = own[i];
    } else {
      const float prompt_lse = params.prompt_lse[head * params.num_prompt + prompt_row];
      const float top = fmaxf(own_lse, prompt_lse);
      lse = top + logf(expf(own_lse - top) + expf(prompt_lse - top));
      SetElement(output + i, expf(own_lse - lse) * AsFloat(own[i]) + expf(prompt_lse - lse) * AsFloat(prompt[i]));
    }
    if (i == head * params.head_dim) params.lse[head * params.num_own + row] = lse;
  }
}

__global__ void SumAttentionGradientsKernel(SumAttentionGradientsParams params) {
  const std::int64_t row = blockIdx.x, q_size = params.q_size, kv_size = params.kv_size, width = q_size + 2 * kv_size;
  auto* output = static_cast<__nv_bfloat16*>(params.grad_qkv) + row * width;
  const bool is_used = row < params.num_own;
  const auto fill = [&](std::int64_t first, std::int64_t count, const void* own, const void* prompt, std::int64_t prompt_row) {
    const auto* own_row = static_cast<const __nv_bfloat16*>(own) + row * count;
    const auto* other_row = static_cast<const __nv_bfloat16*>(prompt) + prompt_row * count;
    for (std::int64_t i = threadIdx.x; i < count; i += kThreads) {
      float sum = is_used ? AsFloat(own_row[i]) : 0.f;
      if (is_used && prompt_row >= 0) sum += AsFloat(other_row[i]);
      SetElement(output + first + i, sum);
    }
  };
  const std::int64_t query_row = params.query_row_of[row], key_row = params.key_row_of[row];
  fill(0, q_size, params.own_q, params.prompt_q, query_row);
  fill(q_size, kv_size, params.own_k, params.prompt_k, key_row);
  fill(q_size + kv_size, kv_size, params.own_v, params.prompt_v, key_row);
}

}  // namespace

absl::Status GatherRows(const GatherRowsParams& params, void* stream) {
  if (params.num_rows <= 0) return absl::OkStatus();
  GatherRowsKernel<<<static_cast<unsigned>(params.num_rows), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  return CudaToStatus(cudaGetLastError(), "gathering of rows");
}

absl::Status GatherLse(const GatherLseParams& params, void* stream) {
  if (params.num_rows <= 0) return absl::OkStatus();
  GatherLseKernel<<<static_cast<unsigned>(params.num_rows), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  return CudaToStatus(cudaGetLastError(), "gathering of log-sum-exps");
}

absl::Status MergeAttention(const MergeAttentionParams& params, void* stream) {
  if (params.num_rows <= 0) return absl::OkStatus();
  MergeAttentionKernel<<<static_cast<unsigned>(params.num_rows), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  return CudaToStatus(cudaGetLastError(), "merging of attention");
}

absl::Status SumAttentionGradients(const SumAttentionGradientsParams& params, void* stream) {
  if (params.num_rows <= 0) return absl::OkStatus();
  SumAttentionGradientsKernel<<<static_cast<unsigned>(params.num_rows), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  return CudaToStatus(cudaGetLastError(), "sum of attention's gradients");
}

}  // namespace tandem
