// Weights of a linear layer that lie in memory as FP8 or NF4 codes (common/model/weight_layout.h). A weight's value is its fp32
// product, in the order of operations of weight_codecs.h, rounded to bf16; whoever multiplies with it multiplies with that value.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "common/gpu/device.h"
#include "common/gpu/dtype.h"
#include "common/model/weight_layout.h"

namespace tandem {

inline constexpr int kMaxLinearParts = 3;

struct QuantizedMatrix {
  StorageFormat format = StorageFormat::kFp8Row;  // or kFp8Block, kNf4
  std::int64_t rows = 0;
  std::int64_t columns = 0;     // FP8: a multiple of 16, NF4: of 64
  const void* codes = nullptr;  // on a boundary of 16 bytes
  // FP8: fp32 [rows], in blocks [sum over parts of ceil(rows / 128), ceil(columns / 128)]; NF4: uint8 [rows, columns / 64].
  const void* scales = nullptr;
  const float* nested_map = nullptr;     // NF4 alone
  const float* nested_absmax = nullptr;  // NF4: the layer's
  const float* nested_offset = nullptr;  // NF4: [num_parts]
  int num_parts = 0;                     // of NF4 and of FP8 in blocks, as the rest
  std::array<LinearPart, kMaxLinearParts> parts = {};
};
// Requires: IsQuantized(layout.format), and `place` is one of its linear layers. `weights`: the start of the region.
QuantizedMatrix QuantizedMatrixAt(const WeightLayout& layout, const LinearPlace& place, const std::byte* weights);

// output [rows, columns] bf16, on a boundary of 16 bytes. Codes are numbers. Bound by memory.
absl::Status Dequantize(const QuantizedMatrix& matrix, void* output, Device device, void* stream);

// y = x W^T, or y + x W^T, for few rows of x: codes are read once and never written as bf16. Sums in fp32, in an order that
// depends on the matrix's shape alone, rounded once. x is on a boundary of 16 bytes.
inline constexpr std::int64_t kFewRows = 64;
struct MultiplyFewParams {
  QuantizedMatrix weight = {};
  const void* x = nullptr;       // bf16 [num_rows, weight.columns]
  void* y = nullptr;             // [num_rows, weight.rows]
  DType y_dtype = DType::kBf16;  // or kFp32
  bool is_added = false;         // to what y holds
  std::int64_t num_rows = 0;     // at most kFewRows
};
absl::Status MultiplyFew(const MultiplyFewParams& params, Device device, void* stream);

namespace internal {
absl::Status DequantizeCuda(const QuantizedMatrix& matrix, void* output, void* stream);
absl::Status MultiplyFewCuda(const MultiplyFewParams& params, void* stream);
}  // namespace internal

}  // namespace tandem
