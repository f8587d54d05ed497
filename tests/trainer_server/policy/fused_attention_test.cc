#include "trainer_server/policy/fused_attention.h"

#include <algorithm>

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

ModelConfig HeadsOf(int num_heads, int num_kv_heads, int head_dim) {
  ModelConfig config;
  config.num_heads = num_heads;
  config.num_kv_heads = num_kv_heads;
  config.head_dim = head_dim;
  return config;
}

TEST(PlanAttentionTest, ChoosesByHeadSizeFormatAndDeterminism) {
  const auto choose = [](int head_dim, StorageFormat format, bool is_deterministic) {
    return ChooseAttention(HeadsOf(4, 2, head_dim), format, {.is_deterministic = is_deterministic});
  };
  for (const int head_dim : {64, 128, 256}) {
    EXPECT_EQ(choose(head_dim, StorageFormat::kNf4, false), AttentionKernel::kCudnn) << head_dim;
    EXPECT_EQ(choose(head_dim, StorageFormat::kNf4, true), AttentionKernel::kFlash) << head_dim;
    EXPECT_EQ(choose(head_dim, StorageFormat::kFp32, false), AttentionKernel::kOwn) << head_dim;
  }
  EXPECT_EQ(choose(80, StorageFormat::kBf16, false), AttentionKernel::kFlash);
  EXPECT_EQ(choose(20, StorageFormat::kBf16, false), AttentionKernel::kOwn);
}

TEST(PlanAttentionTest, CudnnStaysWithinTheLimitUntilOneHeadDoesNot) {
  const ModelConfig config = HeadsOf(32, 8, 128);
  constexpr std::int64_t kLimit = std::int64_t{512} << 20, kMargin = std::int64_t{1} << 20;
  AttentionScratch before;
  for (std::int64_t rows = 1; rows < (1 << 20); rows += 1 + rows / 3) {
    const AttentionScratch scratch = PlanAttentionScratch(config, StorageFormat::kBf16, {}, rows);
    const std::int64_t of_head = CudnnBackwardBytes(config, rows, rows);
    EXPECT_LE(scratch.backward_bytes, std::max(kLimit, of_head) + kMargin) << rows;
    EXPECT_GE(scratch.backward_bytes, std::max(std::min(kLimit, 8 * of_head), of_head)) << rows;
    EXPECT_LE(scratch.forward_bytes, std::max(kLimit, CudnnForwardBytes(config, rows)) + kMargin) << rows;
    EXPECT_GE(scratch.backward_bytes, before.backward_bytes) << "fewer rows may take as much";
    EXPECT_GE(scratch.forward_bytes, before.forward_bytes);
    before = scratch;
  }
  // 1.6 KiB a row and head, all heads at once: within the limit at the context that most jobs have.
  EXPECT_EQ(PlanAttentionScratch(config, StorageFormat::kBf16, {}, 20480).backward_bytes, 8 * 20480 * 1544 + kMargin);
}

TEST(PlanAttentionTest, BucketsAreAtMostAQuarterLarger) {
  for (std::int64_t rows = 1; rows < (1 << 20); rows += 1 + rows / 7) {
    const std::int64_t bucket = AttentionRowsBucket(rows);
    EXPECT_GE(bucket, rows);
    if (rows >= 256) { EXPECT_LT(4 * bucket, 5 * rows + 4) << rows; }
    EXPECT_EQ(AttentionRowsBucket(bucket), bucket) << rows;
  }
}

}  // namespace
}  // namespace tandem
