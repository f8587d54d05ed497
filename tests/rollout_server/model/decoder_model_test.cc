#include "rollout_server/model/decoder_model.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>

#include "common/model/model_source.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/block_scaled_model.h"
#include "tests/support/naive_transformer.h"
#include "tests/support/temporary_directory.h"

namespace tandem {
namespace {

using testing::AlignedBytes;
using ::testing::HasSubstr;
using testing::NaiveTransformer;
using testing::TinyAdapter;
using testing::TinyModel;
using Ids = std::vector<std::uint32_t>;
using Row = std::vector<float>;

// Feeds sequences to a model chunk by chunk; each keeps its own blocks, drawn in an order that is not the natural one.
class Runner {
 public:
  Runner(const TinyModel& model, int block_tokens, int num_blocks = 64)
      : model_(model),
        block_tokens_(block_tokens),
        cache_(num_blocks * DecoderModel::BlockBytes(model.config, block_tokens, DType::kFp32)) {
    // What a former holder of the memory left must not matter.
    std::fill_n(cache_.floats(), cache_.span().size() / sizeof(float), std::numeric_limits<float>::quiet_NaN());
    auto created = DecoderModel::Create(model.config, model.layout, model.weights->data(), cache_.span(),
                                        {.block_tokens = block_tokens, .num_blocks = num_blocks});
    EXPECT_TRUE(created.ok()) << created.status();
    decoder_ = *std::move(created);
    for (int block = 0; block < num_blocks; ++block) free_blocks_.push_back(static_cast<std::int32_t>(block * 7 % num_blocks));
  }

  struct Chunk {
    int sequence;
    Ids ids;
    int adapter = -1;
  };

  // Logits of every row of the chunks, in order.
  std::vector<Row> Step(const std::vector<Chunk>& chunks, const std::vector<AdapterView>& adapters = {}) {
    StepBatch batch;
    batch.cu_query_lens.push_back(0);
    batch.adapters = adapters;
    for (const Chunk& chunk : chunks) {
      Sequence& sequence = sequences_[static_cast<std::size_t>(chunk.sequence)];
      for (const std::uint32_t id : chunk.ids) {
        if (sequence.length % block_tokens_ == 0) {
          sequence.blocks.push_back(free_blocks_.back());
          free_blocks_.pop_back();
        }
        batch.logit_rows.push_back(static_cast<std::int32_t>(batch.token_ids.size()));
        batch.token_ids.push_back(id);
        batch.positions.push_back(sequence.length);
        batch.slot_mapping.push_back(sequence.blocks.back() * block_tokens_ + sequence.length % block_tokens_);
        ++sequence.length;
      }
      batch.cu_query_lens.push_back(static_cast<std::int32_t>(batch.token_ids.size()));
      batch.context_lens.push_back(sequence.length);
      batch.block_tables.push_back(sequence.blocks);
      batch.adapter_of.push_back(chunk.adapter);
    }
    last_ = batch;
    const auto logits = decoder_->Run(batch);
    EXPECT_TRUE(logits.ok()) << logits.status();
    std::vector<Row> rows;
    for (std::int64_t i = 0; i < logits->num_rows; ++i) rows.emplace_back(logits->row(i).begin(), logits->row(i).end());
    return rows;
  }

  DecoderModel& decoder() { return *decoder_; }
  const StepBatch& last() const { return last_; }

