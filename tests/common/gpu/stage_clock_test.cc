#include "common/gpu/stage_clock.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string_view>

#include "nlohmann/json.hpp"

namespace tandem {
namespace {

using ::testing::DoubleNear;
using ::testing::ElementsAre;
using ::testing::Pair;

int compute_place = 0, copy_place = 0;
void* const kCompute = &compute_place;
void* const kCopy = &copy_place;

TEST(StageClock, EachStageEndsWithTheNextOneOfItsStream) {
  const auto clock = StageClock::Create(Device::kCpu);
  ASSERT_TRUE(clock.ok()) << clock.status();
  (*clock)->Enter("head", kCompute);
  (*clock)->Enter("copies", kCopy);
  (*clock)->Enter("attention", kCompute);
  (*clock)->Enter(nullptr, kCopy);
  (*clock)->Enter(nullptr, kCompute);
  (*clock)->Enter("head", kCompute);  // goes on
  const auto spans = (*clock)->Take();
  ASSERT_TRUE(spans.ok()) << spans.status();
  ASSERT_EQ(spans->size(), 3u);
  EXPECT_EQ(std::string_view((*spans)[0].stage), "head");
  EXPECT_EQ(std::string_view((*spans)[1].stage), "copies");
  EXPECT_EQ((*spans)[1].stream, kCopy);
  EXPECT_EQ((*spans)[0].end_seconds, (*spans)[2].begin_seconds);
  EXPECT_GE((*spans)[1].end_seconds, (*spans)[2].begin_seconds);
  EXPECT_TRUE((*clock)->Take()->empty());
}

TEST(StageClock, SpansAddUpOverlapAndAreDrawnByStream) {
  const std::vector<StageSpan> computing = {{"qkv", kCompute, 0, 2}, {"head", kCompute, 3, 4}, {"qkv", kCompute, 4, 5}};
  const std::vector<StageSpan> copies = {{"copies", kCopy, 1, 3}, {"copies", kCopy, 4.5, 6.5}};
  EXPECT_THAT(SecondsByStage(computing), ElementsAre(Pair("head", DoubleNear(1, 1e-12)), Pair("qkv", DoubleNear(3, 1e-12))));
  EXPECT_NEAR(OverlappedShare(copies, computing), 1.5 / 4, 1e-12);
  EXPECT_EQ(OverlappedShare({}, computing), 0);
  std::vector<StageSpan> all = computing;
  all.insert(all.end(), copies.begin(), copies.end());
  const nlohmann::json events = nlohmann::json::parse(ChromeTrace(all)).at("traceEvents");
  ASSERT_EQ(events.size(), 5u);
  EXPECT_EQ(events[1], (nlohmann::json{{"name", "head"}, {"ph", "X"}, {"pid", 1}, {"tid", 1}, {"ts", 3e6}, {"dur", 1e6}}));
  EXPECT_EQ(events[3].at("tid"), 2);
}

}  // namespace
}  // namespace tandem
