// adamw and checksum on the device against the CPU.
#include <cmath>

#include "kernels/adamw/adamw.h"
#include "kernels/checksum/checksum.h"
#include "tests/kernels/device_array.h"

namespace tandem {
namespace {

class FlatKernelsGpuTest : public DeviceKernelTest {};

TEST_F(FlatKernelsGpuTest, TheNormIsTheReferencesAndTheSameBitsAgain) {
  std::vector<std::byte> scratch(AdamWScratchBytes());
  const DeviceArray device_scratch(scratch);
  for (const std::int64_t count : {0, 1, 255, 257, 100'003, 3'000'000}) {
    const std::string what = absl::StrCat("squared norm of ", count);
    const HostArray values = HostArray::Random(DType::kFp32, count, 1);
    const DeviceArray device_values(values);
    const auto on_device = [&] {
      Fence(SquaredNorm(
                {.values = static_cast<const float*>(device_values.data()), .count = count, .scratch = device_scratch.data()},
                Device::kCuda, stream()),
            what);
      double sum = -1;
      std::memcpy(&sum, device_scratch.Read(what).data(), sizeof(sum));
      return sum;
    };
    ASSERT_EQ(SquaredNorm({.values = static_cast<const float*>(values.data()), .count = count, .scratch = scratch.data()},
                          Device::kCpu, nullptr),
              absl::OkStatus());
    double expected = -1;
    std::memcpy(&expected, scratch.data(), sizeof(expected));
    const double first = on_device();
    EXPECT_NEAR(first, expected, 1e-11 * expected) << what;
    EXPECT_EQ(on_device(), first) << what;
  }
  const HostArray bad = [] {
    HostArray values(DType::kFp32, 1000);
    values.Set(777, std::nanf(""));
    return values;
  }();
  const DeviceArray device_bad(bad);
  ASSERT_TRUE(
      Fence(SquaredNorm({.values = static_cast<const float*>(device_bad.data()), .count = 1000, .scratch = device_scratch.data()},
                        Device::kCuda, stream()),
            "nan"));
  double sum = 0;
  std::memcpy(&sum, device_scratch.Read("nan").data(), sizeof(sum));
  EXPECT_TRUE(std::isnan(sum));
}

TEST_F(FlatKernelsGpuTest, TheUpdateIsTheReferences) {
  for (const std::int64_t count : {0, 1, 31, 1024, 1025, 200'000}) {
    for (const std::size_t offset : {std::size_t{0}, std::size_t{4}}) {
      const std::string what = absl::StrCat("adamw of ", count, " offset ", offset);
      HostArray p = HostArray::Random(DType::kFp32, count, 1), m = HostArray::Random(DType::kFp32, count, 3, 0.1);
      const HostArray g = HostArray::Random(DType::kFp32, count, 2);
      HostArray v = HostArray::Random(DType::kFp32, count, 4, 0.1);
      for (std::int64_t i = 0; i < count; ++i) v.Set(i, std::abs(v.Get(i)));
      const DeviceArray device_p(p, offset), device_g(g, offset), device_m(m, offset), device_v(v, offset);
      AdamWUpdateParams params{.parameters = static_cast<float*>(device_p.data()),
                               .gradients = static_cast<const float*>(device_g.data()),
                               .first_moments = static_cast<float*>(device_m.data()),
                               .second_moments = static_cast<float*>(device_v.data()),
                               .count = count,
                               .clip = 0.3f,
                               .fresh1 = 0.1f,
                               .beta2 = 0.99f,
                               .fresh2 = 0.01f,
                               .step_size = 0.01f,
                               .inverse_root_bias2 = 3,
                               .keep = 0.9f,
                               .epsilon = 1e-8f};
      if (!Fence(AdamWUpdate(params, Device::kCuda, stream()), what)) return;
      params.parameters = static_cast<float*>(p.data());
      params.gradients = static_cast<const float*>(g.data());
      params.first_moments = static_cast<float*>(m.data());
      params.second_moments = static_cast<float*>(v.data());
      ASSERT_EQ(AdamWUpdate(params, Device::kCpu, nullptr), absl::OkStatus());
      // The device fuses multiplications with additions.
      const double unit = LastPlace(DType::kFp32);
      ExpectClose(device_m.Read(DType::kFp32, what), m, 2 * unit, 0.1 * unit, what + " first moments");
      ExpectClose(device_v.Read(DType::kFp32, what), v, 4 * unit, 1e-30, what + " second moments");
      ExpectClose(device_p.Read(DType::kFp32, what), p, 2 * unit, 2 * unit, what + " parameters");
    }
  }
}

TEST_F(FlatKernelsGpuTest, ChecksumsAreTheCpusBitForBit) {
  for (const std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{7}, std::size_t{8}, std::size_t{9},
                                 std::size_t{2047}, std::size_t{2048}, std::size_t{2049}, std::size_t{9'000'003}}) {
    std::vector<std::byte> bytes(size);
    for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(RandomBits(size, i));
    const DeviceArray device_bytes(bytes, 8);
    const auto on_device = MemoryChecksum(Device::kCuda, device_bytes.data(), size);
    ASSERT_TRUE(on_device.ok()) << on_device.status();
    EXPECT_EQ(*on_device, MemoryChecksum(Device::kCpu, bytes.data(), size).value()) << size;
  }
}

}  // namespace
}  // namespace tandem
