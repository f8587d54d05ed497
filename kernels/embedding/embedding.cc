#include "kernels/embedding/embedding.h"

#include <cstring>

#include "kernels/base/elements.h"
#include "kernels/cuda_launchers.h"

namespace tandem {

absl::Status Embedding(const EmbeddingParams& params, Device device, void* stream) {
  TANDEM_RETURN_IF_ERROR(CheckRows("embedding", params.dtype, params.num_rows, params.width, kWidthLimit));
  if (params.num_rows == 0) return absl::OkStatus();
  if (device == Device::kCuda) return internal::EmbeddingCuda(params, stream);
  const std::size_t row_bytes = static_cast<std::size_t>(params.width) * ElementBytes(params.dtype);
  for (std::int64_t row = 0; row < params.num_rows; ++row) {
    std::memcpy(static_cast<std::byte*>(params.output) + static_cast<std::size_t>(row) * row_bytes,
                static_cast<const std::byte*>(params.table) + params.token_ids[row] * row_bytes, row_bytes);
  }
  return absl::OkStatus();
}

}  // namespace tandem
