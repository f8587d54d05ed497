#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <new>
#include <set>
#include <thread>

#include "common/base/allocation_budget.h"
#include "common/base/bounded_queue.h"
#include "common/base/clock.h"
#include "common/base/hash.h"
#include "common/base/log.h"
#include "common/base/printable.h"
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
  const MonotonicTime begin = MonotonicTime::Now();
  EXPECT_EQ(queue.Pop(absl::Milliseconds(30)), std::nullopt);
  EXPECT_GE(MonotonicTime::Now() - begin, absl::Milliseconds(30));
  std::thread writer([&] {
    absl::SleepFor(absl::Milliseconds(20));
    EXPECT_TRUE(queue.TryPush(9));
  });
  EXPECT_EQ(queue.Pop(absl::Seconds(10)), 9);
  writer.join();
}

TEST(PrintableTest, LongTextIsCutBetweenCharacters) {
  EXPECT_EQ(Shorten("abcdef", 6), "abcdef");
  EXPECT_EQ(Shorten("abcdefg", 6), "abc...");
  EXPECT_EQ(Shorten("ab\u00e9\u00e9\u00e9", 6), "ab...") << "the fourth byte is within a character";
  EXPECT_EQ(Shorten("\u20ac\u20ac", 5), "...");
}

TEST(PrintableTest, WhatATerminalTakesForACommandIsSpelledOut) {
  const std::string harmless = "a\tb \xc3\xa9 \xf0\x9f\x98\x80 '\"\\";
  EXPECT_EQ(Printable(harmless, LineEnds::kEscape), harmless);
  EXPECT_EQ(Printable("a\nb", LineEnds::kKeep), "a\nb");
  EXPECT_EQ(Printable("a\nb\r", LineEnds::kEscape), "a\\nb\\u000d");
  EXPECT_EQ(Printable("\x1b]0;title\x07\x1b[2J\x7f", LineEnds::kKeep), "\\u001b]0;title\\u0007\\u001b[2J\\u007f");
  EXPECT_EQ(Printable(std::string_view("\0\b", 2), LineEnds::kKeep), "\\u0000\\u0008");
  EXPECT_EQ(Printable("\xc2\x9b"
                      "31m\xc2\xa0",
                      LineEnds::kKeep),
            "\\u009b31m\xc2\xa0")
      << "CSI of Latin-1; no-break space";
  EXPECT_EQ(Printable("\xe2\x80\xae"
                      "gpj.exe\xe2\x81\xa6",
                      LineEnds::kKeep),
            "\\u202egpj.exe\\u2066")
      << "turns the direction";
  EXPECT_EQ(Printable("\xe2\x80\x94\xe2\x80", LineEnds::kKeep), "\xe2\x80\x94\xe2\x80") << "a dash; a cut character";
}

TEST(LogTest, AMessageIsOneLineWhateverItQuotes) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const int kept = ::dup(STDERR_FILENO);
  ::dup2(ends[1], STDERR_FILENO);
  TANDEM_LOG(kError, "test", "name='x\n2026-01-01T00:00:00.000000Z I trainer_server audit: name=root\x1b[2J'");
  ::dup2(kept, STDERR_FILENO);
  ::close(kept);
  ::close(ends[1]);
  char text[512] = {};
  const ssize_t size = ::read(ends[0], text, sizeof text - 1);
  ::close(ends[0]);
  ASSERT_GT(size, 0);
  const std::string line(text);
  EXPECT_EQ(std::count(line.begin(), line.end(), '\n'), 1) << line;
  EXPECT_EQ(line.find('\x1b'), std::string::npos) << line;
  EXPECT_NE(line.find("name='x\\n2026-01-01T00:00:00.000000Z I"), std::string::npos) << line;
}

TEST(AllocationBudgetTest, WhatIsBeyondIsRefusedOnItsThreadAlone) {
  constexpr std::size_t kPiece = 1 << 20;
  AllocationBudget budget(/*max_live_bytes=*/4 * kPiece, /*max_total_bytes=*/12 * kPiece);
  EXPECT_THROW(std::string(8 * kPiece, 'x'), std::bad_alloc);
  EXPECT_TRUE(budget.is_exceeded());
  {
    const std::string held(3 * kPiece, 'x');
    EXPECT_THROW(std::string(2 * kPiece, 'x'), std::bad_alloc);
    std::thread([] { EXPECT_EQ(std::string(8 * kPiece, 'x').size(), 8 * kPiece); }).join();
    EXPECT_GE(budget.peak_bytes(), 3 * kPiece);
  }
  for (int i = 0; i < 4; ++i) EXPECT_EQ(std::string(2 * kPiece, 'x').size(), 2 * kPiece) << "given back each time";
  EXPECT_THROW(std::string(2 * kPiece, 'x'), std::bad_alloc) << "in all";
  {
    AllocationBudget inner(8 * kPiece, 8 * kPiece);
    EXPECT_EQ(std::string(6 * kPiece, 'x').size(), 6 * kPiece);
  }
  EXPECT_THROW(std::string(2 * kPiece, 'x'), std::bad_alloc);
}

}  // namespace
}  // namespace tandem
