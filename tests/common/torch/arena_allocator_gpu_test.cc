#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdio>
#include <memory>
#include <vector>

#include "common/base/random.h"
#include "common/torch/arena_allocator.h"
#include "common/torch/buffer.h"
#include "common/torch/run_torch.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/device_bytes.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;
template <typename T>
using DeviceBuffer = Buffer<T, Device::kCuda>;

// The arena touches no memory: these run on any range of addresses.
class DeviceArenaTest : public ::testing::Test {
 protected:
  static constexpr std::size_t kSize = std::size_t{1} << 30;
  std::span<std::byte> range() const { return {reinterpret_cast<std::byte*>(std::uintptr_t{1} << 40), kSize}; }
  bool IsInside(const void* data) const { return data >= range().data() && data < range().data() + kSize; }
};

TEST_F(DeviceArenaTest, BuffersComeFromTheRangeAndAreAnErrorOutsideAScope) {
  {
    const ArenaScope scope(range(), "activations", Device::kCuda);
    const DeviceBuffer<float> inside(1000);
    EXPECT_TRUE(IsInside(inside.data()));
    EXPECT_FALSE(IsInside(Buffer<float>(1000).data())) << "the CPU's memory stays where it was";
  }
  const absl::Status status = RunTorch("scoring", [] {
    const DeviceBuffer<float> outside(1000);
    return absl::OkStatus();
  });
  EXPECT_THAT(std::string(status.message()), HasSubstr("4000 bytes of device memory outside a training phase"));
}

TEST_F(DeviceArenaTest, AnOverLargeRequestNamesOwnerSizeFreeAndLease) {
  const ArenaScope scope(range(), "activations", Device::kCuda);
  const DeviceBuffer<std::byte> some(256 << 20);
  const absl::Status status = RunTorch("forward pass of 9 tokens", [] {
    const DeviceBuffer<std::byte> too_large(std::int64_t{900} << 20);
    return absl::OkStatus();
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  for (const char* words : {"forward pass of 9 tokens", "activations", "900.0 MiB", "768.0 MiB", "1.0 GiB"}) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(words));
  }
}

// The allocations of micro-batches of random lengths, many times over: what is free stays in large pieces, and whole at the end.
TEST_F(DeviceArenaTest, FragmentationStaysBoundedOverManyMicroBatches) {
  const ArenaScope scope(range(), "activations", Device::kCuda);
  double worst = 0;
  for (std::uint64_t pass = 0; pass < 200; ++pass) {
    const std::int64_t rows = static_cast<std::int64_t>(1 + RandomBelow(1, pass, 4096));
    std::vector<DeviceBuffer<std::byte>> kept;
    kept.emplace_back(rows * 576 * 2 * 30);  // layer inputs
    for (std::uint64_t layer = 0; layer < 60; ++layer) {
      std::vector<DeviceBuffer<std::byte>> workspace;
      for (const std::int64_t width : {576, 960, 576, 3072, 1536, 8}) workspace.emplace_back(rows * width * 2);
      if (layer % 7 == 0) kept.emplace_back(static_cast<std::int64_t>(256 + RandomBelow(pass, layer, 100000)));
      workspace.erase(workspace.begin() + 2);
      const double free = static_cast<double>(kSize - scope.used_bytes());
      worst = std::max(worst, 1 - static_cast<double>(scope.largest_free_bytes()) / free);
    }
  }
  std::printf("worst fragmentation: %.1f %% of what was free was not in the largest piece\n", 100 * worst);
  EXPECT_LT(worst, 0.25);
  EXPECT_EQ(scope.used_bytes(), 0u);
  EXPECT_EQ(scope.largest_free_bytes(), kSize);
}

// LibTorch's own CUDA tensors.
TEST(CudaAllocator, LibTorchsTensorsComeFromTheRange) {
  if (!HasCudaDevice()) GTEST_SKIP() << "no GPU is visible";
  const testing::DeviceBytes memory(8 << 20);
  const auto options = at::TensorOptions(at::kFloat).device(at::kCUDA);
  const absl::Status status = RunTorch("tensors", [&] {
    const ArenaScope scope(memory.span(), "activations", Device::kCuda);
    {
      const at::Tensor first = at::empty({1000}, options), second = at::empty({1000}, options);
      for (const at::Tensor& tensor : {first, second}) {
        const auto* data = static_cast<const std::byte*>(tensor.const_data_ptr());
        EXPECT_GE(data, memory.data());
        EXPECT_LT(data, memory.data() + memory.span().size());
      }
      EXPECT_GE(scope.used_bytes(), 8000u);
      first.record_stream(c10::cuda::getCurrentCUDAStream());
    }
    EXPECT_EQ(scope.used_bytes(), 0u);
    const at::Tensor too_large = at::empty({4 << 20}, options);
    return absl::OkStatus();
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("activations"));
}

}  // namespace
}  // namespace tandem
