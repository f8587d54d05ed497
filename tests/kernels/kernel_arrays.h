// Arrays of one number type for kernel tests: filled by seed, compared with NaN and infinity first.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "common/base/random.h"
#include "kernels/base/elements.h"

namespace tandem {

class HostArray {
 public:
  HostArray(DType dtype, std::int64_t count) : dtype_(dtype), bytes_(static_cast<std::size_t>(count) * ElementBytes(dtype)) {}
  // Uniform in [-scale, scale).
  static HostArray Random(DType dtype, std::int64_t count, std::uint64_t seed, double scale = 1) {
    HostArray array(dtype, count);
    for (std::int64_t i = 0; i < count; ++i) {
      array.Set(i, static_cast<float>((RandomUniform(seed, static_cast<std::uint64_t>(i)) * 2 - 1) * scale));
    }
    return array;
  }

  std::int64_t count() const { return static_cast<std::int64_t>(bytes_.size() / ElementBytes(dtype_)); }
  DType dtype() const { return dtype_; }
  void* data() { return bytes_.data(); }
  const void* data() const { return bytes_.data(); }
  float* floats() { return static_cast<float*>(data()); }  // requires: fp32
  const float* floats() const { return static_cast<const float*>(data()); }
  const std::vector<std::byte>& bytes() const { return bytes_; }
  std::vector<std::byte>* mutable_bytes() { return &bytes_; }

  float Get(std::int64_t i) const {
    const std::byte* element = bytes_.data() + static_cast<std::size_t>(i) * ElementBytes(dtype_);
    if (dtype_ == DType::kFp32) {
      float value = 0;
      std::memcpy(&value, element, sizeof(value));
      return value;
    }
    std::uint16_t bits = 0;
    std::memcpy(&bits, element, sizeof(bits));
    return Bf16ToFloat(bits);
  }
  void Set(std::int64_t i, float value) {
    std::byte* element = bytes_.data() + static_cast<std::size_t>(i) * ElementBytes(dtype_);
    if (dtype_ == DType::kFp32) {
      std::memcpy(element, &value, sizeof(value));
      return;
    }
    const std::uint16_t bits = FloatToBf16(value);
    std::memcpy(element, &bits, sizeof(bits));
  }

 private:
  DType dtype_;
  std::vector<std::byte> bytes_;
};

// One unit in the last place, relative: what two results differ by that were rounded from the two sides of a tie.
constexpr double LastPlace(DType dtype) { return dtype == DType::kFp32 ? 0x1p-23 : 0x1p-7; }

// |actual - expected| <= relative |expected| + absolute, everywhere; NaN and infinities in the same places.
inline void ExpectClose(const HostArray& actual, const HostArray& expected, double relative, double absolute,
                        const std::string& what) {
  ASSERT_EQ(actual.count(), expected.count());
  double worst = 0, worst_error = 0;
  std::int64_t worst_index = -1;
  for (std::int64_t i = 0; i < expected.count(); ++i) {
    const double a = actual.Get(i), e = expected.Get(i);
    ASSERT_EQ(std::isnan(a), std::isnan(e)) << what << ": element " << i << " is " << a << ", expected " << e;
    if (std::isnan(e)) continue;
    if (std::isinf(a) || std::isinf(e)) {
      ASSERT_EQ(a, e) << what << ": element " << i;
      continue;
    }
    const double share = std::abs(a - e) / (relative * std::abs(e) + absolute);
    if (!(share <= worst)) worst = share, worst_error = std::abs(a - e), worst_index = i;
  }
  EXPECT_LE(worst, 1) << what << ": of " << expected.count() << " elements, number " << worst_index << " is off by "
                      << worst_error << ": " << (worst_index < 0 ? 0 : actual.Get(worst_index)) << ", expected "
                      << (worst_index < 0 ? 0 : expected.Get(worst_index)) << "; allowed are " << relative << " relative, "
                      << absolute << " absolute";
}

}  // namespace tandem
