// Storing: a block a row, a thread 8 values at a time: 3 bytes moved a value; at decode sizes bound by the launch. Measuring: a
// block for each head of keys and of values, a warp a row; it runs once.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "common/gpu/cuda_status.h"
#include "kernels/base/device_elements.cuh"
#include "kernels/kv_cache/fp8_kv.h"

namespace tandem::internal {
namespace {

constexpr unsigned kThreads = 256;
constexpr int kPacket = 8;

// Magnitudes are compared as their bits, in which infinity and NaN are above all numbers.
__global__ void MeasureKernel(Fp8KvParams p) {
  constexpr unsigned kInfinity = 0x7f800000u;
  __shared__ int largest;
  const int half = static_cast<int>(blockIdx.y), head = static_cast<int>(blockIdx.x);
  const auto* const x = static_cast<const __nv_bfloat16*>(half == 0 ? p.keys : p.values);
  if (threadIdx.x == 0) largest = -1;
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x % 32);
  for (std::int64_t row = threadIdx.x / 32; row < p.num_rows; row += blockDim.x / 32) {
    if (p.slots[row] < 0) continue;
    unsigned mine = 0;
    for (int i = lane; i < p.head_dim; i += 32) {
      mine = max(mine, __float_as_uint(AsFloat(x[(row * p.num_kv_heads + head) * p.head_dim + i])) & 0x7fffffffu);
    }
    const unsigned of_row = __reduce_max_sync(0xffffffffu, mine);
    if (lane == 0 && of_row < kInfinity) atomicMax(&largest, static_cast<int>(of_row));
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  p.scales[half * p.num_kv_heads + head] = largest < 0 ? __uint_as_float(0x7fc00000u) : Fp8KvScale(__int_as_float(largest));
}

// Grid: (rows, keys and values).
__global__ void StoreKernel(Fp8KvParams p) {
  const std::int64_t row = blockIdx.x, slot = p.slots[row];
  if (slot < 0) return;
  const int half = static_cast<int>(blockIdx.y);
  const int row_size = p.num_kv_heads * p.head_dim;
  const auto* const x = static_cast<const __nv_bfloat16*>(half == 0 ? p.keys : p.values) + row * row_size;
  auto* const codes = static_cast<std::uint8_t*>(half == 0 ? p.key_pages : p.value_pages) + slot / p.page_tokens * p.page_stride +
                      slot % p.page_tokens * row_size;
  for (int i = static_cast<int>(threadIdx.x) * kPacket; i < row_size; i += static_cast<int>(blockDim.x) * kPacket) {
    const float scale = p.scales[half * p.num_kv_heads + i / p.head_dim];
    float values[kPacket];
    LoadFloats(x + i, values);
    std::uint8_t packet[kPacket];
    bool is_finite = true;
#pragma unroll
    for (int k = 0; k < kPacket; ++k) {
      packet[k] = ToFp8KvCode(values[k], scale);
      is_finite = is_finite && isfinite(values[k]);
    }
    uint2 bits;
    memcpy(&bits, packet, sizeof(bits));
    *reinterpret_cast<uint2*>(codes + i) = bits;
    if (p.queries == nullptr || is_finite) continue;
    static_cast<__nv_bfloat16*>(p.queries)[row * p.query_row_stride] = __float2bfloat16_rn(__uint_as_float(0x7fc00000u));
  }
}

}  // namespace

absl::Status MeasureFp8KvScalesCuda(const Fp8KvParams& params, void* stream) {
  const dim3 grid(static_cast<unsigned>(params.num_kv_heads), 2);
  MeasureKernel<<<grid, 1024, 0, static_cast<cudaStream_t>(stream)>>>(params);
  return CudaToStatus(cudaGetLastError(), "measuring KV scales");
}

absl::Status StoreFp8KvCuda(const Fp8KvParams& params, void* stream) {
  const dim3 grid(static_cast<unsigned>(params.num_rows), 2);
  const unsigned threads = ThreadsFor(std::int64_t{params.num_kv_heads} * params.head_dim / kPacket, kThreads);
  StoreKernel<<<grid, threads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  return CudaToStatus(cudaGetLastError(), "storing KV in fp8");
}

}  // namespace tandem::internal
