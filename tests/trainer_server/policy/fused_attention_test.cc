#include "trainer_server/policy/fused_attention.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tandem {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

MicroBatch WithRows(std::size_t num_rows, std::vector<PackedCompletion> completions) {
  MicroBatch batch;
  batch.token_ids.resize(num_rows);
  batch.completions = std::move(completions);
  return batch;
}

TEST(AttentionRowsTest, HoldPromptsAndCompletionsAndWhoSeesWhichPrompt) {
  // The header's example, then a prompt of 2 with an empty completion and ones of 4 and 2, and a prompt that nobody continues.
  const AttentionRows rows(WithRows(17, {{0, 0, 3, 3, 5},
                                         {1, 0, 3, 5, 6},
                                         {2, 0, 3, 6, 7},
                                         {3, 7, 9, 9, 9},
                                         {4, 7, 9, 9, 13},
                                         {5, 7, 9, 13, 15},
                                         {6, 15, 16, 16, 16}}));
  ASSERT_TRUE(rows.is_served);
  EXPECT_THAT(rows.own_begins, ElementsAre(0, 5, 6, 7, 13, 15, 16));
  EXPECT_THAT(rows.query_begins, ElementsAre(0, 2, 4));
  EXPECT_THAT(rows.key_begins, ElementsAre(0, 3, 5));
  EXPECT_THAT(rows.query_rows, ElementsAre(5, 6, 13, 14));
  EXPECT_THAT(rows.key_rows, ElementsAre(0, 1, 2, 7, 8));
  EXPECT_EQ(rows.num_rows, 17);
  EXPECT_EQ(rows.num_own(), 16);
  EXPECT_EQ(rows.longest_own, 6);
  EXPECT_EQ(rows.longest_query, 2);
  EXPECT_EQ(rows.longest_key, 3);
}

TEST(AttentionRowsTest, HoldNoQueriesWhereNoPromptIsShared) {
  const AttentionRows rows(WithRows(9, {{0, 0, 3, 3, 3}, {1, 3, 5, 5, 9}}));
  ASSERT_TRUE(rows.is_served);
  EXPECT_THAT(rows.own_begins, ElementsAre(0, 3, 9));
  EXPECT_THAT(rows.query_rows, IsEmpty());
  EXPECT_THAT(rows.key_rows, IsEmpty());
}

TEST(AttentionRowsTest, DoNotServeGapsNorAnotherOrderNorNothing) {
  EXPECT_FALSE(AttentionRows(WithRows(7, {{0, 0, 3, 4, 6}})).is_served);
  EXPECT_FALSE(AttentionRows(WithRows(7, {{0, 1, 3, 3, 6}})).is_served);
  EXPECT_FALSE(AttentionRows(WithRows(6, {{0, 0, 3, 5, 6}, {1, 0, 3, 3, 5}})).is_served);
  EXPECT_FALSE(AttentionRows(WithRows(6, {{0, 0, 3, 3, 5}, {1, 0, 3, 3, 5}})).is_served);
  EXPECT_FALSE(AttentionRows(WithRows(4, {})).is_served);
}

}  // namespace
}  // namespace tandem
