// Bytes moved: 4 count for the norm, 28 count for the update (four arrays read, three written). Bound by memory; adapters are
// small, so 70 % of the copy rate is expected from 16 M elements on.
#include <cuda_runtime.h>

#include <algorithm>

#include "common/gpu/cuda_status.h"
#include "kernels/base/device_elements.cuh"
#include "kernels/cuda_launchers.h"

namespace tandem {
namespace {

constexpr unsigned kThreads = 256;

// partials[block]: each thread adds up every (grid's size)-th element, the block its threads: the same order in every run.
__global__ void SquaredNormKernel(const float* __restrict__ values, std::int64_t count, double* partials) {
  __shared__ double warp_sums[kThreads / 32];
  double sum = 0;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += static_cast<std::int64_t>(gridDim.x) * kThreads) {
    const auto value = static_cast<double>(values[i]);
    sum += value * value;
  }
  sum = BlockSum(sum, warp_sums);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

// One block.
__global__ void SumPartialsKernel(const double* partials, int count, double* result) {
  __shared__ double warp_sums[kThreads / 32];
  double sum = 0;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(kThreads)) sum += partials[i];
  sum = BlockSum(sum, warp_sums);
  if (threadIdx.x == 0) *result = sum;
}

template <int kCount>
__global__ void AdamWUpdateKernel(AdamWUpdateParams params) {
  const std::int64_t i = (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kCount;
  if (i >= params.count) return;
  float parameters[kCount], gradients[kCount], first[kCount], second[kCount];
  LoadFloats(params.parameters + i, parameters);
  LoadFloats(params.gradients + i, gradients);
  LoadFloats(params.first_moments + i, first);
  LoadFloats(params.second_moments + i, second);
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    const float gradient = gradients[j] * params.clip;
    first[j] += params.fresh1 * (gradient - first[j]);
    second[j] = params.beta2 * second[j] + params.fresh2 * gradient * gradient;
    const float denominator = sqrtf(second[j]) * params.inverse_root_bias2 + params.epsilon;
    parameters[j] = params.keep * parameters[j] - params.step_size * first[j] / denominator;
  }
  StoreFloats(params.parameters + i, parameters);
  StoreFloats(params.first_moments + i, first);
  StoreFloats(params.second_moments + i, second);
}

}  // namespace

namespace internal {

absl::Status SquaredNormCuda(const SquaredNormParams& params, void* stream) {
  const std::int64_t wanted = (params.count + kThreads - 1) / kThreads;
  const auto blocks = static_cast<unsigned>(std::clamp<std::int64_t>(wanted, 1, kSquaredNormBlocks));
  auto* const result = static_cast<double*>(params.scratch);
  SquaredNormKernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(params.values, params.count, result + 1);
  SumPartialsKernel<<<1, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(result + 1, static_cast<int>(blocks), result);
  return CudaToStatus(cudaGetLastError(), "squared norm launch");
}

absl::Status AdamWUpdateCuda(const AdamWUpdateParams& params, void* stream) {
  const bool is_aligned =
      IsPacketAligned({params.parameters, params.gradients, params.first_moments, params.second_moments}, {params.count * 4});
  const std::int64_t per_block = kThreads * (is_aligned ? 4 : 1);
  const auto blocks = static_cast<unsigned>((params.count + per_block - 1) / per_block);
  if (is_aligned) {
    AdamWUpdateKernel<4><<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  } else {
    AdamWUpdateKernel<1><<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  }
  return CudaToStatus(cudaGetLastError(), "adamw launch");
}

}  // namespace internal
}  // namespace tandem
