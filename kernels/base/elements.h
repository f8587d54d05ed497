// Elements of fp32 and bf16 arrays on the host, for the reference paths.
#pragma once

#include <cstdint>
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

constexpr const char* DTypeName(DType dtype) {
  return dtype == DType::kFp32 ? "fp32" : dtype == DType::kBf16 ? "bf16" : "fp8_e4m3";
}

// INVALID_ARGUMENT unless the type is one that the kernels compute with.
inline absl::Status CheckComputeType(const char* kernel, DType dtype) {
  if (dtype == DType::kFp32 || dtype == DType::kBf16) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(kernel, ": type ", DTypeName(dtype), "; fp32 and bf16 are supported"));
}

}  // namespace tandem
