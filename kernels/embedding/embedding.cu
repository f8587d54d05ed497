// A thread widens one packet of 16 bytes of the table, or one element where addresses or widths do not allow it. Bytes moved,
// with e the table's bytes: (e + 4) num_rows width. Bound by memory.
#include <cuda_runtime.h>

#include "common/gpu/cuda_status.h"
#include "kernels/base/device_elements.cuh"
#include "kernels/cuda_launchers.h"

namespace tandem {
namespace {

template <typename T, int kCount>
__global__ void EmbeddingKernel(const T* __restrict__ table, const std::uint32_t* __restrict__ token_ids,
                                const std::uint32_t* const* __restrict__ token_places, float* __restrict__ output,
                                std::int64_t width, unsigned blocks_per_row) {
  const RowPlace place = PlaceInRow(blocks_per_row);
  const std::int64_t i = place.packet * kCount;
  if (i >= width) return;
  const std::uint32_t* const token_place = token_places == nullptr ? nullptr : token_places[place.row];
  const std::int64_t token_id = token_place == nullptr ? token_ids[place.row] : *token_place;
  float values[kCount];
  LoadFloats(table + token_id * width + i, values);
  StoreFloats(output + place.row * width + i, values);
}

}  // namespace

namespace internal {

absl::Status EmbeddingCuda(const EmbeddingParams& params, void* stream) {
  const bool is_aligned =
      IsPacketAligned({params.table, params.output}, {params.width * static_cast<std::int64_t>(ElementBytes(params.dtype))});
  VisitPacketType(params.dtype, is_aligned, [&]<typename T, int kCount>() {
    const RowGrid grid = RowGridFor(params.num_rows, params.width / kCount);
    EmbeddingKernel<T, kCount><<<grid.blocks, grid.threads, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const T*>(params.table), params.token_ids, params.token_places, params.output, params.width,
        grid.blocks_per_row);
  });
  return CudaToStatus(cudaGetLastError(), "embedding launch");
}

}  // namespace internal
}  // namespace tandem
