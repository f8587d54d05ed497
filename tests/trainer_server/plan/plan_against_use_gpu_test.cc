// Plan against use on the GPU: what a policy's passes take of the arena, beside what was planned for them.
#include <algorithm>
#include <cstdio>
#include <vector>

#include "common/base/units.h"
#include "gtest/gtest.h"
#include "tests/trainer_server/support/gpu_policy.h"
#include "trainer_server/plan/memory_plan.h"

namespace tandem {
namespace {

using testing::AllLayers;
using testing::GpuPolicy;
using testing::Group;
using testing::PolicyGpuTest;
using testing::RandomIds;
using testing::TinyAdapter;
using testing::TinyModel;

constexpr std::uint64_t kLongestPrompt = 1000, kLongestCompletion = 8000;
constexpr int kNumSteps = 5, kLongestStep = 3;

class PlanAgainstUseGpuTest : public PolicyGpuTest {
 protected:
  PlanAgainstUseGpuTest() : PolicyGpuTest(std::uint64_t{2} << 30) {}
};

ModelConfig WideConfig() {
  ModelConfig config = testing::TinyConfig();
  config.num_layers = 4;
  config.hidden_size = 512;
  config.intermediate_size = 1408;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = 128;
  config.max_positions = 16384;
  return config;
}

// One group of two, of random lengths; at its longest where `is_longest` says so.
std::vector<Group> StepGroups(std::uint64_t seed, bool is_longest) {
  Group group{RandomIds(seed, is_longest ? kLongestPrompt : 5 + RandomBelow(seed, 1, kLongestPrompt - 10)), {}};
  for (std::uint64_t m = 0; m < 2; ++m) {
    const std::uint64_t shorter = 1 + RandomBelow(seed, 2 + m, kLongestCompletion - 100);
    group.completions.push_back(RandomIds(DeriveSeed(seed, m), is_longest && m == 0 ? kLongestCompletion : shorter));
  }
  return {group};
}

// CASES C39, on the GPU: with room for all layer inputs, and with room for few of them, so that the others travel.
TEST_F(PlanAgainstUseGpuTest, C39PlanBoundsEveryStepAndIsWithinFivePercentOfTheLargest) {
  const ModelConfig config = WideConfig();
  const TinyModel base(config);
  testing::ScaleMatrices(base, 0.3f);
  const TinyAdapter adapter(config, 8, testing::AllLinearKinds(), 0.2f, 3);
  JobMemory job{.rank = 8, .adapter_bytes = adapter.layout.total_bytes};
  job.group_size = 2;
  job.shortest_prompt_tokens = 5;
  job.longest_prompt_tokens = kLongestPrompt;
  job.max_completion_tokens = kLongestCompletion;
  job.micro_batch_tokens = kLongestPrompt + kLongestCompletion;
  for (const StorageFormat format : {StorageFormat::kBf16, StorageFormat::kNf4}) {
    GpuPolicy policy(base, format, AllLayers(8), adapter, device());
    NodeMemory node;
    node.device = Device::kCuda;
    node.weight_format = format;
    node.attention = device().attention;
    node.trainer_standing_bytes = kGiB;
    node.elastic_bytes = arena_->span().size();
    node.host_limit_bytes = kGiB;
    node.rollout = AssumedRolloutMemory(config, Device::kCuda);
    const v1::MemoryPlan roomy = PlanMemory(config, job, node).figures;
    ASSERT_EQ(roomy.layers_in_pool(), 4u);
    const std::uint64_t layer_bytes = PlannedOf(roomy, "layer_inputs") / 4;
    for (const std::uint64_t layers : {std::uint64_t{4}, std::uint64_t{2}}) {
      SCOPED_TRACE(absl::StrCat(StorageFormatName(format), ", ", layers, " layers' inputs in the arena"));
      node.elastic_bytes = (PlannedOf(roomy, "activations") + (layers + 1) * layer_bytes) / 256 * 256;
      const PlannedMemory planned = PlanMemory(config, job, node);
      ASSERT_TRUE(planned.faults.empty()) << planned.faults[0];
      ASSERT_EQ(planned.figures.layers_in_pool(), layers);
      const std::uint64_t bound = PlannedOf(planned.figures, "activations") + PlannedOf(planned.figures, "layer_inputs");
      const double longest = static_cast<double>(PlannedOf(planned.figures, "activations") + layers * layer_bytes);
      for (int step = 1; step <= kNumSteps; ++step) {
        const auto batches = testing::Pack(StepGroups(static_cast<std::uint64_t>(step), step == kLongestStep),
                                           static_cast<std::int64_t>(job.micro_batch_tokens));
        const ArenaScope scope(arena_->span().first(node.elastic_bytes), "activations", Device::kCuda);
        policy.Run(batches, false);
        EXPECT_LE(scope.peak_bytes(), bound) << "step " << step;
        if (step != kLongestStep) continue;
        const auto peak = static_cast<double>(scope.peak_bytes()), mib = static_cast<double>(kMiB);
        std::printf("%s, %d layers: planned %.1f MiB, in use %.1f MiB\n", StorageFormatName(format), static_cast<int>(layers),
                    longest / mib, peak / mib);
        EXPECT_GE(peak, 0.95 * longest);
      }
    }
  }
}

}  // namespace
}  // namespace tandem
