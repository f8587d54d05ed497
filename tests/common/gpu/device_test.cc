#include "common/gpu/device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <vector>

#include "common/gpu/device_code.h"
#include "common/gpu/dtype.h"
#include "common/gpu/stream.h"

namespace tandem {
namespace {

TEST(DeviceTest, TheCpuHasANameAndNoDriver) {
  EXPECT_EQ(DeviceName(Device::kCpu), "cpu");
  EXPECT_EQ(DeviceUuid(Device::kCpu).value(), "cpu");
  EXPECT_TRUE(absl::IsFailedPrecondition(DriverMemory(Device::kCpu).status()));
}

TEST(DeviceTest, ElementsHaveTheirSizes) {
  EXPECT_EQ(ElementBytes(DType::kFp32), 4u);
  EXPECT_EQ(ElementBytes(DType::kBf16), 2u);
  EXPECT_EQ(ElementBytes(DType::kFp8E3m4), 1u);
}

TEST(DeviceTest, MachineCodeRunsOnItsMajorNumberFromItsMinorOneOn) {
  EXPECT_TRUE(DeviceCodeRuns("80-real", {8, 0}));
  EXPECT_TRUE(DeviceCodeRuns("80-real", {8, 9}));
  EXPECT_FALSE(DeviceCodeRuns("86-real", {8, 0}));
  EXPECT_FALSE(DeviceCodeRuns("80-real", {9, 0}));
  EXPECT_TRUE(DeviceCodeRuns("80-real,90a-real,120-real", {12, 1}));
  EXPECT_FALSE(DeviceCodeRuns("80-real,90a-real,120-real", {10, 0}));
}

TEST(DeviceTest, CodeWithALetterRunsOnItsOwnGpuAlone) {
  EXPECT_TRUE(DeviceCodeRuns("90a-real", {9, 0}));
  EXPECT_TRUE(DeviceCodeRuns("90a", {9, 0}));
  EXPECT_FALSE(DeviceCodeRuns("90a", {10, 0}));
  EXPECT_FALSE(DeviceCodeRuns("100f-virtual", {10, 3}));
}

TEST(DeviceTest, PtxRunsOnEveryLaterGpu) {
  EXPECT_TRUE(DeviceCodeRuns("80", {12, 0}));
  EXPECT_TRUE(DeviceCodeRuns("80-virtual", {9, 0}));
  EXPECT_FALSE(DeviceCodeRuns("90", {8, 9}));
  EXPECT_FALSE(DeviceCodeRuns("none", {9, 0}));
  EXPECT_FALSE(DeviceCodeRuns("", {9, 0}));
}

TEST(DeviceTest, ThisBuildHasCodeForTheGpuThatTestsRunOn) {
  if (!HasCudaDevice()) GTEST_SKIP() << "no GPU";
  EXPECT_TRUE(CheckDeviceCode().ok()) << CheckDeviceCode() << ' ' << DescribeDevice(Device::kCuda);
}

TEST(DeviceTest, WithoutAGpuItsCallsFailAndNothingThrows) {
  if (HasCudaDevice()) GTEST_SKIP() << "a GPU is here";
  char byte = 0;
  EXPECT_FALSE(DeviceUuid(Device::kCuda).ok());
  EXPECT_FALSE(CopyToHost(Device::kCuda, &byte, &byte, 1).ok());
  EXPECT_FALSE(ZeroMemory(Device::kCuda, &byte, 1).ok());
  EXPECT_FALSE(DriverMemory(Device::kCuda).ok());
  EXPECT_FALSE(Stream::Create(Device::kCuda).ok());
  EXPECT_FALSE(HostBuffer::Create(Device::kCuda, 1).ok());
}

// What holds on either device. On the GPU page-locked buffers stand for device memory: device copies take them as well.
class EitherDeviceTest : public ::testing::TestWithParam<Device> {
 protected:
  void SetUp() override {
    if (GetParam() == Device::kCuda && !HasCudaDevice()) GTEST_SKIP() << "no CUDA device";
  }
};

TEST_P(EitherDeviceTest, BytesSurviveTheWayThereAndBack) {
  for (const std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{4097}, std::size_t{1} << 20}) {
    auto first = HostBuffer::Create(GetParam(), size), second = HostBuffer::Create(GetParam(), size);
    ASSERT_TRUE(first.ok() && second.ok()) << first.status() << second.status();
    ASSERT_EQ((*first)->bytes().size(), size);
    for (const std::byte byte : (*first)->bytes()) ASSERT_EQ(byte, std::byte{0});
    std::vector<unsigned char> sent(size), received(size, 0xee);
    std::iota(sent.begin(), sent.end(), static_cast<unsigned char>(1));
    ASSERT_EQ(CopyFromHost(GetParam(), (*first)->bytes().data(), sent.data(), size), absl::OkStatus());
    ASSERT_EQ(CopyOnDevice(GetParam(), (*second)->bytes().data(), (*first)->bytes().data(), size), absl::OkStatus());
    ASSERT_EQ(CopyToHost(GetParam(), received.data(), (*second)->bytes().data(), size), absl::OkStatus());
    EXPECT_EQ(received, sent) << size;
    ASSERT_EQ(ZeroMemory(GetParam(), (*second)->bytes().data(), size / 2), absl::OkStatus());
    ASSERT_EQ(CopyToHost(GetParam(), received.data(), (*second)->bytes().data(), size), absl::OkStatus());
    std::fill_n(sent.begin(), size / 2, static_cast<unsigned char>(0));
    EXPECT_EQ(received, sent) << size;
  }
}

TEST_P(EitherDeviceTest, AStreamCanBeFencedAndTheContextIsWell) {
  auto stream = Stream::Create(GetParam());
  ASSERT_TRUE(stream.ok()) << stream.status();
  EXPECT_EQ((*stream)->handle() == nullptr, GetParam() == Device::kCpu);
  EXPECT_EQ((*stream)->Synchronize(), absl::OkStatus());
  EXPECT_EQ(ContextHealth(GetParam()), absl::OkStatus());
}

INSTANTIATE_TEST_SUITE_P(Devices, EitherDeviceTest, ::testing::Values(Device::kCpu, Device::kCuda),
                         [](const auto& param) { return param.param == Device::kCpu ? "Cpu" : "Cuda"; });

TEST(CudaDeviceTest, NameUuidAndMemoryAreThoseOfACard) {
  if (!HasCudaDevice()) GTEST_SKIP() << "no CUDA device";
  EXPECT_NE(DeviceName(Device::kCuda), "none");
  const auto uuid = DeviceUuid(Device::kCuda);
  ASSERT_TRUE(uuid.ok()) << uuid.status();
  EXPECT_THAT(*uuid, ::testing::MatchesRegex("GPU-[0-9a-f]+-[0-9a-f]+-[0-9a-f]+-[0-9a-f]+-[0-9a-f]+"));
  EXPECT_EQ(uuid->size(), std::strlen("GPU-01234567-0123-0123-0123-0123456789ab")) << *uuid;
  const auto memory = DriverMemory(Device::kCuda);
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_GT(memory->total_bytes, std::uint64_t{1} << 30);
  EXPECT_LE(memory->free_bytes, memory->total_bytes);
}

}  // namespace
}  // namespace tandem
