#include "common/torch/arena_allocator.h"

#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <thread>

#include "common/torch/buffer.h"
#include "common/torch/matrix.h"
#include "common/torch/run_torch.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;

class ArenaAllocatorTest : public ::testing::Test {
 protected:
  static constexpr std::size_t kSize = 1 << 20;
  ~ArenaAllocatorTest() override { ::operator delete[](bytes_, std::align_val_t(4096)); }
  std::span<std::byte> range() const { return {bytes_, kSize}; }
  bool IsInside(const void* data) const { return data >= bytes_ && data < bytes_ + kSize; }
  std::byte* const bytes_ = new (std::align_val_t(4096)) std::byte[kSize];
};

TEST_F(ArenaAllocatorTest, AllocationsOfTheThreadComeFromTheRangeWhileTheScopeIsOpen) {
  {
    const ArenaScope scope(range(), "activations");
    const Buffer<float> inside(1000);
    EXPECT_TRUE(IsInside(inside.data()));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(inside.data()) % 64, 0u);
    EXPECT_GE(scope.used_bytes(), 4000u);
    std::thread([&] { EXPECT_FALSE(IsInside(Buffer<float>(1000).data())); }).join();
  }
  EXPECT_FALSE(IsInside(Buffer<float>(1000).data()));
}

TEST_F(ArenaAllocatorTest, FreedPiecesAreUsedAgainAndThePeakIsKept) {
  const ArenaScope scope(range(), "activations");
  const float* first = Buffer<float>(50000).data();
  EXPECT_EQ(scope.used_bytes(), 0u);
  EXPECT_EQ(Buffer<float>(50000).data(), first);
  EXPECT_GE(scope.peak_bytes(), 200000u);
  EXPECT_LT(scope.peak_bytes(), 201000u);
}

TEST_F(ArenaAllocatorTest, AnAllocationBeyondTheLeaseIsResourceExhaustedNamingOwnerAndSize) {
  const ArenaScope scope(range(), "activations");
  const Buffer<float> some(100000);
  const absl::Status status = RunTorch("forward pass", [] {
    const Buffer<float> too_large(1 << 18);
    return absl::OkStatus();
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("forward pass"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("activations"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("1.0 MiB"));
  EXPECT_TRUE(RunTorch("next", [] {
                const Buffer<float> fits(1000);
                return absl::OkStatus();
              }).ok());
}

TEST_F(ArenaAllocatorTest, APieceMayBeFreedOnAnotherThreadAndAfterTheScope) {
  auto scope = std::make_optional<ArenaScope>(range(), "activations");
  auto crossing = std::make_unique<Buffer<float>>(1000);
  std::thread([&] { crossing.reset(); }).join();
  EXPECT_EQ(scope->used_bytes(), 0u);
  auto late = std::make_unique<Buffer<float>>(1000);
  scope.reset();
  late.reset();
  const Buffer<float> heap(1000);
  EXPECT_FALSE(IsInside(heap.data()));
}

TEST_F(ArenaAllocatorTest, HeapMemoryMayBeFreedInsideAScope) {
  auto heap = std::make_unique<Buffer<float>>(1000);
  const ArenaScope scope(range(), "activations");
  heap.reset();
  EXPECT_EQ(scope.used_bytes(), 0u);
}

TEST_F(ArenaAllocatorTest, ScopesNest) {
  const ArenaScope outer(range().first(kSize / 2), "outer");
  {
    const ArenaScope inner(range().subspan(kSize / 2), "inner");
    EXPECT_GE(reinterpret_cast<std::byte*>(Buffer<float>(10).data()), bytes_ + kSize / 2);
  }
  const Buffer<float> again(10);
  EXPECT_LT(reinterpret_cast<std::byte*>(again.data()), bytes_ + kSize / 2);
  EXPECT_GT(outer.used_bytes(), 0u);
}

TEST(RunTorch, TurnsLibTorchsExceptionsIntoStatus) {
  const absl::Status status = RunTorch("multiplying", [] {
    float a[6], b[6], c[4];
    Multiply(Matrix<float>(a, 2, 3), Matrix<float>(b, 2, 3), Matrix<float>(c, 2, 2));  // 2x3 by 2x3
    return absl::OkStatus();
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()), HasSubstr("multiplying: "));
}

TEST(Matrix, MultipliesViewsInPlace) {
  // c's middle columns += 2 a^T b.
  const float a[] = {1, 2, 3, 4, 5, 6}, b[] = {1, 0, 2, 1};
  float c[12];
  std::fill_n(c, 12, 1.f);
  Multiply(Matrix<const float>(a, 2, 3).Transposed(), Matrix<const float>(b, 2, 2), Matrix<float>(c, 3, 4).Columns(1, 3), 2, 1);
  const float expected[] = {1, 19, 9, 1, 1, 25, 11, 1, 1, 31, 13, 1};
  for (int i = 0; i < 12; ++i) EXPECT_EQ(c[i], expected[i]) << i;
}

}  // namespace
}  // namespace tandem
