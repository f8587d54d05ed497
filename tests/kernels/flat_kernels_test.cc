// adamw and checksum on the CPU.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "kernels/adamw/adamw.h"
#include "kernels/checksum/checksum.h"
#include "tests/kernels/kernel_arrays.h"

namespace tandem {
namespace {

TEST(SquaredNormTest, IsTheSumOfSquaresAndNanStays) {
  std::vector<std::byte> scratch(AdamWScratchBytes());
  const auto norm = [&scratch](const std::vector<float>& values) {
    const SquaredNormParams params{
        .values = values.data(), .count = static_cast<std::int64_t>(values.size()), .scratch = scratch.data()};
    EXPECT_EQ(SquaredNorm(params, Device::kCpu, nullptr), absl::OkStatus());
    double sum = -1;
    std::memcpy(&sum, scratch.data(), sizeof(sum));
    return sum;
  };
  EXPECT_EQ(norm({}), 0);
  EXPECT_EQ(norm({3, -4}), 25);
  EXPECT_EQ(norm({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17}), 17 * 18 * 35 / 6);
  EXPECT_TRUE(std::isnan(norm({1, std::nanf(""), 2})));
  EXPECT_TRUE(absl::IsInvalidArgument(SquaredNorm({.count = -1}, Device::kCpu, nullptr)));
}

TEST(AdamWUpdateTest, FollowsTheFormulaInDouble) {
  constexpr std::int64_t kCount = 11;
  HostArray p = HostArray::Random(DType::kFp32, kCount, 1), g = HostArray::Random(DType::kFp32, kCount, 2);
  HostArray m = HostArray::Random(DType::kFp32, kCount, 3, 0.1), v = HostArray::Random(DType::kFp32, kCount, 4, 0.1);
  for (std::int64_t i = 0; i < kCount; ++i) v.Set(i, std::abs(v.Get(i)));
  const HostArray p0 = p, m0 = m, v0 = v;
  const AdamWUpdateParams params{.parameters = static_cast<float*>(p.data()),
                                 .gradients = static_cast<const float*>(g.data()),
                                 .first_moments = static_cast<float*>(m.data()),
                                 .second_moments = static_cast<float*>(v.data()),
                                 .count = kCount,
                                 .clip = 0.5f,
                                 .fresh1 = 0.1f,
                                 .beta2 = 0.75f,
                                 .fresh2 = 0.25f,
                                 .step_size = 0.01f,
                                 .inverse_root_bias2 = 2,
                                 .keep = 0.875f,
                                 .epsilon = 1e-3f};
  ASSERT_EQ(AdamWUpdate(params, Device::kCpu, nullptr), absl::OkStatus());
  for (std::int64_t i = 0; i < kCount; ++i) {
    const double gradient = g.Get(i) * 0.5, first = m0.Get(i) * 0.9 + gradient * 0.1;
    const double second = v0.Get(i) * 0.75 + gradient * gradient * 0.25;
    EXPECT_NEAR(m.Get(i), first, 1e-7) << i;
    EXPECT_NEAR(v.Get(i), second, 1e-7) << i;
    EXPECT_NEAR(p.Get(i), p0.Get(i) * 0.875 - 0.01 * first / (std::sqrt(second) * 2 + 1e-3), 1e-6) << i;
  }
  EXPECT_EQ(AdamWUpdate({.count = 0}, Device::kCpu, nullptr), absl::OkStatus());
}

// The header's sentence, word by word.
std::string ChecksumByDefinition(const std::vector<unsigned char>& bytes) {
  const auto mix = [](std::uint64_t x) {
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdULL;
    x ^= x >> 33;
    x *= 0xc4ceb9fe1a85ec53ULL;
    return x ^ (x >> 33);
  };
  std::string digits;
  for (const std::uint64_t factor : {0x9e3779b97f4a7c15ULL, 0xd1342543de82ef95ULL}) {
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i * 8 < bytes.size(); ++i) {
      std::uint64_t word = 0;
      for (std::size_t b = 0; b < 8 && i * 8 + b < bytes.size(); ++b) word += std::uint64_t{bytes[i * 8 + b]} << (8 * b);
      sum += mix((word + 1) * (2 * i + 1) * factor);
    }
    absl::StrAppend(&digits, absl::Hex(mix(sum + bytes.size() * factor), absl::kZeroPad16));
  }
  return digits;
}

TEST(ChecksumTest, FollowsItsDefinitionAtEverySize) {
  std::set<std::string> seen;
  for (std::size_t size = 0; size < 100; ++size) {
    std::vector<unsigned char> bytes(size);
    for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<unsigned char>(RandomBits(1, i));
    const auto checksum = MemoryChecksum(Device::kCpu, bytes.data(), size);
    ASSERT_TRUE(checksum.ok()) << checksum.status();
    EXPECT_EQ(*checksum, ChecksumByDefinition(bytes)) << size;
    EXPECT_TRUE(seen.insert(*checksum).second) << size;
  }
}

TEST(ChecksumTest, ChangesWithAnyBitWithTheSizeAndWithTheOrder) {
  std::vector<std::uint64_t> words = {0, 0, 1, 0, 0, 2};
  std::set<std::string> seen = {MemoryChecksum(Device::kCpu, words.data(), 48).value()};
  for (std::size_t bit = 0; bit < 64 * words.size(); ++bit) {
    words[bit / 64] ^= std::uint64_t{1} << (bit % 64);
    EXPECT_TRUE(seen.insert(MemoryChecksum(Device::kCpu, words.data(), 48).value()).second) << "bit " << bit;
    words[bit / 64] ^= std::uint64_t{1} << (bit % 64);
  }
  const std::vector<std::uint64_t> zeros(8), swapped = {0, 0, 2, 0, 0, 1};
  EXPECT_TRUE(seen.insert(MemoryChecksum(Device::kCpu, swapped.data(), 48).value()).second);
  for (std::size_t size = 0; size <= 64; ++size) {
    EXPECT_TRUE(seen.insert(MemoryChecksum(Device::kCpu, zeros.data(), size).value()).second) << size << " zeros";
  }
}

}  // namespace
}  // namespace tandem
