// One block a row, 256 threads; each thread strides over the row twice, the second time from L1/L2.
// Bytes moved: 2 x num_rows x width x 2 (read once from memory, written once). Bound by memory; one row of 4096 is 8 KiB, so
// occupancy hides latency from a few hundred rows on.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "kernels/base/cuda_status.h"
#include "kernels/rms_norm/rms_norm.h"

namespace tandem {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

__global__ void RmsNormKernel(const __nv_bfloat16* __restrict__ input, const __nv_bfloat16* __restrict__ weight,
                              __nv_bfloat16* output, int width, float epsilon) {
  const __nv_bfloat16* x = input + static_cast<std::int64_t>(blockIdx.x) * width;
  __nv_bfloat16* y = output + static_cast<std::int64_t>(blockIdx.x) * width;
  float sum = 0;
  for (int i = static_cast<int>(threadIdx.x); i < width; i += kThreads) {
    const float value = __bfloat162float(x[i]);
    sum += value * value;
  }
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  __shared__ float warp_sums[kWarps];
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0;
  for (float warp_sum : warp_sums) sum += warp_sum;
  const float scale = rsqrtf(sum / static_cast<float>(width) + epsilon);
  for (int i = static_cast<int>(threadIdx.x); i < width; i += kThreads) {
    y[i] = __float2bfloat16(__bfloat162float(x[i]) * scale * __bfloat162float(weight[i]));
  }
}

}  // namespace

namespace internal {

absl::Status RmsNormCuda(const RmsNormParams& params, void* stream) {
  RmsNormKernel<<<static_cast<unsigned>(params.num_rows), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const __nv_bfloat16*>(params.input), static_cast<const __nv_bfloat16*>(params.weight),
      static_cast<__nv_bfloat16*>(params.output), static_cast<int>(params.width), params.epsilon);
  return CudaToStatus(cudaGetLastError(), "rms_norm launch");
}

}  // namespace internal
}  // namespace tandem
