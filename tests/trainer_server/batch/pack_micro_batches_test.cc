#include "trainer_server/batch/pack_micro_batches.h"

#include <map>
#include <string>
#include <vector>

#include "common/base/random.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "trainer_server/batch/pass_work.h"

namespace tandem {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Ids = std::vector<std::uint32_t>;

// Owns what GroupToPack views.
struct Source {
  Ids prompt;
  std::vector<Ids> completions;
  std::vector<std::vector<std::uint8_t>> masks;
};

std::vector<GroupToPack> View(const std::vector<Source>& sources) {
  std::vector<GroupToPack> groups;
  std::int32_t sequence = 0;
  for (const Source& source : sources) {
    GroupToPack group{.prompt_ids = source.prompt, .completions = {}};
    for (std::size_t i = 0; i < source.completions.size(); ++i) {
      group.completions.push_back(
          {.sequence_index = sequence++, .token_ids = source.completions[i], .loss_mask = source.masks[i]});
    }
    groups.push_back(group);
  }
  return groups;
}

TEST(PackMicroBatches, PacksThePromptOnceAndPointsHeadRowsAtThePredictingRow) {
  const std::vector<Source> sources = {{{7, 8, 9}, {{1, 2}, {3}}, {{1, 1}, {1}}}};
  const auto packed = PackMicroBatches(View(sources), 64);
  ASSERT_TRUE(packed.ok()) << packed.status();
  ASSERT_EQ(packed->size(), 1u);
  const MicroBatch& batch = packed->front();
  EXPECT_THAT(batch.token_ids, ElementsAre(7, 8, 9, 1, 2, 3));
  EXPECT_THAT(batch.positions, ElementsAre(0, 1, 2, 3, 4, 3));
  EXPECT_THAT(batch.head_rows, ElementsAre(2, 3, 2));
  EXPECT_THAT(batch.head_targets, ElementsAre(1, 2, 3));
  ASSERT_EQ(batch.completions.size(), 2u);
  EXPECT_EQ(batch.completions[1].prompt_begin, 0);
  EXPECT_EQ(batch.completions[1].prompt_end, 3);
  EXPECT_EQ(batch.completions[1].begin, 5);
  EXPECT_EQ(batch.completions[1].end, 6);
}

TEST(PassWork, CountsASharedPromptOnceAndALoneSequenceAsItsLengthSquared) {
  // Rows 3 + 2 + 1 over heads of width 8 in 2 layers; elements of a layer's products: q, k, v 4 x (8 + 2 x 4), o 8 x 4, MLP 3 x 4
  // x 16.
  ModelConfig config;
  config.hidden_size = 4;
  config.intermediate_size = 16;
  config.num_layers = 2;
  config.num_heads = 2;
  config.num_kv_heads = 1;
  config.head_dim = 4;
  config.vocab_size = 10;
  const double linear = 2 * (4 * 16 + 8 * 4 + 3 * 4 * 16), head = 4 * 10, attention_of_a_key = 2 * 8 * 2;
  const auto work_of = [](const std::vector<Source>& sources) {
    const auto packed = PackMicroBatches(View(sources), 64);
    PassWork work;
    for (const MicroBatch& batch : *packed) work.Add(batch);
    return work;
  };
  const PassWork alone = work_of({{{7, 8, 9}, {{1, 2}}, {{1, 1}}}});
  EXPECT_DOUBLE_EQ(UsefulFlops(config, alone), 4 * linear * 5 + 4 * head * 2 + 3.5 * attention_of_a_key * 25);
  EXPECT_DOUBLE_EQ(ExecutedFlops(config, alone), 6 * linear * 5 + 4 * head * 2 + 4.5 * attention_of_a_key * 25);
  // One token is not scored; the second group's prompt is its own.
  const PassWork shared = work_of({{{7, 8, 9}, {{1, 2}, {3}}, {{1, 0}, {1}}}, {{7, 8, 9}, {{4}}, {{1}}}});
  EXPECT_DOUBLE_EQ(shared.rows, 6 + 4);
  EXPECT_DOUBLE_EQ(shared.head_rows, 3);
  EXPECT_DOUBLE_EQ(shared.attended_keys, (9 + (25 - 9) + (16 - 9)) + 16);
}

// CASES C29: the mask comes from the caller's lengths; a token that equals the pad or end token is trained like any other.
TEST(PackMicroBatches, TrainsTheEndTokenThoughItIsThePadToken) {
  const std::uint32_t kEndAndPad = 2;
  const std::vector<Source> sources = {{{1}, {{5, 7, kEndAndPad}}, {{1, 1, 1}}}};
  const auto packed = PackMicroBatches(View(sources), 64);
  ASSERT_TRUE(packed.ok());
  EXPECT_THAT(packed->front().head_targets, ElementsAre(5, 7, kEndAndPad));
}

TEST(PackMicroBatches, MaskedTokensAreRowsWithoutHeadRows) {
  const std::vector<Source> sources = {{{1, 2}, {{3, 4, 5}}, {{1, 0, 1}}}};
  const auto packed = PackMicroBatches(View(sources), 64);
  ASSERT_TRUE(packed.ok());
  EXPECT_EQ(packed->front().token_ids.size(), 5u);
  EXPECT_THAT(packed->front().head_rows, ElementsAre(1, 3));
  EXPECT_THAT(packed->front().head_targets, ElementsAre(3, 5));
}

TEST(PackMicroBatches, PromptHeadRowsComeLastAndASharedPromptsOnce) {
  const std::vector<Source> sources = {{{1, 2, 3}, {{4, 5}, {6}}, {{1, 1}, {1}}}, {{7, 8}, {{9}}, {{1}}}};
  auto packed = PackMicroBatches(View(sources), 64);
  ASSERT_TRUE(packed.ok()) << packed.status();
  MicroBatch& batch = packed->front();
  const std::vector<std::int64_t> rows = batch.head_rows, targets = batch.head_targets;
  AddPromptHeadRows(&batch);
  EXPECT_EQ(batch.num_prompt_head_rows, 3u);
  const auto last = [](const std::vector<std::int64_t>& values) { return std::vector(values.end() - 3, values.end()); };
  EXPECT_THAT(last(batch.head_rows), ElementsAre(0, 1, 6));
  EXPECT_THAT(last(batch.head_targets), ElementsAre(2, 3, 8));
  EXPECT_EQ(std::vector(batch.head_rows.begin(), batch.head_rows.end() - 3), rows);
  EXPECT_EQ(std::vector(batch.head_targets.begin(), batch.head_targets.end() - 3), targets);
}

TEST(PackMicroBatches, SplitsALargeGroupBetweenCompletionsAndRepeatsItsPrompt) {
  const std::vector<Source> sources = {{{1, 2}, {{3, 4}, {5, 6}, {7}}, {{1, 1}, {1, 1}, {1}}}};
  const auto packed = PackMicroBatches(View(sources), 6);
  ASSERT_TRUE(packed.ok()) << packed.status();
  ASSERT_EQ(packed->size(), 2u);
  EXPECT_THAT((*packed)[0].token_ids, ElementsAre(1, 2, 3, 4, 5, 6));
  EXPECT_THAT((*packed)[1].token_ids, ElementsAre(1, 2, 7));
}

TEST(PackMicroBatches, KeepsAGroupTogetherWhenItFitsIntoAFreshMicroBatch) {
  const std::vector<Source> sources = {{{1}, {{2}, {3}}, {{1}, {1}}}, {{4}, {{5}, {6}}, {{1}, {1}}}};
  const auto packed = PackMicroBatches(View(sources), 5);
  ASSERT_TRUE(packed.ok());
  ASSERT_EQ(packed->size(), 2u);
  EXPECT_THAT((*packed)[1].token_ids, ElementsAre(4, 5, 6));
}

TEST(PackMicroBatches, AnEmptyCompletionStaysInTheMicroBatchWithoutRows) {
  const std::vector<Source> sources = {{{1, 2}, {{}, {3}}, {{}, {1}}}};
  const auto packed = PackMicroBatches(View(sources), 8);
  ASSERT_TRUE(packed.ok());
  ASSERT_EQ(packed->front().completions.size(), 2u);
  EXPECT_EQ(packed->front().completions[0].begin, packed->front().completions[0].end);
}

TEST(PackMicroBatches, RefusesWhatCannotBePackedNamingSequenceAndLimit) {
  const std::vector<Source> long_one = {{{1, 2, 3}, {{4, 5}}, {{1, 1}}}};
  EXPECT_THAT(std::string(PackMicroBatches(View(long_one), 4).status().message()), HasSubstr("3 + completion 2 = 5 tokens"));
  const std::vector<Source> no_prompt = {{{}, {{4}}, {{1}}}};
  EXPECT_EQ(PackMicroBatches(View(no_prompt), 4).status().code(), absl::StatusCode::kInvalidArgument);
  const std::vector<Source> short_mask = {{{1}, {{4, 5}}, {{1}}}};
  EXPECT_THAT(std::string(PackMicroBatches(View(short_mask), 4).status().message()), HasSubstr("2 tokens but 1 loss mask"));
}

// Random groups: every completion once and whole behind its own prompt, never above the limit, the same result twice.
TEST(PackMicroBatches, HoldsItsPromisesOnRandomGroups) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    std::uint64_t counter = 0;
    const auto draw = [&](std::uint64_t bound) { return RandomBelow(seed, counter++, bound); };
    std::vector<Source> sources(draw(6));
    std::map<std::int32_t, std::pair<Ids, Ids>> wanted;
    std::int32_t sequence = 0;
    for (Source& source : sources) {
      for (std::uint64_t n = 1 + draw(8); n > 0; --n) source.prompt.push_back(static_cast<std::uint32_t>(draw(100)));
      for (std::uint64_t n = draw(6); n > 0; --n) {
        Ids ids(draw(9));
        for (std::uint32_t& id : ids) id = static_cast<std::uint32_t>(draw(100));
        source.masks.emplace_back(ids.size(), std::uint8_t{1});
        wanted[sequence++] = {source.prompt, ids};
        source.completions.push_back(ids);
      }
    }
    const std::int64_t limit = 16 + static_cast<std::int64_t>(draw(40));
    const auto packed = PackMicroBatches(View(sources), limit), again = PackMicroBatches(View(sources), limit);
    ASSERT_TRUE(packed.ok() && again.ok()) << packed.status();
    ASSERT_EQ(packed->size(), again->size());
    std::size_t seen = 0;
    for (std::size_t b = 0; b < packed->size(); ++b) {
      const MicroBatch& batch = (*packed)[b];
      EXPECT_EQ(batch.token_ids, (*again)[b].token_ids);
      EXPECT_LE(static_cast<std::int64_t>(batch.token_ids.size()), limit);
      std::size_t head = 0;
      for (const PackedCompletion& completion : batch.completions) {
        ++seen;
        const auto ids = [&](std::int32_t begin, std::int32_t end) {
          return Ids(batch.token_ids.begin() + begin, batch.token_ids.begin() + end);
        };
        const auto& [prompt, tokens] = wanted.at(completion.sequence_index);
        EXPECT_EQ(ids(completion.prompt_begin, completion.prompt_end), prompt);
        EXPECT_EQ(ids(completion.begin, completion.end), tokens);
        for (const std::uint32_t token : tokens) EXPECT_EQ(batch.head_targets.at(head++), token);
      }
      EXPECT_EQ(head, batch.head_targets.size());
    }
    EXPECT_EQ(seen, wanted.size());
  }
}

}  // namespace
}  // namespace tandem
