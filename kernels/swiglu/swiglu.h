// SwiGLU (Shazeer, 2020, arXiv 2002.05202, equation 6): out = silu(gate) * up, and its backward pass, which makes the output
// anew. Forward, gate and up come as the product's fp32 sums; backward, as elements. Computed in fp32, rounded once.
#pragma once

#include <cstdint>

#include "common/gpu/device.h"
#include "common/gpu/dtype.h"

namespace tandem {

struct SwigluParams {
  DType dtype = DType::kFp32;      // of the output: fp32, bf16
  const float* gate_up = nullptr;  // [num_rows, 2 width], gate first
  void* output = nullptr;          // [num_rows, width]
  std::int64_t num_rows = 0;
  std::int64_t width = 0;
};
absl::Status Swiglu(const SwigluParams& params, Device device, void* stream);

struct SwigluBackwardParams {
  DType dtype = DType::kFp32;         // of all: fp32, bf16
  const void* gate_up = nullptr;      // [num_rows, 2 width]
  const void* grad_output = nullptr;  // [num_rows, width]
  void* grad_gate_up = nullptr;       // [num_rows, 2 width]; may be gate_up
  void* output = nullptr;             // [num_rows, width]: silu(gate) * up
  std::int64_t num_rows = 0;
  std::int64_t width = 0;
};
absl::Status SwigluBackward(const SwigluBackwardParams& params, Device device, void* stream);

}  // namespace tandem
