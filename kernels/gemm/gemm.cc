#include "kernels/gemm/gemm.h"

#include <limits>
#include <string>
#include <vector>

#include "kernels/base/elements.h"
#include "kernels/cuda_launchers.h"

namespace tandem {
namespace {

template <typename T>
double Element(const MatrixView& view, std::int64_t row, std::int64_t column) {
  return static_cast<double>(ToFloat(static_cast<const T*>(view.data)[row * view.row_stride + column * view.column_stride]));
}

template <typename Factor, typename Result>
void Multiply(const GemmParams& params) {
  auto* const c = const_cast<Result*>(static_cast<const Result*>(params.c.data));
  std::vector<double> sums(static_cast<std::size_t>(params.c.columns));
  for (std::int64_t i = 0; i < params.c.rows; ++i) {
    sums.assign(sums.size(), 0);
    for (std::int64_t p = 0; p < params.a.columns; ++p) {
      const double factor = Element<Factor>(params.a, i, p);
      for (std::int64_t j = 0; j < params.c.columns; ++j)
        sums[static_cast<std::size_t>(j)] += factor * Element<Factor>(params.b, p, j);
    }
    for (std::int64_t j = 0; j < params.c.columns; ++j) {
      Result* const element = c + i * params.c.row_stride + j * params.c.column_stride;
      double value = static_cast<double>(params.alpha) * sums[static_cast<std::size_t>(j)];
      if (params.beta != 0) value += static_cast<double>(params.beta) * static_cast<double>(ToFloat(*element));
      *element = FromFloat<Result>(static_cast<float>(value));
    }
  }
}

class ReferenceGemm final : public Gemm {
 public:
  absl::Status Run(const GemmParams& params, void*) override {
    TANDEM_RETURN_IF_ERROR(CheckGemm(params));
    VisitElementType(params.a.dtype, [&]<typename Factor>(Factor) {
      VisitElementType(params.c.dtype, [&]<typename Result>(Result) { Multiply<Factor, Result>(params); });
    });
    return absl::OkStatus();
  }
};

std::string Described(const MatrixView& view) {
  return absl::StrCat(DTypeName(view.dtype), " [", view.rows, ", ", view.columns, "] strides ", view.row_stride, ", ",
                      view.column_stride);
}

// Elements neither overlap nor run backwards, and rows or columns are contiguous.
bool IsViewValid(const MatrixView& view) {
  const bool is_row = view.rows <= 1, is_column = view.columns <= 1;
  if (is_row && is_column) return true;
  if (is_row) return view.column_stride >= 1;
  if (is_column) return view.row_stride >= 1;
  return (view.column_stride == 1 && view.row_stride >= view.columns) ||
         (view.row_stride == 1 && view.column_stride >= view.rows);
}

}  // namespace

absl::Status CheckGemm(const GemmParams& params) {
  constexpr std::int64_t kDimensionLimit = std::numeric_limits<std::int32_t>::max();
  const MatrixView &a = params.a, &b = params.b, &c = params.c;
  const auto refuse = [&](const char* why) {
    return absl::InvalidArgumentError(
        absl::StrCat("gemm: ", why, ": a ", Described(a), ", b ", Described(b), ", c ", Described(c)));
  };
  TANDEM_RETURN_IF_ERROR(CheckComputeType("gemm", a.dtype));
  TANDEM_RETURN_IF_ERROR(CheckComputeType("gemm", c.dtype));
  if (a.dtype != b.dtype || (c.dtype == DType::kBf16 && a.dtype != DType::kBf16)) return refuse("types do not go together");
  if (a.rows != c.rows || a.columns != b.rows || b.columns != c.columns || c.rows < 0 || c.columns < 0 || a.columns < 1) {
    return refuse("shapes do not go together");
  }
  if (c.rows > kDimensionLimit || c.columns > kDimensionLimit || a.columns > kDimensionLimit)
    return refuse("a dimension is too long");
  if (!IsViewValid(a) || !IsViewValid(b)) return refuse("strides of a factor");
  if (c.columns > 1 && (c.column_stride != 1 || (c.rows > 1 && c.row_stride < c.columns))) return refuse("strides of c");
  if (c.columns == 1 && c.rows > 1 && c.row_stride < 1) return refuse("strides of c");
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Gemm>> Gemm::Create(Device device, std::span<std::byte> workspace) {
  if (device == Device::kCuda) return internal::CreateCudaGemm(workspace);
  return std::make_unique<ReferenceGemm>();
}

}  // namespace tandem
