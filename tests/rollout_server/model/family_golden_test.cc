#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "rollout_server/model/decoder_model.h"
#include "tests/rollout_server/model/family_steps.h"
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
    const auto prefill = (*decoder)->Run(testing::PrefillStep(golden));
    ASSERT_TRUE(prefill.ok()) << prefill.status();
    for (std::int64_t i = 0; i < prefill->num_rows; ++i) {
      ExpectClose(prefill->row(i), golden.prefill_logits[static_cast<std::size_t>(i)], absl::StrCat("row ", i));
    }
    const auto decode = (*decoder)->Run(testing::DecodeStep(golden));
    ASSERT_TRUE(decode.ok()) << decode.status();
    ExpectClose(decode->row(0), golden.decode_logits, "decode");
  }
}

}  // namespace
}  // namespace tandem
