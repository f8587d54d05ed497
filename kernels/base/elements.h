// Elements of fp32 and bf16 arrays on the host, for the reference paths.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "common/base/status.h"
#include "common/gpu/dtype.h"
#include "common/model/weight_codecs.h"

namespace tandem {

struct Bf16 {
  std::uint16_t bits = 0;
};

inline float ToFloat(float value) { return value; }
inline float ToFloat(Bf16 value) { return Bf16ToFloat(value.bits); }

template <typename T>
T FromFloat(float value) {
  if constexpr (std::is_same_v<T, Bf16>) {
    return {FloatToBf16(value)};
  } else {
    return value;
  }
}

// Calls visit with a value of the host's element type.
template <typename Visitor>
void VisitElementType(DType dtype, Visitor&& visit) {
  if (dtype == DType::kBf16) {
    visit(Bf16{});
  } else {
    visit(0.0f);
  }
}

// The least that a block works on, so that num_rows * ceil(width / kMinBlockWidth) blocks are enough for every kernel over rows.
inline constexpr std::int64_t kMinBlockWidth = 256;

// INVALID_ARGUMENT unless the type is one that the kernels compute with.
inline absl::Status CheckComputeType(const char* kernel, DType dtype) {
  if (dtype == DType::kFp32 || dtype == DType::kBf16) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(kernel, ": type ", DTypeName(dtype), "; fp32 and bf16 are supported"));
}

// As above, and unless [num_rows, width] can be launched: no row is fine, no column is not.
inline absl::Status CheckRows(const char* kernel, DType dtype, std::int64_t num_rows, std::int64_t width,
                              std::int64_t width_limit) {
  constexpr std::int64_t kBlockLimit = std::numeric_limits<std::int32_t>::max();  // of a grid
  if (width < 1 || width > width_limit || num_rows < 0 || num_rows > kBlockLimit / ((width - 1) / kMinBlockWidth + 1)) {
    return absl::InvalidArgumentError(absl::StrCat(kernel, ": [", num_rows, ", ", width, "]; width is 1 to ", width_limit,
                                                   ", rows are 0 to ", kBlockLimit, " for each ", kMinBlockWidth, " of width"));
  }
  return CheckComputeType(kernel, dtype);
}
inline constexpr std::int64_t kWidthLimit = std::int64_t{1} << 30;  // of rows without a limit of their own

}  // namespace tandem
