// Rotary position embedding (Su et al., 2021, arXiv 2104.09864), half-split pairs (i, i + head_dim / 2), in place.
#pragma once

#include <cstdint>

#include "common/gpu/device.h"
#include "common/gpu/dtype.h"

namespace tandem {

struct RopeParams {
  DType dtype = DType::kFp32;
  void* x = nullptr;  // [num_rows, row_stride]; the first num_heads heads of each row are rotated
  std::int64_t num_rows = 0;
  std::int64_t row_stride = 0;  // in elements
  std::int64_t num_heads = 0;
  std::int64_t head_dim = 0;                // even
  const std::int32_t* positions = nullptr;  // [num_rows]
  const float* cosines = nullptr;           // [max_positions, head_dim / 2]
  const float* sines = nullptr;
  float sign = 1;  // -1 rotates back: the gradient
};
// Errors: INVALID_ARGUMENT (shape), UNIMPLEMENTED (no device code in this build), INTERNAL (launch).
absl::Status Rope(const RopeParams& params, Device device, void* stream);

}  // namespace tandem
