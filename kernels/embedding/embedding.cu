// A thread copies one packet of 16 bytes, or one element where addresses or widths do not allow it. Bytes moved: 2 e num_rows
// width. Bound by memory.
#include <cuda_runtime.h>

#include "common/gpu/cuda_status.h"
#include "kernels/base/device_elements.cuh"
#include "kernels/cuda_launchers.h"

namespace tandem {
namespace {

template <typename Packet>
__global__ void EmbeddingKernel(const Packet* __restrict__ table, const std::uint32_t* __restrict__ token_ids,
                                Packet* __restrict__ output, std::int64_t packets_per_row, unsigned blocks_per_row) {
  const RowPlace place = PlaceInRow(blocks_per_row);
  if (place.packet >= packets_per_row) return;
  const auto token_id = static_cast<std::int64_t>(token_ids[place.row]);
  output[place.row * packets_per_row + place.packet] = table[token_id * packets_per_row + place.packet];
}

template <typename Packet>
void Launch(const EmbeddingParams& params, std::int64_t row_bytes, cudaStream_t stream) {
  const std::int64_t packets_per_row = row_bytes / static_cast<std::int64_t>(sizeof(Packet));
  const RowGrid grid = RowGridFor(params.num_rows, packets_per_row);
  EmbeddingKernel<<<grid.blocks, grid.threads, 0, stream>>>(static_cast<const Packet*>(params.table), params.token_ids,
                                                            static_cast<Packet*>(params.output), packets_per_row,
                                                            grid.blocks_per_row);
}

}  // namespace

namespace internal {

absl::Status EmbeddingCuda(const EmbeddingParams& params, void* stream) {
  const std::int64_t row_bytes = params.width * static_cast<std::int64_t>(ElementBytes(params.dtype));
  if (IsPacketAligned({params.table, params.output}, {row_bytes})) {
    Launch<uint4>(params, row_bytes, static_cast<cudaStream_t>(stream));
  } else if (params.dtype == DType::kBf16) {
    Launch<std::uint16_t>(params, row_bytes, static_cast<cudaStream_t>(stream));
  } else {
    Launch<std::uint32_t>(params, row_bytes, static_cast<cudaStream_t>(stream));
  }
  return CudaToStatus(cudaGetLastError(), "embedding launch");
}

}  // namespace internal
}  // namespace tandem
