// RMSNorm (Zhang and Sennrich, 2019, arXiv 1910.07467, equation 4): y = x / sqrt(mean(x^2) + epsilon) * weight, row by row; with
// a residual added first, and its backward pass.
#pragma once

#include <cstdint>

#include "common/gpu/device.h"
#include "common/gpu/dtype.h"

namespace tandem {

// All arrays are of `dtype` (fp32, bf16); sums are fp32 on the device, fp64 in the reference; rounded once at the end.
struct RmsNormParams {
  DType dtype = DType::kFp32;
  const void* input = nullptr;     // [num_rows, width]
  const void* residual = nullptr;  // [num_rows, width] or null: x = input + residual, rounded to dtype, then normed
  void* sum = nullptr;             // [num_rows, width]: x; required with a residual; may be either of the two
  const void* weight = nullptr;    // [width]
  void* output = nullptr;          // [num_rows, width]; without `rows` it may be the input
  const std::int32_t* rows =
      nullptr;  // null, or [num_rows] on the device: row i of output is of row rows[i] of input; no residual
  std::int64_t num_rows = 0;
  std::int64_t width = 0;  // 1 to 65536
  float epsilon = 0;
};

// `stream` is a cudaStream_t, ignored on the CPU. Nothing is launched for zero rows. Errors: INVALID_ARGUMENT (width),
// UNIMPLEMENTED (no device code in this build), INTERNAL (launch).
absl::Status RmsNorm(const RmsNormParams& params, Device device, void* stream);

// grad_input += d(rms_norm)/dx . grad_output. The weight is frozen.
struct RmsNormBackwardParams {
  DType dtype = DType::kFp32;
  const void* input = nullptr;  // [num_rows, width], what was normed
  const void* weight = nullptr;
  const void* grad_output = nullptr;
  void* grad_input = nullptr;          // added to
  const std::int32_t* rows = nullptr;  // null, or as in RmsNormParams: of input and grad_input; no row twice
  std::int64_t num_rows = 0;
  std::int64_t width = 0;
  float epsilon = 0;
};
absl::Status RmsNormBackward(const RmsNormBackwardParams& params, Device device, void* stream);

}  // namespace tandem
