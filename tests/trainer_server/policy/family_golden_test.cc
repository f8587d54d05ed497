#include <gtest/gtest.h>

#include <vector>

#include "tests/support/family_golden.h"
#include "trainer_server/batch/pack_micro_batches.h"
#include "trainer_server/policy/policy_model.h"

namespace tandem {
namespace {

using testing::AlignedBytes;
using testing::FamilyGolden;

// The first token is the prompt, the others the completion: their log-probs are those after each token before them.
TEST(FamilyGoldenTest, APackedSequenceHasTheLogprobsOfTransformers) {
  for (const char* family : testing::kGoldenFamilies) {
    SCOPED_TRACE(family);
    const FamilyGolden golden = testing::LoadFamilyGolden(family);
    const PolicyOptions options{.rank = 2, .scale = 1, .targets = {LinearKind::kQProj}};
    const AdapterLayout adapter = AdapterLayout::Create(golden.config, options.rank, options.targets);
    const AlignedBytes masters(adapter.total_bytes), gradients(adapter.total_bytes);
    const auto policy =
        PolicyModel::Create(golden.config, golden.layout, golden.weights->data(), {masters.span(), gradients.span()}, options);
    ASSERT_TRUE(policy.ok()) << policy.status();
    const std::vector<std::uint32_t> prompt(golden.token_ids.begin(), golden.token_ids.begin() + 1);
    const std::vector<std::uint32_t> completion(golden.token_ids.begin() + 1, golden.token_ids.end());
    const std::vector<std::uint8_t> mask(completion.size(), 1);
    const std::vector<GroupToPack> groups = {{prompt, {{0, completion, mask}}}};
    const auto packed = PackMicroBatches(groups, 1024);
    ASSERT_TRUE(packed.ok()) << packed.status();
    const auto scores = (*policy)->Score(packed->front(), PolicyKind::kReference);
    ASSERT_TRUE(scores.ok()) << scores.status();
    ASSERT_EQ(scores->logprobs.size(), golden.prefill_logprobs.size());
    for (std::size_t i = 0; i < scores->logprobs.size(); ++i) {
      EXPECT_NEAR(scores->logprobs[i], golden.prefill_logprobs[i], 1e-4) << "token " << i + 1;
    }
  }
}

}  // namespace
}  // namespace tandem
