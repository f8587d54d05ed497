// Small passes over rows between the larger kernels of a training step. Device only; all pointers are device memory. `stream` is
// a cudaStream_t. Errors: INVALID_ARGUMENT (dtype), UNIMPLEMENTED (no device code in this build), INTERNAL (launch).
#pragma once

#include <cstdint>

#include "common/gpu/device.h"
#include "common/gpu/dtype.h"

namespace tandem {

// output <- bf16(input), rounded to nearest even.
struct ConvertToBf16Params {
  const float* input = nullptr;  // [count]
  void* output = nullptr;        // [count] bf16
  std::int64_t count = 0;
};
absl::Status ConvertToBf16(const ConvertToBf16Params& params, void* stream);

// output <- fp32(input).
struct ConvertToFp32Params {
  const void* input = nullptr;  // [count] bf16
  float* output = nullptr;      // [count]
  std::int64_t count = 0;
};
absl::Status ConvertToFp32(const ConvertToFp32Params& params, void* stream);

// y <- y + x, in fp32, rounded once.
struct AddParams {
  DType dtype = DType::kFp32;  // fp32, bf16
  void* y = nullptr;           // [count]
  const void* x = nullptr;     // [count]
  std::int64_t count = 0;
};
absl::Status Add(const AddParams& params, void* stream);

// LoRA dropout: element (row, i) is kept and divided by (1 - probability) where RandomUniform(seed, (first_row + row) width + i)
// >= probability, else it becomes 0. The same mask on any device.
struct DropoutParams {
  DType dtype = DType::kFp32;  // fp32, bf16
  void* x = nullptr;           // [num_rows, width]
  std::int64_t num_rows = 0;
  std::int64_t width = 0;
  std::int64_t first_row = 0;
  std::uint64_t seed = 0;
  double probability = 0;  // in [0, 1)
};
absl::Status Dropout(const DropoutParams& params, void* stream);

// output[r] <- sum of factors[n] input[n] over n = members[offsets[r]] ... members[offsets[r + 1] - 1], in that order, in fp32.
// Example: input rows 0, 1, 2 with rows 0 and 2 going to output 0: offsets [0, 2, 3], members [0, 2, 1].
struct SumRowsParams {
  DType dtype = DType::kFp32;             // of input and output: fp32, bf16
  const void* input = nullptr;            // [*, width]
  const float* factors = nullptr;         // one a row of input, or null: 1
  const std::int32_t* offsets = nullptr;  // [num_rows + 1]
  const std::int32_t* members = nullptr;  // [offsets[num_rows]]
  void* output = nullptr;                 // [num_rows, width]; not the input
  std::int64_t num_rows = 0;
  std::int64_t width = 0;
};
absl::Status SumRows(const SumRowsParams& params, void* stream);

// Backward pass of the RMSNorm of each head, y = x / sqrt(mean(x^2) + epsilon) * weight over head_dim features (Qwen 3's norms of
// q and k): the gradient of y becomes that of x.
struct NormHeadsBackwardParams {
  DType dtype = DType::kFp32;      // fp32, bf16
  void* grad = nullptr;            // [num_rows, row_stride]; of the first num_heads heads of each row
  std::int64_t row_stride = 0;     // in elements
  const void* unnormed = nullptr;  // [num_rows, unnormed_stride]: x
  std::int64_t unnormed_stride = 0;
  const void* weight = nullptr;  // [head_dim]
  std::int64_t num_rows = 0;
  std::int64_t num_heads = 0;
  std::int64_t head_dim = 0;
  float epsilon = 0;
};
absl::Status NormHeadsBackward(const NormHeadsBackwardParams& params, void* stream);

}  // namespace tandem
