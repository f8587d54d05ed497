// A thread takes every (grid's size)-th word; blocks add their sums to the two in device memory, whose order does not matter
// modulo 2^64. Bytes moved: size_bytes. Six 64-bit multiplications a word bind it before memory does: about 2 TB/s are expected.
#include <cuda_runtime.h>

#include <algorithm>
#include <mutex>

#include "common/gpu/cuda_status.h"
#include "kernels/base/device_elements.cuh"
#include "kernels/checksum/checksum_words.h"
#include "kernels/cuda_launchers.h"

namespace tandem {
namespace {

constexpr unsigned kThreads = 256;

// The module's own 16 bytes, so that a checksum needs no scratch of its caller.
__device__ unsigned long long device_sums[2];

__global__ void ChecksumKernel(const std::uint64_t* __restrict__ words, std::int64_t size_bytes) {
  __shared__ unsigned long long first_warps[kThreads / 32], second_warps[kThreads / 32];
  const std::int64_t num_words = size_bytes / 8, num_places = (size_bytes + 7) / 8;
  constexpr std::uint64_t kFirst = internal::kChecksumFactors[0], kSecond = internal::kChecksumFactors[1];
  unsigned long long first = 0, second = 0;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < num_places;
       i += static_cast<std::int64_t>(gridDim.x) * kThreads) {
    std::uint64_t word = 0;
    if (i < num_words) {
      word = words[i];
    } else {
      const auto* const rest = reinterpret_cast<const unsigned char*>(words + i);
      for (int byte = 0; byte < static_cast<int>(size_bytes % 8); ++byte)
        word |= static_cast<std::uint64_t>(rest[byte]) << (8 * byte);
    }
    const std::uint64_t placed = internal::PlaceChecksumWord(word, static_cast<std::uint64_t>(i));
    first += internal::MixChecksumWord(placed * kFirst);
    second += internal::MixChecksumWord(placed * kSecond);
  }
  first = BlockSum(first, first_warps);
  second = BlockSum(second, second_warps);
  if (threadIdx.x == 0) {
    atomicAdd(&device_sums[0], first);
    atomicAdd(&device_sums[1], second);
  }
}

}  // namespace

namespace internal {

absl::Status ChecksumSumsCuda(const void* data, std::size_t size_bytes, std::uint64_t (&sums)[2]) {
  constexpr std::int64_t kMaxBlocks = 2048;  // some rounds of the largest card
  static std::mutex mutex;                   // of device_sums
  const std::lock_guard lock(mutex);
  const cudaStream_t stream = cudaStreamPerThread;
  void* scratch = nullptr;
  TANDEM_RETURN_IF_ERROR(CudaToStatus(cudaGetSymbolAddress(&scratch, device_sums), "checksum scratch"));
  TANDEM_RETURN_IF_ERROR(CudaToStatus(cudaMemsetAsync(scratch, 0, sizeof(device_sums), stream), "checksum scratch"));
  if (size_bytes > 0) {
    const auto num_places = static_cast<std::int64_t>((size_bytes + 7) / 8);
    const auto blocks = static_cast<unsigned>(std::min(kMaxBlocks, (num_places + kThreads - 1) / kThreads));
    ChecksumKernel<<<blocks, kThreads, 0, stream>>>(static_cast<const std::uint64_t*>(data),
                                                    static_cast<std::int64_t>(size_bytes));
    TANDEM_RETURN_IF_ERROR(CudaToStatus(cudaGetLastError(), "checksum launch"));
  }
  TANDEM_RETURN_IF_ERROR(
      CudaToStatus(cudaMemcpyAsync(sums, scratch, sizeof(device_sums), cudaMemcpyDeviceToHost, stream), "checksum result"));
  return CudaToStatus(cudaStreamSynchronize(stream), "checksum");
}

}  // namespace internal
}  // namespace tandem
