// cuBLASLt counts columns first, and a matrix whose rows are contiguous is to it the transposed one. So c^T = b^T a^T is what it
// is asked for: its A is our b, its B our a, its m our n.
#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <bit>
#include <unordered_map>
#include <utility>

#include "common/base/log.h"
#include "common/base/random.h"
#include "kernels/cuda_launchers.h"

namespace tandem::internal {
namespace {

absl::Status CublasToStatus(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat("gemm: ", what, ": ", cublasLtGetStatusName(status), ": ", cublasLtGetStatusString(status)));
}

// A matrix in cuBLASLt's order of memory. `is_transposed`: what is stored is the transpose of what the product takes.
struct ColumnMajor {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t leading = 1;
  bool is_transposed = false;
};

// The transpose of `view`, [view.columns, view.rows], which cuBLASLt takes for its A or B.
ColumnMajor TransposeOf(const MatrixView& view) {
  // A single column whose elements touch is better read as one than as rows of one element. Of a single row or column only the
  // stride along it counts.
  const bool is_one_column = view.columns == 1 && view.row_stride == 1;
  const bool are_rows_contiguous = view.columns == 1 || view.column_stride == 1;
  if (are_rows_contiguous && !is_one_column) {
    return {.rows = view.columns, .columns = view.rows, .leading = view.rows == 1 ? view.columns : view.row_stride};
  }
  return {.rows = view.rows,
          .columns = view.columns,
          .leading = view.columns == 1 ? view.rows : view.column_stride,
          .is_transposed = true};
}

// cuBLASLt asks for alignment as a power of two and looks no further than 256.
std::uint32_t AlignmentOf(const void* pointer) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  return static_cast<std::uint32_t>(std::uintptr_t{1} << std::min(std::countr_zero(address), 8));
}

cudaDataType CudaType(DType dtype) { return dtype == DType::kBf16 ? CUDA_R_16BF : CUDA_R_32F; }

// All that an algorithm depends on.
struct ShapeKey {
  std::array<std::int64_t, 6> sizes;        // m, n, k and leading dimensions, as cuBLASLt counts them
  std::array<std::uint32_t, 3> alignments;  // A, B, C in bytes
  std::array<bool, 2> is_transposed;        // A, B
  std::array<DType, 2> dtypes;              // factors, result
  bool operator==(const ShapeKey&) const = default;
};
struct ShapeKeyHash {
  std::size_t operator()(const ShapeKey& key) const {
    std::uint64_t hash = 0;
    const auto add = [&hash](std::uint64_t value) { hash = DeriveSeed(hash, value); };
    for (const std::int64_t size : key.sizes) add(static_cast<std::uint64_t>(size));
    for (const std::uint32_t alignment : key.alignments) add(alignment);
    for (const bool is_transposed : key.is_transposed) add(is_transposed ? 1 : 0);
    for (const DType dtype : key.dtypes) add(static_cast<std::uint64_t>(dtype));
    return hash;
  }
};

class CublasLtGemm final : public Gemm {
 public:
  CublasLtGemm(cublasLtHandle_t handle, std::span<std::byte> workspace) : handle_(handle), workspace_(workspace) {}
  ~CublasLtGemm() override {
    if (const absl::Status status = CublasToStatus(cublasLtDestroy(handle_), "destroying the handle"); !status.ok())
      TANDEM_LOG(kWarning, "gpu", status.ToString());
  }

  absl::Status Run(const GemmParams& params, void* stream) override {
    TANDEM_RETURN_IF_ERROR(CheckGemm(params));
    if (params.c.rows == 0 || params.c.columns == 0) return absl::OkStatus();
    const ColumnMajor a = TransposeOf(params.b), b = TransposeOf(params.a);
    const ColumnMajor c{.rows = params.c.columns,
                        .columns = params.c.rows,
                        .leading = params.c.rows == 1 ? params.c.columns : params.c.row_stride};
    const cudaDataType factor_type = CudaType(params.a.dtype), result_type = CudaType(params.c.dtype);

    cublasLtMatmulDescOpaque_t product;
    cublasLtMatrixLayoutOpaque_t a_layout, b_layout, c_layout;
    // With fp32 factors CUBLAS_COMPUTE_32F is fp32 arithmetic; TF32 has a compute type of its own.
    TANDEM_RETURN_IF_ERROR(CublasToStatus(cublasLtMatmulDescInit(&product, CUBLAS_COMPUTE_32F, CUDA_R_32F), "product"));
    TANDEM_RETURN_IF_ERROR(SetTransposed(&product, CUBLASLT_MATMUL_DESC_TRANSA, a.is_transposed));
    TANDEM_RETURN_IF_ERROR(SetTransposed(&product, CUBLASLT_MATMUL_DESC_TRANSB, b.is_transposed));
    TANDEM_RETURN_IF_ERROR(InitLayout(&a_layout, factor_type, a));
    TANDEM_RETURN_IF_ERROR(InitLayout(&b_layout, factor_type, b));
    TANDEM_RETURN_IF_ERROR(InitLayout(&c_layout, result_type, c));

    const ShapeKey key{.sizes = {c.rows, c.columns, params.a.columns, a.leading, b.leading, c.leading},
                       .alignments = {AlignmentOf(params.b.data), AlignmentOf(params.a.data), AlignmentOf(params.c.data)},
                       .is_transposed = {a.is_transposed, b.is_transposed},
                       .dtypes = {params.a.dtype, params.c.dtype}};
    auto found = algorithms_.find(key);
    if (found == algorithms_.end()) {
      TANDEM_ASSIGN_OR_RETURN(const cublasLtMatmulAlgo_t algorithm,
                              ChooseAlgorithm(key, &product, &a_layout, &b_layout, &c_layout));
      constexpr std::size_t kMaxAlgorithms = 16384;  // 3 MB; the number of tokens varies from step to step
      if (algorithms_.size() >= kMaxAlgorithms) algorithms_.clear();
      found = algorithms_.emplace(key, algorithm).first;
    }
    auto* const result = const_cast<void*>(params.c.data);
    return CublasToStatus(cublasLtMatmul(handle_, &product, &params.alpha, params.b.data, &a_layout, params.a.data, &b_layout,
                                         &params.beta, result, &c_layout, result, &c_layout, &found->second, workspace_.data(),
                                         workspace_.size(), static_cast<cudaStream_t>(stream)),
                          "launch");
  }

