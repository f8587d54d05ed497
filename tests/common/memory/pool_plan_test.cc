#include "common/memory/pool_plan.h"

#include <gtest/gtest.h>

#include <string>

#include "common/base/units.h"

namespace tandem {
namespace {

std::uint64_t SizeOf(const v1::Region& region) { return region.range().end_bytes() - region.range().begin_bytes(); }

TEST(PoolPlan, DefaultsGiveSmallChunksAndFiveRegionsInARow) {
  const auto plan = PoolPlan::Create({.weights_bytes = 540 * kMiB + 5, .model_bytes = 3 * kMiB}, 4096);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->chunk_bytes, 64 * kMiB);
  EXPECT_TRUE(CheckRegions(plan->regions, plan->num_chunks * plan->chunk_bytes, 4096).ok());
  EXPECT_EQ(SizeOf(plan->regions[0]), 542 * kMiB);
  EXPECT_EQ(SizeOf(plan->regions[2]), 64 * kMiB);
  EXPECT_EQ(SizeOf(plan->regions[3]), 256 * kMiB);
  EXPECT_GE(SizeOf(plan->regions[4]), 1536 * kMiB);
}

TEST(PoolPlan, LargePoolsTakeLargeChunks) {
  const auto plan = PoolPlan::Create({.pool_bytes = 80 * kGiB, .weights_bytes = kGiB, .model_bytes = 1}, 4096);
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->chunk_bytes, 256 * kMiB);
  EXPECT_EQ(plan->num_chunks, 320u);
}

TEST(PoolPlan, ElasticRangeBeginsWithAChunkWhereThatIsAsked) {
  PoolSizes sizes{.pool_bytes = 4 * kGiB, .weights_bytes = 101 * kMiB, .model_bytes = 1, .elastic_on_chunk = true};
  const auto plan = PoolPlan::Create(sizes, 2 * kMiB);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->regions[4].range().begin_bytes() % plan->chunk_bytes, 0u);
  EXPECT_TRUE(CheckRegions(plan->regions, 4 * kGiB, 2 * kMiB).ok());
  EXPECT_GE(SizeOf(plan->regions[3]), 256 * kMiB) << "the trainer has what lies between";
  sizes.pool_bytes = sizes.chunk_bytes = 512 * kMiB;  // one chunk: there is no other boundary
  const auto one = PoolPlan::Create(sizes, 2 * kMiB);
  ASSERT_TRUE(one.ok()) << one.status();
  EXPECT_GT(SizeOf(one->regions[4]), 0u);
}

TEST(PoolPlan, RefusesWhatDoesNotFitByName) {
  const auto small = PoolPlan::Create({.pool_bytes = 128 * kMiB, .weights_bytes = 100 * kMiB}, 4096);
  EXPECT_EQ(small.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(std::string(small.status().message()).find("weights 100.0 MiB"), std::string::npos) << small.status();
  EXPECT_EQ(PoolPlan::Create({.chunk_bytes = 5000}, 4096).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(PoolPlan::Create({.pool_bytes = kGiB * kGiB}, 4096).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(PoolPlan::Create({.pool_bytes = kGiB, .chunk_bytes = 4096}, 4096).status().code(), absl::StatusCode::kInvalidArgument)
      << "262144 chunks";
}

TEST(PoolPlan, ChecksRegionsOfAPeer) {
  const auto plan =
      PoolPlan::Create({.pool_bytes = kMiB, .chunk_bytes = 4096, .rollout_standing_bytes = 1, .trainer_standing_bytes = 1}, 4096);
  ASSERT_TRUE(plan.ok()) << plan.status();
  auto regions = plan->regions;
  ASSERT_TRUE(CheckRegions(regions, kMiB, 4096).ok());
  EXPECT_FALSE(CheckRegions(regions, kMiB - 4096, 4096).ok());
  EXPECT_FALSE(CheckRegions(regions, kMiB + 4096, 4096).ok()) << "the end belongs to nobody";
  regions[2].mutable_range()->set_end_bytes(regions[2].range().end_bytes() + 1);
  EXPECT_FALSE(CheckRegions(regions, kMiB, 4096).ok());
  regions = plan->regions;
  regions[4].mutable_range()->set_end_bytes(~std::uint64_t{0});
  EXPECT_FALSE(CheckRegions(regions, kMiB, 4096).ok());
  regions = plan->regions;
  std::swap(regions[2], regions[3]);
  EXPECT_FALSE(CheckRegions(regions, kMiB, 4096).ok());
  regions.pop_back();
  EXPECT_FALSE(CheckRegions(regions, kMiB, 4096).ok());
}

}  // namespace
}  // namespace tandem
