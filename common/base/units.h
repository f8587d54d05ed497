// Byte quantities as people read and write them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "common/base/status.h"

namespace tandem {

constexpr std::uint64_t kKiB = 1024;
constexpr std::uint64_t kMiB = 1024 * kKiB;
constexpr std::uint64_t kGiB = 1024 * kMiB;

// "512 B", "3.0 KiB", "256.0 MiB", "1.5 GiB".
std::string FormatBytes(std::uint64_t bytes);
// A flag's value: "1073741824", "1GiB", "1.5 GiB", "64MiB", "4KiB". Errors: INVALID_ARGUMENT naming the text.
absl::StatusOr<std::uint64_t> ParseBytes(std::string_view text);
// The smallest multiple of `alignment` that is >= value. Requires: alignment > 0, no overflow.
constexpr std::uint64_t RoundUp(std::uint64_t value, std::uint64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}
// a * b, or nullopt-like false when the product does not fit 64 bits.
inline bool MultiplyFits(std::uint64_t a, std::uint64_t b, std::uint64_t* product) {
  return !__builtin_mul_overflow(a, b, product);
}

}  // namespace tandem
