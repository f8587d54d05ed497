// RopeAndCache: one block a row, one thread a pair of elements at a time: queries, keys and values of the row in turn. Bytes moved:
// queries read and written, keys and values read and written elsewhere, 4 bytes an element of qkv; bound by memory, and by the
// launch at decode sizes.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "common/gpu/cuda_status.h"
#include "kernels/base/device_elements.cuh"
#include "kernels/kv_cache/kv_cache.h"

namespace tandem::internal {
namespace {

struct Frequencies {
  double values[128];
};

// Grid and block: one thread an entry of the table.
__global__ void RopeTableKernel(Frequencies frequencies, int half, std::int64_t count, float* cosines, float* sines) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  double sine, cosine;
  sincos(static_cast<double>(i / half) * frequencies.values[i % half], &sine, &cosine);
  cosines[i] = static_cast<float>(cosine);
  sines[i] = static_cast<float>(sine);
}

template <typename T>
__global__ void RopeAndCacheKernel(RopeAndCacheParams p) {
  const std::int64_t row = blockIdx.x;
  const int half = p.head_dim / 2, kv_size = p.num_kv_heads * p.head_dim;
  T* const x = static_cast<T*>(p.qkv) + row * ((p.num_heads + 2 * p.num_kv_heads) * p.head_dim);
  const std::int64_t position = p.positions[row], slot = p.slots[row];
  const float* const cosines = p.cosines + position * half;
  const float* const sines = p.sines + position * half;
  const std::int64_t place = slot / p.page_tokens * p.page_stride + slot % p.page_tokens * kv_size;
  T* const keys = static_cast<T*>(p.keys) + place;
  T* const values = static_cast<T*>(p.values) + place;
  const int num_pairs = (p.num_heads + p.num_kv_heads) * half;
  for (int pair = static_cast<int>(threadIdx.x); pair < num_pairs; pair += static_cast<int>(blockDim.x)) {
    const int head = pair / half, i = pair % half;
    const bool is_query = head < p.num_heads;
    if (!is_query && slot < 0) continue;
    const T* from = x + head * p.head_dim + i;
    T* to = is_query ? x + head * p.head_dim + i : keys + (head - p.num_heads) * p.head_dim + i;
    const float a = AsFloat(from[0]), b = AsFloat(from[half]), c = cosines[i], s = sines[i];
    SetElement(&to[0], a * c - b * s);
    SetElement(&to[half], b * c + a * s);
  }
  if (slot < 0) return;
  const T* const source = x + (p.num_heads + p.num_kv_heads) * p.head_dim;
  for (int i = static_cast<int>(threadIdx.x); i < kv_size; i += static_cast<int>(blockDim.x)) values[i] = source[i];
}

// Grid: (column blocks, rows).
__global__ void RoundBlockKernel(RoundBlockParams p) {
  for (std::int64_t row = blockIdx.y; row < p.num_rows; row += gridDim.y) {
    const float* from = p.input + row * p.num_columns;
    auto* to = static_cast<__nv_bfloat16*>(p.output) + row * p.output_row_stride;
    for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < p.num_columns;
         i += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
      to[i] = __float2bfloat16_rn(from[i]);
    }
  }
}

constexpr unsigned kThreads = 256;

}  // namespace

absl::Status FillRopeTableCuda(const RopeTableParams& params, void* stream) {
  Frequencies frequencies = {};
  for (std::int64_t i = 0; i < params.half; ++i) frequencies.values[i] = params.frequencies[i];
  const std::int64_t count = params.num_positions * params.half;
  RopeTableKernel<<<static_cast<unsigned>((count + kThreads - 1) / kThreads), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      frequencies, static_cast<int>(params.half), count, params.cosines, params.sines);
  return CudaToStatus(cudaGetLastError(), "rope table launch");
}

absl::Status RopeAndCacheCuda(const RopeAndCacheParams& params, void* stream) {
  const unsigned threads = ThreadsFor((params.num_heads + params.num_kv_heads) * params.head_dim / 2, 1024);
  const auto rows = static_cast<unsigned>(params.num_rows);
  if (params.dtype == DType::kBf16) {
    RopeAndCacheKernel<__nv_bfloat16><<<rows, threads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  } else {
    RopeAndCacheKernel<float><<<rows, threads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  }
  return CudaToStatus(cudaGetLastError(), "rope and cache launch");
}

absl::Status RoundBlockCuda(const RoundBlockParams& params, void* stream) {
  const std::int64_t columns = (params.num_columns + kThreads - 1) / kThreads;
  const dim3 grid(static_cast<unsigned>(columns < 64 ? columns : 64),
                  static_cast<unsigned>(params.num_rows < 32768 ? params.num_rows : 32768));
  RoundBlockKernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  return CudaToStatus(cudaGetLastError(), "rounding a block");
}

}  // namespace tandem::internal
