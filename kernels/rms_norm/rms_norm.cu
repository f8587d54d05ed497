// One block a row, a thread for each packet of 16 bytes of the weight up to 512 threads; the row is read twice, the second time
// from L1 or L2. Bytes moved, with e the weight's bytes: forward (4 + e) num_rows width, backward (12 + e). Bound by memory: 70 %
// of the copy rate and more is expected from some hundred rows on; below that the launch costs more than the bytes.
#include <cuda_runtime.h>

#include "common/gpu/cuda_status.h"
#include "kernels/base/device_elements.cuh"
#include "kernels/cuda_launchers.h"

namespace tandem {
namespace {

constexpr unsigned kMaxThreads = 512;

// input and output may be one array: a thread reads an element before it writes it, and no other thread does either.
template <typename T, int kCount>
__global__ void RmsNormKernel(const float* input, const T* __restrict__ weight, T* output, const std::int32_t* __restrict__ rows,
                              int width, float epsilon) {
  __shared__ float warp_sums[kMaxThreads / 32];
  const std::int64_t row = rows != nullptr ? rows[blockIdx.x] : static_cast<std::int64_t>(blockIdx.x);
  const float* const x = input + row * width;
  const int begin = static_cast<int>(threadIdx.x) * kCount, step = static_cast<int>(blockDim.x) * kCount;
  float squares = 0;
  for (int i = begin; i < width; i += step) {
    float values[kCount];
    LoadFloats(x + i, values);
#pragma unroll
    for (int j = 0; j < kCount; ++j) squares += values[j] * values[j];
  }
  const float scale = rsqrtf(BlockSum(squares, warp_sums) / static_cast<float>(width) + epsilon);
  T* y = output + static_cast<std::int64_t>(blockIdx.x) * width;
  for (int i = begin; i < width; i += step) {
    float values[kCount], weights[kCount];
    LoadFloats(x + i, values);
    LoadFloats(weight + i, weights);
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[j] *= scale * weights[j];
    StoreFloats(y + i, values);
  }
}

template <typename T, int kCount>
__global__ void RmsNormBackwardKernel(const float* __restrict__ input, const T* __restrict__ weight,
                                      const T* __restrict__ grad_output, float* grad_input, const std::int32_t* __restrict__ rows,
                                      int width, float epsilon) {
  __shared__ float warp_squares[kMaxThreads / 32], warp_dots[kMaxThreads / 32];
  const std::int64_t row = rows != nullptr ? rows[blockIdx.x] : static_cast<std::int64_t>(blockIdx.x);
  const float* const x = input + row * width;
  const T* const g = grad_output + static_cast<std::int64_t>(blockIdx.x) * width;
  const int begin = static_cast<int>(threadIdx.x) * kCount, step = static_cast<int>(blockDim.x) * kCount;
  float squares = 0, dot = 0;
  for (int i = begin; i < width; i += step) {
    float values[kCount], weights[kCount], grads[kCount];
    LoadFloats(x + i, values);
    LoadFloats(weight + i, weights);
    LoadFloats(g + i, grads);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      squares += values[j] * values[j];
      dot += weights[j] * grads[j] * values[j];
    }
  }
  const float mean = BlockSum(squares, warp_squares) / static_cast<float>(width);
  const float scale = rsqrtf(mean + epsilon);
  const float pull = scale * scale * scale * (BlockSum(dot, warp_dots) / static_cast<float>(width));
  float* const dx = grad_input + row * width;
  for (int i = begin; i < width; i += step) {
    float values[kCount], weights[kCount], grads[kCount], sums[kCount];
    LoadFloats(x + i, values);
    LoadFloats(weight + i, weights);
    LoadFloats(g + i, grads);
    LoadFloats(dx + i, sums);
#pragma unroll
    for (int j = 0; j < kCount; ++j) sums[j] += weights[j] * grads[j] * scale - values[j] * pull;
    StoreFloats(dx + i, sums);
  }
}

}  // namespace

namespace internal {

absl::Status RmsNormCuda(const RmsNormParams& params, void* stream) {
  const bool is_aligned = IsPacketAligned({params.input, params.weight, params.output},
                                          {params.width * static_cast<std::int64_t>(ElementBytes(params.dtype))});
  VisitPacketType(params.dtype, is_aligned, [&]<typename T, int kCount>() {
    RmsNormKernel<T, kCount><<<static_cast<unsigned>(params.num_rows), ThreadsFor(params.width / kCount, kMaxThreads), 0,
                               static_cast<cudaStream_t>(stream)>>>(params.input, static_cast<const T*>(params.weight),
                                                                    static_cast<T*>(params.output), params.rows,
                                                                    static_cast<int>(params.width), params.epsilon);
  });
  return CudaToStatus(cudaGetLastError(), "rms_norm launch");
}

absl::Status RmsNormBackwardCuda(const RmsNormBackwardParams& params, void* stream) {
  const bool is_aligned = IsPacketAligned({params.input, params.weight, params.grad_output, params.grad_input},
                                          {params.width * static_cast<std::int64_t>(ElementBytes(params.dtype))});
  VisitPacketType(params.dtype, is_aligned, [&]<typename T, int kCount>() {
    RmsNormBackwardKernel<T, kCount><<<static_cast<unsigned>(params.num_rows), ThreadsFor(params.width / kCount, kMaxThreads), 0,
                                       static_cast<cudaStream_t>(stream)>>>(
        params.input, static_cast<const T*>(params.weight), static_cast<const T*>(params.grad_output), params.grad_input,
        params.rows, static_cast<int>(params.width), params.epsilon);
  });
  return CudaToStatus(cudaGetLastError(), "rms_norm_backward launch");
}

}  // namespace internal
}  // namespace tandem
