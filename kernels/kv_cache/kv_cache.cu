// RopeAndCache: one block a row, one warp a head at a time, of queries, keys and values in turn; each lane holds up to four
// pairs. Bytes moved: each element of qkv read and written elsewhere, 6 bytes in bf16; bound by memory, and by the launch at
// decode sizes.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "common/gpu/cuda_status.h"
#include "kernels/base/device_elements.cuh"
#include "kernels/kv_cache/fp8_kv.h"
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
  constexpr int kMaxPairs = 4;  // of a lane
  const std::int64_t row = blockIdx.x;
  const int dim = p.head_dim, half = dim / 2, num_heads = p.num_heads + 2 * p.num_kv_heads;
  const int lane = static_cast<int>(threadIdx.x % 32), num_warps = static_cast<int>(blockDim.x / 32);
  const float* const x = p.qkv + row * num_heads * dim;
  T* const queries = static_cast<T*>(p.queries) + row * p.query_row_stride;
  const std::int64_t position = p.positions[row], slot = p.slots != nullptr ? p.slots[row] : row;
  const std::int64_t place = slot / p.page_tokens * p.page_stride + slot % p.page_tokens * (p.num_kv_heads * dim);
  for (int head = static_cast<int>(threadIdx.x / 32); head < num_heads; head += num_warps) {
    const bool is_query = head < p.num_heads, is_key = !is_query && head < p.num_heads + p.num_kv_heads;
    if (!is_query && slot < 0) break;
    float a[kMaxPairs], b[kMaxPairs], sum = 0;
#pragma unroll
    for (int k = 0; k < kMaxPairs; ++k) {
      const int i = lane + 32 * k;
      if (i >= half) break;
      a[k] = x[head * dim + i];
      b[k] = x[head * dim + i + half];
      if (p.bias != nullptr) {
        a[k] += AsFloat(static_cast<const T*>(p.bias)[head * dim + i]);
        b[k] += AsFloat(static_cast<const T*>(p.bias)[head * dim + i + half]);
      }
      sum += a[k] * a[k] + b[k] * b[k];
      if (p.unnormed != nullptr && (is_query || is_key)) {
        T* const unnormed = static_cast<T*>(p.unnormed) + (row * (p.num_heads + p.num_kv_heads) + head) * dim;
        SetElement(&unnormed[i], a[k]);
        SetElement(&unnormed[i + half], b[k]);
      }
    }
    const T* const norm = static_cast<const T*>(is_query ? p.q_norm : is_key ? p.k_norm : nullptr);
    if (norm != nullptr) {  // the same for the whole warp
      for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
      const float scale = rsqrtf(sum / static_cast<float>(dim) + p.epsilon);
#pragma unroll
      for (int k = 0; k < kMaxPairs; ++k) {
        const int i = lane + 32 * k;
        if (i >= half) break;
        a[k] *= scale * AsFloat(norm[i]);
        b[k] *= scale * AsFloat(norm[i + half]);
      }
    }
    T* const to = is_query ? queries + head * dim
                  : is_key ? static_cast<T*>(p.keys) + place + (head - p.num_heads) * dim
                           : static_cast<T*>(p.values) + place + (head - p.num_heads - p.num_kv_heads) * dim;
#pragma unroll
    for (int k = 0; k < kMaxPairs; ++k) {
      const int i = lane + 32 * k;
      if (i >= half) break;
      const bool rotates = is_query || is_key;
      const float c = rotates ? p.cosines[position * half + i] : 1.f, s = rotates ? p.sines[position * half + i] : 0.f;
      SetElement(&to[i], a[k] * c - b[k] * s);
      SetElement(&to[i + half], b[k] * c + a[k] * s);
      if (p.kv_scales == nullptr || is_query) continue;
      const float scale = p.kv_scales[head - p.num_heads];
      SetElement(&to[i], RoundToFp8Kv(AsFloat(to[i]), scale));
      SetElement(&to[i + half], RoundToFp8Kv(AsFloat(to[i + half]), scale));
    }
  }
}

struct RoundedBlocks {
  static constexpr std::size_t kMaxCount = 64;
  RoundBlockParams blocks[kMaxCount];
};
static_assert(sizeof(RoundedBlocks) <= 4096, "kernel arguments");

// Grid: (parts of a block, blocks).
__global__ void RoundBlocksKernel(RoundedBlocks rounded) {
  const RoundBlockParams& p = rounded.blocks[blockIdx.y];
  auto* const output = static_cast<__nv_bfloat16*>(p.output);
  const auto columns = static_cast<std::uint32_t>(p.num_columns), count = static_cast<std::uint32_t>(p.num_rows) * columns;
  for (std::uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    output[i / columns * p.output_row_stride + i % columns] = __float2bfloat16_rn(p.input[i]);
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
  const unsigned threads = ThreadsFor(32 * (params.num_heads + 2 * params.num_kv_heads), 512);
  const auto rows = static_cast<unsigned>(params.num_rows);
  if (params.dtype == DType::kBf16) {
    RopeAndCacheKernel<__nv_bfloat16><<<rows, threads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  } else {
    RopeAndCacheKernel<float><<<rows, threads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  }
  return CudaToStatus(cudaGetLastError(), "rope and cache launch");
}

absl::Status RoundBlocksCuda(std::span<const RoundBlockParams> blocks, void* stream) {
  constexpr std::int64_t kPerThread = 4, kMaxParts = 64;
  while (!blocks.empty()) {
    const std::size_t count = std::min(blocks.size(), RoundedBlocks::kMaxCount);
    RoundedBlocks rounded;
    std::int64_t largest = 0;
    for (std::size_t i = 0; i < count; ++i) {
      rounded.blocks[i] = blocks[i];
      largest = std::max(largest, blocks[i].num_rows * blocks[i].num_columns);
    }
    blocks = blocks.subspan(count);
    if (largest == 0) continue;
    const std::int64_t parts = std::min(kMaxParts, (largest + kPerThread * kThreads - 1) / (kPerThread * kThreads));
    const dim3 grid(static_cast<unsigned>(parts), static_cast<unsigned>(count));
    RoundBlocksKernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(rounded);
    TANDEM_RETURN_IF_ERROR(CudaToStatus(cudaGetLastError(), "rounding blocks"));
  }
  return absl::OkStatus();
}

}  // namespace tandem::internal
