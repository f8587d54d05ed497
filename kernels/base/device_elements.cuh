// Device side of the memory-bound kernels: elements as packets of 16 bytes where addresses and widths allow, fp32 in between,
// sums over a block.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "common/gpu/dtype.h"

namespace tandem {

constexpr std::size_t kPacketBytes = 16;

__device__ inline float AsFloat(float value) { return value; }
__device__ inline float AsFloat(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ inline void SetElement(float* element, float value) { *element = value; }
__device__ inline void SetElement(__nv_bfloat16* element, float value) { *element = __float2bfloat16_rn(value); }

// kCount is 1, or the number of elements in one packet or more, at an address that is a multiple of kPacketBytes.
template <typename T, int kCount>
__device__ void LoadFloats(const T* source, float (&values)[kCount]) {
  if constexpr (kCount == 1) {
    values[0] = AsFloat(*source);
  } else {
    constexpr int kPerPacket = kPacketBytes / sizeof(T);
    static_assert(kCount % kPerPacket == 0);
#pragma unroll
    for (int first = 0; first < kCount; first += kPerPacket) {
      const uint4 packet = *reinterpret_cast<const uint4*>(source + first);
      T elements[kPerPacket];
      memcpy(elements, &packet, kPacketBytes);
#pragma unroll
      for (int i = 0; i < kPerPacket; ++i) values[first + i] = AsFloat(elements[i]);
    }
  }
}

template <typename T, int kCount>
__device__ void StoreFloats(T* destination, const float (&values)[kCount]) {
  if constexpr (kCount == 1) {
    SetElement(destination, values[0]);
  } else {
    constexpr int kPerPacket = kPacketBytes / sizeof(T);
    static_assert(kCount % kPerPacket == 0);
#pragma unroll
    for (int first = 0; first < kCount; first += kPerPacket) {
      T elements[kPerPacket];
#pragma unroll
      for (int i = 0; i < kPerPacket; ++i) SetElement(&elements[i], values[first + i]);
      uint4 packet;
      memcpy(&packet, elements, kPacketBytes);
      *reinterpret_cast<uint4*>(destination + first) = packet;
    }
  }
}

// The sum over the block, in every thread, in an order that depends on blockDim.x alone. blockDim.x is a multiple of 32. Each sum
// of a kernel has `warp_sums` of its own.
template <typename T>
__device__ T BlockSum(T value, T* warp_sums) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = value;
  __syncthreads();
  T sum = 0;
  for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) sum += warp_sums[warp];
  return sum;
}

// Whether arrays can be read in packets: addresses and row lengths in bytes are multiples of kPacketBytes. Null arrays pass.
inline bool IsPacketAligned(std::initializer_list<const void*> arrays, std::initializer_list<std::int64_t> row_bytes) {
  for (const void* array : arrays) {
    if (reinterpret_cast<std::uintptr_t>(array) % kPacketBytes != 0) return false;
  }
  for (const std::int64_t bytes : row_bytes) {
    if (bytes % static_cast<std::int64_t>(kPacketBytes) != 0) return false;
  }
  return true;
}

// Calls launch.template operator()<T, kCount>() with the device's element type and the elements read at once.
template <typename Launch>
void VisitPacketType(DType dtype, bool is_packet_aligned, Launch&& launch) {
  if (dtype == DType::kBf16) {
    if (is_packet_aligned) {
      launch.template operator()<__nv_bfloat16, 8>();
    } else {
      launch.template operator()<__nv_bfloat16, 1>();
    }
  } else {
    if (is_packet_aligned) {
      launch.template operator()<float, 4>();
    } else {
      launch.template operator()<float, 1>();
    }
  }
}

// Threads for a block that works on `count` packets: whole warps, at most `limit`.
inline unsigned ThreadsFor(std::int64_t count, unsigned limit) {
  const std::int64_t threads = (count + 31) / 32 * 32;
  return threads > static_cast<std::int64_t>(limit) ? limit : static_cast<unsigned>(threads);
}

// A grid for kernels whose threads take one packet each: blocks_per_row blocks for each row, the rows one after the other.
struct RowGrid {
  unsigned threads;
  unsigned blocks_per_row;
  unsigned blocks;
};
inline RowGrid RowGridFor(std::int64_t num_rows, std::int64_t packets_per_row) {
  constexpr unsigned kMaxThreads = 256;
  const unsigned threads = ThreadsFor(packets_per_row, kMaxThreads);
  const auto blocks_per_row = static_cast<unsigned>((packets_per_row + threads - 1) / threads);
  return {threads, blocks_per_row, blocks_per_row * static_cast<unsigned>(num_rows)};
}
// Of the calling thread: its row, and its place among the row's packets, which may lie behind the last.
struct RowPlace {
  std::int64_t row;
  std::int64_t packet;
};
__device__ inline RowPlace PlaceInRow(unsigned blocks_per_row) {
  const unsigned row = blockIdx.x / blocks_per_row;
  return {row, static_cast<std::int64_t>(blockIdx.x - row * blocks_per_row) * blockDim.x + threadIdx.x};
}

}  // namespace tandem
