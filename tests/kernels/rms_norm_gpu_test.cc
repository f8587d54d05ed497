#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "common/base/random.h"
#include "kernels/rms_norm/rms_norm.h"

namespace tandem {
namespace {

std::uint16_t ToBf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
float FromBf16(std::uint16_t value) { return std::bit_cast<float>(static_cast<std::uint32_t>(value) << 16); }

class RmsNormGpuTest : public ::testing::TestWithParam<std::pair<std::int64_t, std::int64_t>> {};

TEST_P(RmsNormGpuTest, EqualsTheReferenceAndWritesNothingElse) {
  if (!HasCudaDevice()) GTEST_SKIP() << "no CUDA device";
  constexpr std::uint16_t kGuard = 0x7fc1;  // a NaN that no result has
  const auto [rows, width] = GetParam();
  const auto count = static_cast<std::size_t>(rows * width);
  std::vector<float> input(count), weight(static_cast<std::size_t>(width)), expected(count);
  std::vector<std::uint16_t> input16(count), weight16(weight.size()), output16(count + 64, kGuard);
  for (std::size_t i = 0; i < count; ++i) {
    input16[i] = ToBf16(static_cast<float>(RandomUniform(3, i) * 8 - 4));
    input[i] = FromBf16(input16[i]);
  }
  for (std::size_t i = 0; i < weight.size(); ++i) {
    weight16[i] = ToBf16(static_cast<float>(RandomUniform(4, i) + 0.5));
    weight[i] = FromBf16(weight16[i]);
  }
  RmsNormReference({input.data(), weight.data(), expected.data(), rows, width, 1e-5f});

  void *device_input = nullptr, *device_weight = nullptr, *device_output = nullptr;
  ASSERT_EQ(cudaMalloc(&device_input, count * 2), cudaSuccess);
  ASSERT_EQ(cudaMalloc(&device_weight, weight.size() * 2), cudaSuccess);
  ASSERT_EQ(cudaMalloc(&device_output, output16.size() * 2), cudaSuccess);
  cudaMemcpy(device_input, input16.data(), count * 2, cudaMemcpyHostToDevice);
  cudaMemcpy(device_weight, weight16.data(), weight.size() * 2, cudaMemcpyHostToDevice);
  cudaMemcpy(device_output, output16.data(), output16.size() * 2, cudaMemcpyHostToDevice);
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  ASSERT_TRUE(RmsNorm({device_input, device_weight, device_output, rows, width, 1e-5f}, Device::kCuda, stream).ok());
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  cudaMemcpy(output16.data(), device_output, output16.size() * 2, cudaMemcpyDeviceToHost);
  cudaStreamDestroy(stream);
  for (void* pointer : {device_input, device_weight, device_output}) cudaFree(pointer);

  // One rounding to bf16 (2^-9 relative) and an fp32 sum.
  for (std::size_t i = 0; i < count; ++i) {
    ASSERT_NEAR(FromBf16(output16[i]), expected[i], std::abs(expected[i]) * 0.0045 + 1e-6) << i;
  }
  for (std::size_t i = count; i < output16.size(); ++i) ASSERT_EQ(output16[i], kGuard) << "guard " << i - count;
}

INSTANTIATE_TEST_SUITE_P(Shapes, RmsNormGpuTest,
                         ::testing::Values(std::pair(1, 1), std::pair(1, 31), std::pair(3, 576), std::pair(64, 4096),
                                           std::pair(7, 257), std::pair(2, 65536)));

}  // namespace
}  // namespace tandem
