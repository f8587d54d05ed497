// RMSNorm (Zhang and Sennrich, 2019, arXiv 1910.07467, equation 4): y = x / sqrt(mean(x^2) + epsilon) * weight, row by row.
#pragma once

#include <cstdint>

#include "kernels/base/device.h"

namespace tandem {

// On the CPU the arrays are fp32, on a GPU bf16; the sum of squares is fp32 (device) or fp64 (reference), rounded once at the
// end.
struct RmsNormParams {
  const void* input = nullptr;   // [num_rows, width]
  const void* weight = nullptr;  // [width]
  void* output = nullptr;        // [num_rows, width]; may be the input
  std::int64_t num_rows = 0;
  std::int64_t width = 0;  // 1 to 65536
  float epsilon = 0;
};

// `stream` is a cudaStream_t, ignored on the CPU. Nothing is launched for zero rows. Errors: INVALID_ARGUMENT (width),
// UNIMPLEMENTED (no device code in this build), INTERNAL (launch).
absl::Status RmsNorm(const RmsNormParams& params, Device device, void* stream);

// The oracle, from the formula; host pointers, fp32.
void RmsNormReference(const RmsNormParams& params);

namespace internal {
absl::Status RmsNormCuda(const RmsNormParams& params, void* stream);
}  // namespace internal

}  // namespace tandem