 private:
  struct Sequence {
    int length = 0;
    std::vector<std::int32_t> blocks;
  };
  const TinyModel& model_;
  const int block_tokens_;
  AlignedBytes cache_;
  std::unique_ptr<DecoderModel> decoder_;
  std::vector<std::int32_t> free_blocks_;
  Sequence sequences_[16];
  StepBatch last_;
};

Ids RandomIds(std::uint64_t seed, std::size_t count) {
  Ids ids(count);
  for (std::size_t i = 0; i < count; ++i) ids[i] = static_cast<std::uint32_t>(RandomBelow(seed, i, 128));
  return ids;
}

void ExpectClose(const Row& row, const std::vector<double>& expected, double tolerance, const std::string& what) {
  for (std::size_t j = 0; j < row.size(); ++j)
    ASSERT_NEAR(static_cast<double>(row[j]), expected[j], tolerance) << what << ", token " << j;
}

void ExpectClose(const std::vector<Row>& rows, const std::vector<std::vector<double>>& expected, std::size_t first,
                 double tolerance) {
  for (std::size_t r = 0; r < rows.size(); ++r)
    ExpectClose(rows[r], expected[first + r], tolerance, "row " + std::to_string(first + r));
}

constexpr double kTolerance = 2e-4;  // logits reach 10; 2 layers of fp32 sums against double

// From the file to the logits; every dimension ends within a block.
TEST(DecoderModel, ACheckpointInBlocksGivesTheLogitsOfItsCodesTimesTheirFactors) {
  const testing::TemporaryDirectory directory;
  const testing::BlockScaledModel saved(
      directory.path(), {.hidden_size = 144, .intermediate_size = 272, .num_heads = 9, .num_kv_heads = 3, .vocab_size = 300});
  const auto source = ModelSource::Open(directory.path());
  ASSERT_TRUE(source.ok()) << source.status();
  const TinyModel expected = saved.AsTinyModel((*source)->description().config);
  TinyModel model(expected.config);
  ASSERT_EQ((*source)->LoadWeights(model.layout, Device::kCpu, model.weights->span(), nullptr), absl::OkStatus());
  const Ids ids = RandomIds(5, 21);
  Runner runner(model, 4);
  ExpectClose(runner.Step({{0, ids}}), NaiveTransformer(expected).Logits(ids), 0, kTolerance);
}

TEST(DecoderModel, PartsOfTheWorkspaceAddUpToIt) {
  const ModelConfig config = testing::TinyConfig();
  EXPECT_TRUE(DecoderModel::WorkspaceParts(config, {.device = Device::kCpu}).empty());
  EXPECT_EQ(DecoderModel::WorkspaceBytes(config, {.device = Device::kCpu}), 0u);
  // Sizes are arithmetic: no GPU is needed, but a build with its code.
  const DecoderModelOptions options{.device = Device::kCuda, .weight_format = StorageFormat::kNf4, .kv_dtype = DType::kFp8E3m4};
  std::uint64_t bytes = 0;
  for (const WorkspacePart& part : DecoderModel::WorkspaceParts(config, options)) {
    EXPECT_LT(part.size_bytes, std::uint64_t{1} << 32) << part.owner;
    bytes += part.size_bytes;
  }
  EXPECT_EQ(bytes, DecoderModel::WorkspaceBytes(config, options));
}

TEST(DecoderModel, PrefillEqualsTheNaiveTransformer) {
  for (const ModelConfig& config : testing::FamilyConfigs()) {
    SCOPED_TRACE(config.family);
    const TinyModel model(config);
    for (const int block_tokens : {1, 5, 16, 32, 100}) {
      SCOPED_TRACE(block_tokens);
      const Ids ids = RandomIds(3, 61);
      Runner runner(model, block_tokens);
      ExpectClose(runner.Step({{0, ids}}), NaiveTransformer(model).Logits(ids), 0, kTolerance);
    }
  }
}

TEST(DecoderModel, ChunksAndSingleTokensGiveTheSameAsOnePrefill) {
  const TinyModel model;
  const Ids ids = RandomIds(4, 150);
  const auto expected = NaiveTransformer(model).Logits(ids);
  Runner runner(model, 16);
  std::size_t done = 0;
  for (const std::size_t count : {37u, 1u, 1u, 63u, 2u, 1u, 45u}) {
    const auto rows = runner.Step(
        {{0, Ids(ids.begin() + static_cast<std::ptrdiff_t>(done), ids.begin() + static_cast<std::ptrdiff_t>(done + count))}});
    ExpectClose(rows, expected, done, kTolerance);
    done += count;
  }
  EXPECT_EQ(done, ids.size());
}

TEST(DecoderModel, MixedPrefillAndDecodeKeepSequencesApart) {
  const TinyModel model;
  const Ids a = RandomIds(5, 40), b = RandomIds(6, 21), c = RandomIds(7, 3);
  const NaiveTransformer naive(model);
  const auto want_a = naive.Logits(a), want_b = naive.Logits(b), want_c = naive.Logits(c);
  Runner runner(model, 4);
  runner.Step({{0, Ids(a.begin(), a.end() - 1)}, {1, Ids(b.begin(), b.begin() + 10)}});
  const auto rows = runner.Step({{1, Ids(b.begin() + 10, b.end())}, {0, {a.back()}}, {2, c}});
  ASSERT_EQ(rows.size(), 15u);
  for (std::size_t i = 0; i < 11; ++i) ExpectClose(rows[i], want_b[10 + i], kTolerance, "b");
  ExpectClose(rows[11], want_a.back(), kTolerance, "a");
  for (std::size_t i = 0; i < 3; ++i) ExpectClose(rows[12 + i], want_c[i], kTolerance, "c");
}

TEST(DecoderModel, EachSequenceRunsUnderItsOwnAdapter) {
  const TinyModel model;
  const TinyAdapter all(model.config, 4, testing::AllLinearKinds(), 0.5f, 11);
  const TinyAdapter some(model.config, 3, {LinearKind::kKProj, LinearKind::kUpProj, LinearKind::kDownProj}, 2.f, 12);
  const std::vector<AdapterView> views = {{all.slot->data(), &all.layout, all.scale},
                                          {some.slot->data(), &some.layout, some.scale}};
  const Ids a = RandomIds(8, 9), b = RandomIds(9, 17), c = RandomIds(10, 5), d = RandomIds(11, 6);
  Runner runner(model, 16);
  const auto rows = runner.Step({{0, a, 0}, {1, b, 1}, {2, c, -1}, {3, d, 0}}, views);
  const auto check = [&](const Ids& ids, const TinyAdapter* adapter, std::size_t first) {
    const auto expected = NaiveTransformer(model, adapter).Logits(ids);
    for (std::size_t i = 0; i < ids.size(); ++i)
      ExpectClose(rows[first + i], expected[i], kTolerance, "row " + std::to_string(first + i));
  };
  check(a, &all, 0);
  check(b, &some, 9);
  check(c, nullptr, 26);
  check(d, &all, 31);
}

// CASES C17: rank 8, alpha 16: scale 2; x, A and B of ones (4 -> 8 -> 4) add 64 to each output, where raw alpha would add 512.
TEST(DecoderModel, AdapterScaleIsAlphaOverRank) {
  const testing::OnesModel ones;
  const TinyAdapter& adapter = *ones.adapter;
  Runner runner(*ones.model, 16);
  const auto rows = runner.Step({{0, {0}, 0}, {1, {0}, -1}}, {{adapter.slot->data(), &adapter.layout, adapter.scale}});
  EXPECT_NEAR(testing::OnesModel::Added(rows[0][0], rows[0][1]), 64, 0.01);
  EXPECT_NEAR(testing::OnesModel::Added(rows[1][0], rows[1][1]), 0, 1e-6);
}

// CASES C16: head and embedding are one tensor in the pool: a row written there changes that token's logits at once.
TEST(DecoderModel, ATiedEmbeddingRowWrittenInThePoolChangesThatTokensLogitsAtOnce) {
  const TinyModel model;
  const Ids ids = RandomIds(13, 6);
  const std::uint32_t token = 77;
  ASSERT_EQ(std::count(ids.begin(), ids.end(), token), 0);
  Runner runner(model, 16);
  const auto before = runner.Step({{0, ids}});
  float* row = model.Weight(model.layout.embedding) + token * static_cast<std::size_t>(model.config.hidden_size);
  for (int i = 0; i < model.config.hidden_size; ++i) row[i] += 1;
  const auto after = runner.Step({{1, ids}});
  const auto expected = NaiveTransformer(model).Logits(ids);
  for (std::size_t r = 0; r < ids.size(); ++r) {
    EXPECT_GT(std::abs(after[r][token] - before[r][token]), 1e-3f);
    for (std::size_t j = 0; j < after[r].size(); ++j) {
      if (j != token) { EXPECT_EQ(after[r][j], before[r][j]); }
    }
    ExpectClose(after[r], expected[r], kTolerance, "after");
  }
}

// CASES C06: what one sequence does to itself stays its own: the others are bit-equal.
TEST(DecoderModel, NanInOneSequenceLeavesTheOthersBitEqual) {
  TinyModel model;
  std::vector<Runner::Chunk> chunks;
  for (int s = 0; s < 8; ++s) chunks.push_back({s, RandomIds(20 + static_cast<std::uint64_t>(s), 5)});
  for (auto& chunk : chunks) std::replace(chunk.ids.begin(), chunk.ids.end(), 99u, 98u);
  chunks[3].ids[2] = 99;
  Runner clean(model, 16);
  const auto expected = clean.Step(chunks);
  float* poisoned = model.Weight(model.layout.embedding) + 99u * static_cast<std::size_t>(model.config.hidden_size);
  const float kept = *poisoned;
  *poisoned = std::numeric_limits<float>::quiet_NaN();
  Runner runner(model, 16);
  const auto rows = runner.Step(chunks);
  *poisoned = kept;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    if (r >= 15 && r < 17) continue;             // sequence 3 before the token: lost with its sequence
    const bool is_poisoned = r >= 17 && r < 20;  // sequence 3, from its third token on
    for (std::size_t j = 0; j < rows[r].size(); ++j) {
      if (is_poisoned) {
        EXPECT_TRUE(std::isnan(rows[r][j]));
      } else if (j != 99) {  // the tied head's own row 99 holds the NaN too
        EXPECT_EQ(rows[r][j], expected[r][j]) << "row " << r << " token " << j;
      }
    }
  }
}

TEST(DecoderModel, RepeatsBitForBit) {
  const TinyModel model;
  const std::vector<Runner::Chunk> chunks = {{0, RandomIds(30, 33)}, {1, RandomIds(31, 7)}, {2, RandomIds(32, 64)}};
  Runner first(model, 16), second(model, 16);
  EXPECT_EQ(first.Step(chunks), second.Step(chunks));
}

TEST(DecoderModel, ACopiedBlockServesASecondSequence) {
  const TinyModel model;
  const Ids ids = RandomIds(33, 7);
  Runner runner(model, 8);
  runner.Step({{0, Ids(ids.begin(), ids.end() - 1)}});
  const auto expected = runner.Step({{0, {ids.back()}}});
  StepBatch batch = runner.last();
  const std::int32_t from = batch.block_tables[0][0], to = from == 0 ? 1 : from - 1;
  ASSERT_TRUE(runner.decoder().CopyBlock(from, to).ok());
  batch.block_tables[0][0] = to;
  batch.slot_mapping[0] = to * 8 + 6;
  const auto logits = runner.decoder().Run(batch);
  ASSERT_TRUE(logits.ok()) << logits.status();
  EXPECT_EQ(Row(logits->row(0).begin(), logits->row(0).end()), expected[0]);
  EXPECT_EQ(runner.decoder().CopyBlock(0, 64).code(), absl::StatusCode::kInvalidArgument);
}

TEST(DecoderModel, RefusesBatchesThatWouldReadOrWriteOutside) {
  const TinyModel model;
  Runner runner(model, 8);
  runner.Step({{0, RandomIds(34, 9)}});
  const StepBatch good = runner.last();
  ASSERT_TRUE(runner.decoder().Run(good).ok());
  const auto expect_refused = [&](const auto& change, const std::string& words) {
    StepBatch batch = good;
    change(&batch);
    const auto result = runner.decoder().Run(batch);
    EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument) << words;
    EXPECT_THAT(std::string(result.status().message()), HasSubstr(words));
  };
  expect_refused([](StepBatch* b) { b->token_ids[1] = 128; }, "token id 128 of row 1");
  expect_refused([](StepBatch* b) { b->positions[0] = 2048; }, "position 2048");
  expect_refused([](StepBatch* b) { b->slot_mapping[3] = 64 * 8; }, "slot 512 of row 3");
  expect_refused([](StepBatch* b) { b->logit_rows[0] = 9; }, "logit row 9");
  expect_refused([](StepBatch* b) { b->block_tables[0].pop_back(); }, "1 blocks for a context that needs 2");
  expect_refused([](StepBatch* b) { b->block_tables[0][1] = 64; }, "block 64 of 64");
  expect_refused([](StepBatch* b) { b->adapter_of[0] = 0; }, "adapter 0 of 0");
  expect_refused([](StepBatch* b) { b->context_lens[0] = 8; }, "9 query tokens in a context of 8");
  expect_refused([](StepBatch* b) { b->cu_query_lens[1] = 8; }, "cu_query_lens run from 0 to 8");
}

}  // namespace
}  // namespace tandem
