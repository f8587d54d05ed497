#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "rollout_server/model/decoder_model.h"
#include "tests/support/family_golden.h"

namespace tandem {
namespace {

using testing::FamilyGolden;

void ExpectClose(std::span<const float> row, const std::vector<float>& expected, const std::string& what) {
  ASSERT_EQ(row.size(), expected.size()) << what;
  for (std::size_t j = 0; j < row.size(); ++j) ASSERT_NEAR(row[j], expected[j], 1e-4F) << what << ", token " << j;
}

TEST(FamilyGoldenTest, PrefillAndDecodeGiveTheLogitsOfTransformers) {
  for (const char* family : testing::kGoldenFamilies) {
    SCOPED_TRACE(family);
    const FamilyGolden golden = testing::LoadFamilyGolden(family);
    const testing::AlignedBytes cache(4 * DecoderModel::BlockBytes(golden.config, 16, DType::kFp32));
    const auto decoder = DecoderModel::Create(golden.config, golden.layout, golden.weights->data(), cache.span(),
                                              {.block_tokens = 16, .num_blocks = 4});
    ASSERT_TRUE(decoder.ok()) << decoder.status();
    const auto num_prompt_tokens = static_cast<std::int32_t>(golden.prefill_logits.size());
    StepBatch batch;
    batch.token_ids.assign(golden.token_ids.begin(), golden.token_ids.end() - 1);
    batch.positions.resize(batch.token_ids.size());
    std::iota(batch.positions.begin(), batch.positions.end(), 0);
    batch.slot_mapping.assign(batch.positions.begin(), batch.positions.end());
    batch.logit_rows = batch.positions;
    batch.cu_query_lens = {0, num_prompt_tokens};
    batch.context_lens = {num_prompt_tokens};
    batch.block_tables = {{0, 1}};
    batch.adapter_of = {-1};
    const auto prefill = (*decoder)->Run(batch);
    ASSERT_TRUE(prefill.ok()) << prefill.status();
    for (std::int64_t i = 0; i < prefill->num_rows; ++i) {
      ExpectClose(prefill->row(i), golden.prefill_logits[static_cast<std::size_t>(i)], absl::StrCat("row ", i));
    }
    batch.token_ids = {golden.token_ids.back()};
    batch.positions = {num_prompt_tokens};
    batch.slot_mapping = {num_prompt_tokens};
    batch.logit_rows = {0};
    batch.cu_query_lens = {0, 1};
    batch.context_lens = {num_prompt_tokens + 1};
    const auto decode = (*decoder)->Run(batch);
    ASSERT_TRUE(decode.ok()) << decode.status();
    ExpectClose(decode->row(0), golden.decode_logits, "decode");
  }
}

}  // namespace
}  // namespace tandem
