// Rows of the embedding by token id, widened to the fp32 of the residual stream.
#pragma once

#include <cstdint>

#include "common/gpu/device.h"
#include "common/gpu/dtype.h"

namespace tandem {

struct EmbeddingParams {
  DType dtype = DType::kFp32;                // of the table: fp32, bf16
  const void* table = nullptr;               // [vocab_size, width]
  const std::uint32_t* token_ids = nullptr;  // [num_rows], each below vocab_size
  // [num_rows] or null. An entry that is not null names the place where the row's id lies, instead of token_ids[row].
  const std::uint32_t* const* token_places = nullptr;
  float* output = nullptr;  // [num_rows, width]
  std::int64_t num_rows = 0;
  std::int64_t width = 0;
};
absl::Status Embedding(const EmbeddingParams& params, Device device, void* stream);

}  // namespace tandem
