#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <thread>

#include "common/base/bounded_queue.h"
#include "common/base/hash.h"
#include "common/base/random.h"
#include "common/base/units.h"

namespace tandem {
namespace {

TEST(UnitsTest, BytesParseAndPrint) {
  EXPECT_EQ(*ParseBytes("1.5GiB"), kGiB + kGiB / 2);
  EXPECT_EQ(*ParseBytes("64 MiB"), 64 * kMiB);
  EXPECT_EQ(*ParseBytes("1048576"), kMiB);
  for (const char* bad : {"", "MiB", "-1", "1 GB", "1e30GiB", "nan"}) EXPECT_FALSE(ParseBytes(bad).ok()) << bad;
  EXPECT_EQ(FormatBytes(kGiB + kGiB / 2), "1.5 GiB");
}

TEST(HashTest, Sha256OfKnownTextsAndOfPieces) {
  EXPECT_EQ(Sha256Hex(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(Sha256Hex("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  Sha256 pieces;
  pieces.Update("a");
  pieces.Update("bc");
  EXPECT_EQ(pieces.Finish(), Sha256Hex("abc"));
}

TEST(RandomTest, DrawsAreAFunctionOfSeedAndCounterAndLookUniform) {
  EXPECT_EQ(RandomUniform(3, 7), RandomUniform(3, 7));
  EXPECT_NE(RandomUniform(3, 7), RandomUniform(4, 7));
  constexpr int kDraws = 100000;
  double sum = 0;
  int buckets[10] = {};
  for (std::uint64_t i = 0; i < kDraws; ++i) {
    const double x = RandomUniform(1, i);
    ASSERT_GE(x, 0.0);
    ASSERT_LT(x, 1.0);
    sum += x;
    ++buckets[static_cast<int>(x * 10)];
  }
  EXPECT_NEAR(sum / kDraws, 0.5, 0.005);
  for (int count : buckets) EXPECT_NEAR(count, kDraws / 10, 500);
  // Seeds beside each other, at the same counter: what the members of a group draw from.
  double neighbours = 0;
  for (std::uint64_t seed = 0; seed < kDraws; ++seed) neighbours += RandomUniform(DeriveSeed(9, seed), 0);
  EXPECT_NEAR(neighbours / kDraws, 0.5, 0.005);
}

TEST(RandomTest, BelowStaysBelowAndReachesEveryValue) {
  std::set<std::uint64_t> seen;
  for (std::uint64_t i = 0; i < 1000; ++i) {
    const std::uint64_t x = RandomBelow(5, i, 7);
    ASSERT_LT(x, 7u);
    seen.insert(x);
  }
  EXPECT_EQ(seen.size(), 7u);
}

TEST(BoundedQueueTest, RefusesWhenFullKeepsOrderAndDrainsAfterClose) {
  BoundedQueue<int> queue(2);
  EXPECT_TRUE(queue.TryPush(1));
  EXPECT_TRUE(queue.TryPush(2));
  EXPECT_FALSE(queue.TryPush(3));
  EXPECT_EQ(queue.Pop(absl::ZeroDuration()), 1);
  queue.Close();
  EXPECT_FALSE(queue.TryPush(4));
  EXPECT_EQ(queue.Pop(absl::Seconds(5)), 2);
  EXPECT_EQ(queue.Pop(absl::Seconds(5)), std::nullopt);
}

TEST(BoundedQueueTest, PopWaitsForAPushAndForNoLongerThanAsked) {
  BoundedQueue<int> queue(1);
  const absl::Time begin = absl::Now();
  EXPECT_EQ(queue.Pop(absl::Milliseconds(30)), std::nullopt);
  EXPECT_GE(absl::Now() - begin, absl::Milliseconds(30));
  std::thread writer([&] {
    absl::SleepFor(absl::Milliseconds(20));
    EXPECT_TRUE(queue.TryPush(9));
  });
  EXPECT_EQ(queue.Pop(absl::Seconds(10)), 9);
  writer.join();
}

}  // namespace
}  // namespace tandem
