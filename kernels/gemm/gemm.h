// Matrix products by cuBLASLt (device) or LibTorch-free loops (reference): c = beta c + alpha a b, accumulated in fp32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "common/gpu/device.h"
#include "common/gpu/dtype.h"

namespace tandem {

// A view: element (i, j) lies at data + i row_stride + j column_stride. One of the strides is 1; that of a single row or column
// is not looked at.
struct MatrixView {
  const void* data = nullptr;
  DType dtype = DType::kFp32;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t row_stride = 0;  // in elements
  std::int64_t column_stride = 1;

  MatrixView Transposed() const { return {data, dtype, columns, rows, column_stride, row_stride}; }
};

// a [m, k] and b [k, n] of one type, fp32 or bf16; c [m, n] fp32 or, with bf16 factors, bf16; c's column_stride is 1. Where a
// bf16 c is added to, cuBLASLt may round alpha a b to bf16 before it adds beta c and rounds again; an fp32 c gets it unrounded.
struct GemmParams {
  MatrixView a = {};
  MatrixView b = {};
  MatrixView c = {};  // written, though the view says const
  float alpha = 1;
  float beta = 0;  // 0: what c held is not read
};

inline constexpr std::size_t kGemmWorkspaceBytes = std::size_t{32} << 20;

// Keeps a cuBLASLt handle and, per shape and types, the algorithm that its heuristics name first. fp32 products are true fp32,
// never TF32. Confined to one thread and stream at a time.
class Gemm {
 public:
  // `workspace`: device memory, kGemmWorkspaceBytes recommended; outlives the Gemm. On the CPU it may be empty. Errors: INTERNAL.
  static absl::StatusOr<std::unique_ptr<Gemm>> Create(Device device, std::span<std::byte> workspace);
  virtual ~Gemm() = default;
  // Nothing is launched when m or n is 0; k is 1 or more. Errors: INVALID_ARGUMENT naming shapes, strides or types; INTERNAL
  // (cuBLASLt).
  virtual absl::Status Run(const GemmParams& params, void* stream) = 0;
};

// What Run refuses.
absl::Status CheckGemm(const GemmParams& params);

}  // namespace tandem
