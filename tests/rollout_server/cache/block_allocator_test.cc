#include "rollout_server/cache/block_allocator.h"

#include <algorithm>
#include <map>
#include <set>

#include "gtest/gtest.h"
#include "rollout_server/cache/cache_key.h"
#include "tests/rollout_server/support/seeded_random.h"

namespace tandem {
namespace {

TEST(BlockAllocatorTest, GivesEveryBlockOnceThenNone) {
  BlockAllocator allocator(3);
  std::set<std::int32_t> blocks;
  for (int i = 0; i < 3; ++i) blocks.insert(*allocator.Allocate(Lane::kShared));
  EXPECT_EQ(blocks, (std::set<std::int32_t>{0, 1, 2}));
  EXPECT_EQ(allocator.Allocate(Lane::kUnit), std::nullopt);
  allocator.Release(1);
  EXPECT_EQ(allocator.Allocate(Lane::kUnit), 1);
  EXPECT_EQ(allocator.num_used(Lane::kUnit), 1);
  EXPECT_EQ(allocator.num_used(Lane::kShared), 2);
}

TEST(BlockAllocatorTest, EvictsTheLeastRecentlyUsedPublishedBlock) {
  BlockAllocator allocator(3);
  for (const char* key : {"a", "b", "c"}) allocator.Publish(*allocator.Allocate(Lane::kShared), key);
  for (std::int32_t block : {0, 1, 2}) allocator.Release(block);
  EXPECT_EQ(allocator.num_free(), 3);
  allocator.Release(*allocator.Find("a", Lane::kShared));  // used again: now the youngest
  EXPECT_EQ(allocator.Allocate(Lane::kShared), 1);
  EXPECT_EQ(allocator.Find("b", Lane::kShared), std::nullopt);
  EXPECT_EQ(allocator.Find("a", Lane::kShared), 0);
  EXPECT_EQ(allocator.Find("c", Lane::kShared), 2);
  EXPECT_EQ(allocator.Allocate(Lane::kShared), std::nullopt) << "a referenced block is never evicted";
}

TEST(BlockAllocatorTest, ForgetsEverythingPublished) {
  BlockAllocator allocator(2);
  allocator.Publish(*allocator.Allocate(Lane::kShared), "held");
  allocator.Publish(*allocator.Allocate(Lane::kShared), "free");
  allocator.Release(1);
  allocator.ForgetAll();
  EXPECT_EQ(allocator.Find("held", Lane::kShared), std::nullopt);
  EXPECT_EQ(allocator.Find("free", Lane::kShared), std::nullopt);
  EXPECT_EQ(allocator.num_free(), 1);
  allocator.Release(0);
  EXPECT_EQ(allocator.num_free(), 2);
}

TEST(BlockAllocatorTest, RandomOperationsAgreeWithASimpleModel) {
  const unsigned seed = 20240607;
  SCOPED_TRACE(seed);
  testing::SeededRandom random(seed);
  BlockAllocator allocator(16);
  std::map<std::int32_t, int> references;
  std::map<std::string, std::int32_t> published;
  int next_key = 0;
  for (int step = 0; step < 20000; ++step) {
    const auto pick = [&] { return std::next(references.begin(), random() % references.size())->first; };
    const unsigned operation = random() % 8;
    if (operation < 2) {
      const std::optional<std::int32_t> block = allocator.Allocate(Lane::kShared);
      ASSERT_EQ(block.has_value(), references.size() < 16);
      if (!block.has_value()) continue;
      ASSERT_TRUE(references.emplace(*block, 1).second) << "a held block was given again";
      std::erase_if(published, [&](const auto& entry) { return entry.second == *block; });
    } else if (operation == 2 && !published.empty()) {
      const auto& [key, block] = *std::next(published.begin(), random() % published.size());
      ASSERT_EQ(allocator.Find(key, Lane::kShared), block);
      ++references[block];
    } else if (operation == 3 && random() % 50 == 0) {
      allocator.ForgetAll();
      published.clear();
    } else if (!references.empty()) {
      const std::int32_t block = pick();
      if (operation == 4) {
        allocator.Retain(block);
        ++references[block];
      } else if (operation == 5) {
        const std::string key = "k" + std::to_string(next_key++);
        allocator.Publish(block, key);
        if (std::none_of(published.begin(), published.end(), [&](const auto& entry) { return entry.second == block; })) {
          published[key] = block;
        }
      } else {
        allocator.Release(block);
        if (--references[block] == 0) references.erase(block);
      }
    }
    for (const auto& [block, count] : references) ASSERT_EQ(allocator.ref_count(block), count);
    ASSERT_EQ(allocator.num_free(), 16 - static_cast<int>(references.size()));
  }
}

TEST(BlockAllocatorTest, PeakIsTheMostInUseAtATimeSinceItWasReset) {
  BlockAllocator allocator(8);
  std::vector<std::int32_t> held;
  for (int i = 0; i < 5; ++i) held.push_back(*allocator.Allocate(i < 2 ? Lane::kUnit : Lane::kShared));
  allocator.Publish(held[0], "key");
  for (const std::int32_t block : held) allocator.Release(block);
  EXPECT_EQ(allocator.peak_used(), 5);
  allocator.ResetPeak();
  EXPECT_EQ(allocator.peak_used(), 0);
  ASSERT_TRUE(allocator.Find("key", Lane::kShared).has_value());
  EXPECT_EQ(allocator.peak_used(), 1) << "a block that is found is in use again";
}

// CASES C43
TEST(CacheKeyTest, EveryPartOfTheNamespaceSeparates) {
  const CacheNamespace base = {
      .model_digest = "m", .job = "j", .activation_id = 1, .weight_version = 1, .lease_epoch = 1, .prompt_kind = "ids"};
  std::set<std::string> keys = {RootKey(base)};
  const auto add = [&](auto change) {
    CacheNamespace other = base;
    change(&other);
    EXPECT_TRUE(keys.insert(RootKey(other)).second);
  };
  add([](CacheNamespace* n) { n->model_digest = "n"; });
  add([](CacheNamespace* n) { n->job = "k"; });
  add([](CacheNamespace* n) { n->activation_id = 2; });
  add([](CacheNamespace* n) { n->weight_version = 2; });
  add([](CacheNamespace* n) { n->lease_epoch = 2; });
  add([](CacheNamespace* n) { n->prompt_kind = "text"; });
  add([](CacheNamespace* n) { n->model_digest = "mj", n->job = ""; });
}

TEST(CacheKeyTest, ChainDependsOnEveryTokenBefore) {
  const std::vector<std::uint32_t> a = {1, 2}, b = {3, 4}, c = {1, 5};
  EXPECT_EQ(ChainKey(ChainKey("r", a), b), ChainKey(ChainKey("r", a), b));
  EXPECT_NE(ChainKey(ChainKey("r", a), b), ChainKey(ChainKey("r", c), b));
  EXPECT_NE(ChainKey("r", a), ChainKey("s", a));
}

}  // namespace
}  // namespace tandem
