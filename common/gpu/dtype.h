// Number types of arrays in memory.
#pragma once

#include <cstddef>

namespace tandem {

enum class DType { kFp32, kBf16, kFp8E3m4 };

constexpr const char* DTypeName(DType dtype) {
  return dtype == DType::kFp32 ? "fp32" : dtype == DType::kBf16 ? "bf16" : "fp8_e3m4";
}
constexpr std::size_t ElementBytes(DType dtype) { return dtype == DType::kFp32 ? 4 : dtype == DType::kBf16 ? 2 : 1; }

}  // namespace tandem
