// One block a row, up to 256 threads; each takes a packet of 16 bytes from the first half of a head and its partner from the
// second. Bytes moved, with e the element's bytes: 2 e num_rows num_heads head_dim; a row's cosines and sines come from L1 after
// the first head. Bound by memory.
#include <cuda_runtime.h>

#include "common/gpu/cuda_status.h"
#include "kernels/base/device_elements.cuh"
#include "kernels/cuda_launchers.h"

namespace tandem {
namespace {

// kCount is 1, 4 or 8.
template <int kCount>
__device__ void LoadAngles(const float* source, float (&values)[kCount]) {
  if constexpr (kCount == 1) {
    values[0] = *source;
  } else {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(source + i);
      values[i] = four.x;
      values[i + 1] = four.y;
      values[i + 2] = four.z;
      values[i + 3] = four.w;
    }
  }
}

template <typename T, int kCount>
__global__ void RopeKernel(T* x, std::int64_t row_stride, int num_heads, int half, const std::int32_t* __restrict__ positions,
                           const float* __restrict__ cosines, const float* __restrict__ sines, float sign) {
  const std::int64_t angles = static_cast<std::int64_t>(positions[blockIdx.x]) * half;
  T* const row = x + static_cast<std::int64_t>(blockIdx.x) * row_stride;
  const int packets_per_head = half / kCount;
  for (int item = static_cast<int>(threadIdx.x); item < num_heads * packets_per_head; item += static_cast<int>(blockDim.x)) {
    const int head = item / packets_per_head, i = (item - head * packets_per_head) * kCount;
    T* const first_half = row + static_cast<std::int64_t>(head) * 2 * half + i;
    float first[kCount], second[kCount], cosine[kCount], sine[kCount];
    LoadFloats(first_half, first);
    LoadFloats(first_half + half, second);
    LoadAngles(cosines + angles + i, cosine);
    LoadAngles(sines + angles + i, sine);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const float a = first[j], b = second[j], s = sign * sine[j];
      first[j] = a * cosine[j] - b * s;
      second[j] = b * cosine[j] + a * s;
    }
    StoreFloats(first_half, first);
    StoreFloats(first_half + half, second);
  }
}

}  // namespace

namespace internal {

absl::Status RopeCuda(const RopeParams& params, void* stream) {
  constexpr unsigned kMaxThreads = 256;
  const auto element_bytes = static_cast<std::int64_t>(ElementBytes(params.dtype));
  const std::int64_t half = params.head_dim / 2;
  const bool is_aligned =
      IsPacketAligned({params.x, params.cosines, params.sines}, {params.row_stride * element_bytes, half * element_bytes});
  VisitPacketType(params.dtype, is_aligned, [&]<typename T, int kCount>() {
    RopeKernel<T, kCount><<<static_cast<unsigned>(params.num_rows), ThreadsFor(params.num_heads * half / kCount, kMaxThreads), 0,
                            static_cast<cudaStream_t>(stream)>>>(static_cast<T*>(params.x), params.row_stride,
                                                                 static_cast<int>(params.num_heads), static_cast<int>(half),
                                                                 params.positions, params.cosines, params.sines, params.sign);
  });
  return CudaToStatus(cudaGetLastError(), "rope launch");
}

}  // namespace internal
}  // namespace tandem