 private:
  static absl::Status SetTransposed(cublasLtMatmulDesc_t product, cublasLtMatmulDescAttributes_t which, bool is_transposed) {
    const cublasOperation_t operation = is_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    return CublasToStatus(cublasLtMatmulDescSetAttribute(product, which, &operation, sizeof(operation)), "operation");
  }

  static absl::Status InitLayout(cublasLtMatrixLayout_t layout, cudaDataType type, const ColumnMajor& matrix) {
    return CublasToStatus(cublasLtMatrixLayoutInit(layout, type, static_cast<std::uint64_t>(matrix.rows),
                                                   static_cast<std::uint64_t>(matrix.columns), matrix.leading),
                          "layout");
  }

  absl::StatusOr<cublasLtMatmulAlgo_t> ChooseAlgorithm(const ShapeKey& key, cublasLtMatmulDesc_t product,
                                                       cublasLtMatrixLayout_t a_layout, cublasLtMatrixLayout_t b_layout,
                                                       cublasLtMatrixLayout_t c_layout) const {
    cublasLtMatmulPreferenceOpaque_t preference;
    TANDEM_RETURN_IF_ERROR(CublasToStatus(cublasLtMatmulPreferenceInit(&preference), "preference"));
    const auto set = [&preference](cublasLtMatmulPreferenceAttributes_t which, auto value) {
      return CublasToStatus(cublasLtMatmulPreferenceSetAttribute(&preference, which, &value, sizeof(value)), "preference");
    };
    TANDEM_RETURN_IF_ERROR(set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<std::uint64_t>(workspace_.size())));
    // Parts of a sum are never rounded to bf16 on the way.
    TANDEM_RETURN_IF_ERROR(
        set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
            static_cast<std::uint32_t>(CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE)));
    TANDEM_RETURN_IF_ERROR(set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, key.alignments[0]));
    TANDEM_RETURN_IF_ERROR(set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key.alignments[1]));
    TANDEM_RETURN_IF_ERROR(set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, key.alignments[2]));
    TANDEM_RETURN_IF_ERROR(set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key.alignments[2]));
    cublasLtMatmulHeuristicResult_t result{};
    int num_results = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle_, product, a_layout, b_layout, c_layout, c_layout,
                                                                 &preference, 1, &result, &num_results);
    if (status != CUBLAS_STATUS_SUCCESS || num_results == 0) {
      return absl::InternalError(absl::StrCat("gemm: no algorithm: ", cublasLtGetStatusName(status), ": m ", key.sizes[1], ", n ",
                                              key.sizes[0], ", k ", key.sizes[2], ", leading dimensions of b, a, c ",
                                              key.sizes[3], ", ", key.sizes[4], ", ", key.sizes[5], ", their alignments ",
                                              key.alignments[0], ", ", key.alignments[1], ", ", key.alignments[2],
                                              " bytes, workspace ", workspace_.size(), " bytes"));
    }
    return result.algo;
  }

  const cublasLtHandle_t handle_;
  const std::span<std::byte> workspace_;
  std::unordered_map<ShapeKey, cublasLtMatmulAlgo_t, ShapeKeyHash> algorithms_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Gemm>> CreateCudaGemm(std::span<std::byte> workspace) {
  constexpr std::size_t kWorkspaceAlignment = 256;
  const std::size_t skipped = -reinterpret_cast<std::uintptr_t>(workspace.data()) % kWorkspaceAlignment;
  cublasLtHandle_t handle = nullptr;
  TANDEM_RETURN_IF_ERROR(CublasToStatus(cublasLtCreate(&handle), "making a handle"));
  return std::make_unique<CublasLtGemm>(handle, workspace.subspan(std::min(skipped, workspace.size())));
}

}  // namespace tandem::internal
