// One block of 128 threads a row, CopyHeads a block of 1,024 elements; bound by memory, a few percent of the attention beside
// them.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstddef>

#include "common/gpu/cuda_status.h"
#include "kernels/base/device_elements.cuh"
#include "kernels/packed_attention/attention_parts.h"

namespace tandem {
namespace {

constexpr int kThreads = 128;

__global__ void GatherLseKernel(GatherLseParams params) {
  const std::int64_t i = blockIdx.x, row = params.rows == nullptr ? i : params.rows[i];
  for (std::int64_t head = threadIdx.x; head < params.num_heads; head += kThreads) {
    params.output.values[i * params.output.row_stride + head * params.output.head_stride] =
        params.input.values[row * params.input.row_stride + head * params.input.head_stride];
  }
}

// One thread a head for the log-sum-exps, whose shares are in shared memory then, float [2, num_heads].
__global__ void MergeAttentionKernel(MergeAttentionParams params) {
  extern __shared__ float shares[];
  constexpr int kCount = kPacketBytes / sizeof(__nv_bfloat16);
  const std::int64_t i = blockIdx.x, row = params.rows[i];
  for (std::int64_t head = threadIdx.x; head < params.num_heads; head += kThreads) {
    float* const lse = params.lse.values + row * params.lse.row_stride + head * params.lse.head_stride;
    const float part_lse = params.part_lse.values[i * params.part_lse.row_stride + head * params.part_lse.head_stride];
    const float own_lse = *lse, top = fmaxf(own_lse, part_lse);
    const float merged = top + logf(expf(own_lse - top) + expf(part_lse - top));
    shares[head] = expf(own_lse - merged);
    shares[params.num_heads + head] = expf(part_lse - merged);
    *lse = merged;
  }
  __syncthreads();
  const std::int64_t width = params.num_heads * params.head_dim;
  const auto* part = static_cast<const __nv_bfloat16*>(params.part) + i * width;
  auto* output = static_cast<__nv_bfloat16*>(params.output) + row * params.output_row_stride;
  for (std::int64_t first = threadIdx.x * kCount; first < width; first += kThreads * kCount) {
    const std::int64_t head = first / params.head_dim;
    const float own_share = shares[head], part_share = shares[params.num_heads + head];
    float own[kCount], other[kCount];
    LoadFloats(static_cast<const __nv_bfloat16*>(output + first), own);
    LoadFloats(part + first, other);
#pragma unroll
    for (int e = 0; e < kCount; ++e) own[e] = own_share * own[e] + part_share * other[e];
    StoreFloats(output + first, own);
  }
}

// One thread a packet of 8 elements.
template <bool kIsAdded>
__global__ void CopyHeadsKernel(CopyHeadsParams params) {
  constexpr int kCount = kPacketBytes / sizeof(__nv_bfloat16);
  const std::int64_t packet = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t packets_of_head = params.head_dim / kCount, head_index = packet / packets_of_head;
  const std::int64_t i = head_index / params.num_heads, head = head_index % params.num_heads;
  if (i >= params.num_rows) return;
  const auto place = [&](const HeadArray& array, const std::int32_t* rows) {
    const std::int64_t row = rows == nullptr ? i : rows[i];
    return static_cast<__nv_bfloat16*>(array.values) + row * array.row_stride + head * array.head_stride +
           packet % packets_of_head * kCount;
  };
  __nv_bfloat16* const output = place(params.output, params.output_rows);
  float values[kCount];
  LoadFloats(static_cast<const __nv_bfloat16*>(place(params.input, params.input_rows)), values);
  if constexpr (kIsAdded) {
    float before[kCount];
    LoadFloats(static_cast<const __nv_bfloat16*>(output), before);
#pragma unroll
    for (int e = 0; e < kCount; ++e) values[e] += before[e];
  }
  StoreFloats(output, values);
}

}  // namespace

absl::Status GatherLse(const GatherLseParams& params, void* stream) {
  if (params.num_rows <= 0) return absl::OkStatus();
  GatherLseKernel<<<static_cast<unsigned>(params.num_rows), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  return CudaToStatus(cudaGetLastError(), "gathering of log-sum-exps");
}

absl::Status MergeAttention(const MergeAttentionParams& params, void* stream) {
  if (params.num_rows <= 0) return absl::OkStatus();
  const auto shares_bytes = static_cast<std::size_t>(2 * params.num_heads) * sizeof(float);
  MergeAttentionKernel<<<static_cast<unsigned>(params.num_rows), kThreads, shares_bytes, static_cast<cudaStream_t>(stream)>>>(
      params);
  return CudaToStatus(cudaGetLastError(), "merging of attention");
}

absl::Status CopyHeads(const CopyHeadsParams& params, void* stream) {
  constexpr std::int64_t kElementsOfBlock = kThreads * static_cast<std::int64_t>(kPacketBytes / sizeof(__nv_bfloat16));
  const std::int64_t blocks = (params.num_rows * params.num_heads * params.head_dim + kElementsOfBlock - 1) / kElementsOfBlock;
  if (blocks <= 0) return absl::OkStatus();
  const auto kernel = params.is_added ? CopyHeadsKernel<true> : CopyHeadsKernel<false>;
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  return CudaToStatus(cudaGetLastError(), "copy of attention's heads");
}

absl::Status ZeroRows(const ZeroRowsParams& params, void* stream) {
  if (params.begin >= params.end) return absl::OkStatus();
  const std::int64_t row_bytes = params.row_stride * static_cast<std::int64_t>(sizeof(__nv_bfloat16));
  return CudaToStatus(
      cudaMemsetAsync(static_cast<std::byte*>(params.output) + params.begin * row_bytes, 0,
                      static_cast<std::size_t>((params.end - params.begin) * row_bytes), static_cast<cudaStream_t>(stream)),
      "zeroing of rows");
}

}  // namespace tandem
