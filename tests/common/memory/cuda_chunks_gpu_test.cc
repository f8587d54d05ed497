// Chunks in device memory, within one process.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "common/base/units.h"
#include "common/memory/pool_chunks.h"

namespace tandem {
namespace {

constexpr std::uint64_t kChunk = 2 * kMiB;

class CudaChunks : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!HasCudaDevice()) GTEST_SKIP() << "no GPU";
    auto memory = PoolMemory::CreateCuda();
    ASSERT_TRUE(memory.ok()) << memory.status();
    memory_ = *std::move(memory);
    ASSERT_EQ(kChunk % memory_->granularity_bytes(), 0u) << memory_->granularity_bytes();
  }
  static void Write(const PoolMapping& mapping, std::uint64_t at, std::uint64_t value) {
    const absl::Status status = CopyFromHost(Device::kCuda, mapping.base() + at, &value, sizeof value);
    EXPECT_TRUE(status.ok()) << status;
  }
  static std::uint64_t Read(const PoolMapping& mapping, std::uint64_t at) {
    std::uint64_t value = 0;
    const absl::Status status = CopyToHost(Device::kCuda, &value, mapping.base() + at, sizeof value);
    EXPECT_TRUE(status.ok()) << status;
    return value;
  }
  std::unique_ptr<PoolMemory> memory_;
};

TEST_F(CudaChunks, TwoMappingsSeeOneMemoryInOneRow) {
  auto chunks = memory_->CreateChunks(5, kChunk);
  ASSERT_TRUE(chunks.ok()) << chunks.status();
  auto first = memory_->Map(*chunks, kChunk);
  ASSERT_TRUE(first.ok()) << first.status();
  auto second = memory_->Map(*chunks, kChunk);
  ASSERT_TRUE(second.ok()) << "importing what this process exported: " << second.status();
  EXPECT_EQ((*first)->size_bytes(), 5 * kChunk);
  EXPECT_NE((*first)->base(), (*second)->base());
  for (const std::uint64_t at : {std::uint64_t{0}, kChunk - 8, kChunk, 5 * kChunk - 8}) {
    Write(**first, at, at + 7);
    EXPECT_EQ(Read(**second, at), at + 7);
  }
  EXPECT_EQ(Read(**second, kChunk - 8), kChunk - 1);
}

TEST_F(CudaChunks, OnlyTheDescriptorKeepsTheMemory) {
  auto chunks = memory_->CreateChunks(1, kChunk);
  ASSERT_TRUE(chunks.ok());
  EXPECT_NE(::fcntl((*chunks)[0].get(), F_GETFD) & FD_CLOEXEC, 0);
  {
    auto mapping = memory_->Map(*chunks, kChunk);
    ASSERT_TRUE(mapping.ok()) << mapping.status();
    Write(**mapping, 64, 4711);
  }
  auto again = memory_->Map(*chunks, kChunk);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(Read(**again, 64), 4711u);
}

TEST_F(CudaChunks, RefusesDescriptorsThatAreNoChunk) {
  std::vector<UniqueFd> wrong;
  wrong.emplace_back(::memfd_create("no chunk", MFD_CLOEXEC));
  ASSERT_EQ(::ftruncate(wrong[0].get(), kChunk), 0);
  EXPECT_EQ(memory_->Map(wrong, kChunk).status().code(), absl::StatusCode::kInvalidArgument)
      << memory_->Map(wrong, kChunk).status();
  auto chunks = memory_->CreateChunks(1, kChunk);
  ASSERT_TRUE(chunks.ok());
  ASSERT_TRUE(memory_->Map(*chunks, kChunk).ok()) << "the maker's own handles; from now on they are imported";
  const absl::Status larger = memory_->Map(*chunks, 2 * kChunk).status();
  EXPECT_EQ(larger.code(), absl::StatusCode::kInvalidArgument) << larger;
  EXPECT_EQ(memory_->Map(*chunks, kChunk + 1).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(memory_->Map({}, kChunk).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(memory_->Map(*chunks, kChunk).ok()) << "a refusal leaves nothing behind";
  EXPECT_TRUE(ContextHealth(Device::kCuda).ok());
}

TEST_F(CudaChunks, MoreThanTheCardHasIsRefusedAndGivenBack) {
  const auto before = DriverMemory(Device::kCuda);
  ASSERT_TRUE(before.ok());
  const auto chunks = memory_->CreateChunks(2, RoundUp(before->total_bytes * 3 / 4, kChunk));
  EXPECT_EQ(chunks.status().code(), absl::StatusCode::kResourceExhausted) << chunks.status();
  memory_.reset();
  const auto after = DriverMemory(Device::kCuda);
  ASSERT_TRUE(after.ok());
  EXPECT_LT(before->free_bytes - std::min(before->free_bytes, after->free_bytes), 32 * kMiB);
}

TEST_F(CudaChunks, ProtectionTakesWholeChunksAwayAndGivesThemBackUnchanged) {
  auto chunks = memory_->CreateChunks(4, kChunk);
  ASSERT_TRUE(chunks.ok());
  auto mapping = memory_->Map(*chunks, kChunk);
  ASSERT_TRUE(mapping.ok()) << mapping.status();
  for (std::uint64_t i = 0; i < 4; ++i) Write(**mapping, i * kChunk, 100 + i);
  for (int round = 0; round < 3; ++round) {
    ASSERT_TRUE((*mapping)->Protect(kChunk, 3 * kChunk, Access::kNone).ok());
    ASSERT_TRUE((*mapping)->Protect(kChunk, 3 * kChunk, Access::kNone).ok()) << "twice";
    EXPECT_EQ(Read(**mapping, 0), 100u);
    EXPECT_EQ(Read(**mapping, 3 * kChunk), 103u);
    ASSERT_TRUE((*mapping)->Protect(kChunk, 3 * kChunk, Access::kReadWrite).ok());
    EXPECT_EQ(Read(**mapping, kChunk), 101u);
    EXPECT_EQ(Read(**mapping, 2 * kChunk), 102u);
  }
  ASSERT_TRUE((*mapping)->Protect(0, kChunk, Access::kRead).ok());
  Write(**mapping, 0, 5);  // documented: a device has no read-only mapping
}

}  // namespace
}  // namespace tandem
