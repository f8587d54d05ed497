#include "kernels/embedding/embedding.h"

#include "kernels/base/elements.h"
#include "kernels/cuda_launchers.h"

namespace tandem {

absl::Status Embedding(const EmbeddingParams& params, Device device, void* stream) {
  TANDEM_RETURN_IF_ERROR(CheckRows("embedding", params.dtype, params.num_rows, params.width, kWidthLimit));
  if (params.num_rows == 0) return absl::OkStatus();
  if (device == Device::kCuda) return internal::EmbeddingCuda(params, stream);
  VisitElementType(params.dtype, [&]<typename T>(T) {
    for (std::int64_t row = 0; row < params.num_rows; ++row) {
      const std::uint32_t* place = params.token_places == nullptr ? nullptr : params.token_places[row];
      const std::int64_t token_id = place == nullptr ? params.token_ids[row] : *place;
      const T* from = static_cast<const T*>(params.table) + token_id * params.width;
      for (std::int64_t i = 0; i < params.width; ++i) params.output[row * params.width + i] = ToFloat(from[i]);
    }
  });
  return absl::OkStatus();
}

}  // namespace tandem
