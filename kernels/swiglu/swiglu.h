// SwiGLU (Shazeer, 2020, arXiv 2002.05202, equation 6): out = silu(gate) * up, and its backward pass. Computed in fp32, rounded
// once.
#pragma once

#include <cstdint>

#include "common/gpu/device.h"
#include "common/gpu/dtype.h"

namespace tandem {

struct SwigluParams {
  DType dtype = DType::kFp32;
  const void* gate_up = nullptr;  // [num_rows, 2 width], gate first
  void* output = nullptr;         // [num_rows, width]
  std::int64_t num_rows = 0;
  std::int64_t width = 0;
};
absl::Status Swiglu(const SwigluParams& params, Device device, void* stream);

struct SwigluBackwardParams {
  DType dtype = DType::kFp32;
  void* gate_up = nullptr;            // [num_rows, 2 width]; replaced by its gradient
  const void* grad_output = nullptr;  // [num_rows, width]
  std::int64_t num_rows = 0;
  std::int64_t width = 0;
};
absl::Status SwigluBackward(const SwigluBackwardParams& params, Device device, void* stream);

}  // namespace tandem
