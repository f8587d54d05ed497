#include "common/memory/elastic_arena.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "common/base/random.h"
#include "common/base/units.h"

namespace tandem {
namespace {

TEST(ElasticArena, TakesTheSmallestPieceThatFits) {
  ElasticArena arena("elastic", 0, 64 * kKiB);
  const auto a = arena.Allocate(8 * kKiB, "a"), wall1 = arena.Allocate(256, "wall");
  const auto b = arena.Allocate(2 * kKiB, "b"), wall2 = arena.Allocate(256, "wall");
  ASSERT_TRUE(a.ok() && wall1.ok() && b.ok() && wall2.ok());
  arena.Free(*a);
  arena.Free(*b);
  EXPECT_EQ(arena.Allocate(2 * kKiB - 100, "c").value(), *b);
  EXPECT_EQ(arena.Allocate(3 * kKiB, "d").value(), *a);
}

TEST(ElasticArena, CoalescesBothNeighbours) {
  ElasticArena arena("elastic", 1024, 1024 + 3 * 256);
  std::vector<std::uint64_t> pieces;
  for (int i = 0; i < 3; ++i) pieces.push_back(arena.Allocate(256, "x").value());
  EXPECT_EQ(pieces, (std::vector<std::uint64_t>{1024, 1280, 1536}));
  arena.Free(pieces[0]);
  arena.Free(pieces[2]);
  EXPECT_EQ(arena.largest_free_bytes(), 256u);
  arena.Free(pieces[1]);
  EXPECT_EQ(arena.largest_free_bytes(), 768u);
  EXPECT_EQ(arena.Allocate(768, "whole").value(), 1024u);
}

TEST(ElasticArena, OverlargeRequestNamesOwnerSizeAndHolders) {
  ElasticArena arena("elastic", 0, kMiB);
  ASSERT_TRUE(arena.Allocate(512 * kKiB, "activations").ok());
  const auto refused = arena.Allocate(600 * kKiB, "logit_chunk");
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  for (const char* part : {"elastic", "logit_chunk", "614400", "512.0 KiB", "activations"})
    EXPECT_NE(std::string(refused.status().message()).find(part), std::string::npos) << part << " in " << refused.status();
  EXPECT_EQ(arena.used_bytes(), 512 * kKiB) << "a refusal takes nothing";
  EXPECT_EQ(arena.Allocate(~std::uint64_t{0}, "overflow").status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(arena.Allocate(~std::uint64_t{0} - 100, "overflow").status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(ElasticArena, EmptyRangeGivesNothing) {
  ElasticArena arena("elastic", 512, 512);
  EXPECT_EQ(arena.Allocate(0, "x").status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(arena.largest_free_bytes(), 0u);
}

TEST(ElasticArenaDeathTest, FreeingTwiceAborts) {
  ElasticArena arena("elastic", 0, kMiB);
  const std::uint64_t piece = arena.Allocate(1, "x").value();
  arena.Free(piece);
  EXPECT_DEATH(arena.Free(piece), "no piece in use");
}

// Against a plain map of the pieces in use, searched from end to end.
TEST(ElasticArena, AgreesWithPlainModelUnderRandomOperations) {
  const std::uint64_t seed = static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  constexpr std::uint64_t kBegin = 4096, kEnd = kBegin + 256 * kKiB;
  ElasticArena arena("elastic", kBegin, kEnd);
  struct Used {
    std::uint64_t size;
    std::string owner;
  };
  std::map<std::uint64_t, Used> used;
  std::uint64_t peak = 0;
  const auto best_fit = [&](std::uint64_t size) {  // kEnd: none
    std::uint64_t best = kEnd, best_size = ~std::uint64_t{0}, begin = kBegin;
    const auto consider = [&](std::uint64_t end) {
      if (end - begin >= size && end - begin < best_size) best = begin, best_size = end - begin;
    };
    for (const auto& [offset, piece] : used) {
      consider(offset);
      begin = offset + piece.size;
    }
    consider(kEnd);
    return best;
  };
  for (std::uint64_t i = 0; i < 20'000; ++i) {
    const bool is_freeing = !used.empty() && RandomUniform(seed, 4 * i) < (i / 2000 % 2 ? 0.6 : 0.4);
    if (is_freeing) {
      auto it = used.begin();
      std::advance(it, RandomBelow(seed, 4 * i + 1, used.size()));
      arena.Free(it->first);
      used.erase(it);
    } else {
      const std::uint64_t asked = RandomBelow(seed, 4 * i + 2, RandomBelow(seed, 4 * i + 3, 10) == 0 ? 64 * kKiB : 2 * kKiB);
      const std::uint64_t size = RoundUp(asked == 0 ? 1 : asked, 256);
      const std::string owner(1, static_cast<char>('a' + i % 5));
      const auto offset = arena.Allocate(asked, owner);
      const std::uint64_t expected = best_fit(size);
      ASSERT_EQ(offset.ok(), expected != kEnd) << "step " << i;
      if (offset.ok()) {
        ASSERT_EQ(*offset, expected) << "step " << i;
        used[*offset] = {size, owner};
      }
    }
    std::map<std::string, std::uint64_t, std::less<>> owners;
    std::uint64_t total = 0;
    for (const auto& [offset, piece] : used) owners[piece.owner] += piece.size, total += piece.size;
    peak = std::max(peak, total);
    ASSERT_EQ(arena.used_bytes(), total);
    ASSERT_EQ(arena.num_pieces(), used.size());
    ASSERT_EQ(arena.peak_bytes(), peak);
    ASSERT_EQ(arena.used_by_owner(), owners);
  }
  for (const auto& [offset, piece] : used) arena.Free(offset);
  EXPECT_EQ(arena.largest_free_bytes(), kEnd - kBegin);
}

}  // namespace
}  // namespace tandem
