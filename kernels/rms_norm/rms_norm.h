// RMSNorm (Zhang and Sennrich, 2019, arXiv 1910.07467, equation 4): y = x / sqrt(mean(x^2) + epsilon) * weight, row by row, and
// its backward pass. x is of the residual stream, which is fp32 whatever the weights are.
#pragma once

#include <cstdint>

#include "common/gpu/device.h"
#include "common/gpu/dtype.h"

namespace tandem {

inline constexpr std::int64_t kMaxRmsNormWidth = 65536;

// Sums are fp32 on the device, fp64 in the reference; rounded once at the end.
struct RmsNormParams {
  DType dtype = DType::kFp32;          // of weight and output: fp32, bf16
  const float* input = nullptr;        // [num_rows, width]
  const void* weight = nullptr;        // [width]
  void* output = nullptr;              // [num_rows, width]; in fp32 and without `rows` it may be the input
  const std::int32_t* rows = nullptr;  // null, or [num_rows] on the device: row i of output is of row rows[i] of input
  std::int64_t num_rows = 0;
  std::int64_t width = 0;  // 1 to kMaxRmsNormWidth
  float epsilon = 0;
};

// `stream` is a cudaStream_t, ignored on the CPU. Nothing is launched for zero rows. Errors: INVALID_ARGUMENT (width),
// UNIMPLEMENTED (no device code in this build), INTERNAL (launch).
absl::Status RmsNorm(const RmsNormParams& params, Device device, void* stream);

// grad_input += d(rms_norm)/dx . grad_output. The weight is frozen.
struct RmsNormBackwardParams {
  DType dtype = DType::kFp32;    // of weight and grad_output: fp32, bf16
  const float* input = nullptr;  // [num_rows, width], what was normed
  const void* weight = nullptr;
  const void* grad_output = nullptr;
  float* grad_input = nullptr;         // added to
  const std::int32_t* rows = nullptr;  // null, or as in RmsNormParams: of input and grad_input; no row twice
  std::int64_t num_rows = 0;
  std::int64_t width = 0;
  float epsilon = 0;
};
absl::Status RmsNormBackward(const RmsNormBackwardParams& params, Device device, void* stream);

}  // namespace tandem
