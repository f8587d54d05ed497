// Plan against use: what a policy's passes take of the arena, measured, beside what was planned for them.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "common/base/random.h"
#include "common/torch/arena_allocator.h"
#include "tests/support/naive_transformer.h"
#include "tests/trainer_server/support/packed_groups.h"
#include "trainer_server/plan/memory_plan.h"
#include "trainer_server/policy/policy_model.h"

namespace tandem {
namespace {

using testing::AlignedBytes;
using testing::AllLayers;
using testing::Group;
using testing::RandomIds;
using testing::TinyModel;

constexpr std::uint64_t kLongestPrompt = 90, kLongestCompletion = 410;
constexpr std::size_t kGroupSize = 2, kPromptsPerStep = 2;

struct Recipe {
  ModelConfig model;
  double dropout = 0;
  bool has_entropy_bonus = false;
  int num_steps = 20;
  int longest_step = 3;
};

// One step of random lengths; at its longest where `is_longest` says so.
std::vector<Group> StepGroups(std::uint64_t seed, bool is_longest) {
  std::vector<Group> groups;
  for (std::uint64_t g = 0; g < kPromptsPerStep; ++g) {
    const std::uint64_t group_seed = DeriveSeed(seed, g);
    Group group{RandomIds(group_seed, is_longest ? kLongestPrompt : 5 + RandomBelow(group_seed, 1, kLongestPrompt - 10)), {}};
    for (std::uint64_t m = 0; m < kGroupSize; ++m) {
      const std::uint64_t length =
          is_longest && m == 0 ? kLongestCompletion : 1 + RandomBelow(group_seed, 2 + m, kLongestCompletion - 20);
      group.completions.push_back(RandomIds(DeriveSeed(group_seed, m), length));
    }
    groups.push_back(std::move(group));
  }
  return groups;
}

// CASES C39: no step takes more than was planned, and the largest takes at least 95 % of it.
TEST(PlanAgainstUse, C39PlanBoundsEveryStepAndIsWithinFivePercentOfTheLargest) {
  std::vector<Recipe> recipes;
  for (const ModelConfig& model : testing::FamilyConfigs()) recipes.push_back({.model = model});
  recipes[0].num_steps = 200;
  recipes[0].longest_step = 173;
  recipes.push_back({.model = testing::TinyConfig(), .dropout = 0.1});
  recipes.push_back({.model = testing::TinyConfig(), .has_entropy_bonus = true});
  for (const Recipe& recipe : recipes) {
    SCOPED_TRACE(absl::StrCat(recipe.model.family, " dropout ", recipe.dropout, " entropy bonus ", recipe.has_entropy_bonus));
    const TinyModel base(recipe.model);
    PolicyOptions options = AllLayers(8);
    options.dropout = recipe.dropout;
    const AdapterLayout layout = AdapterLayout::Create(base.config, options.rank, options.targets);
    AlignedBytes masters(layout.total_bytes), gradients(layout.total_bytes), elastic(16 << 20);
    auto policy =
        PolicyModel::Create(base.config, base.layout, base.weights->data(), {masters.span(), gradients.span()}, options);
    ASSERT_TRUE(policy.ok()) << policy.status();
    ASSERT_TRUE((*policy)->InitializeAdapters(1).ok());

    NodeMemory node;
    node.elastic_bytes = elastic.span().size();
    node.trainer_standing_bytes = 16 << 20;
    node.rollout = AssumedRolloutMemory(base.config, Device::kCpu);
    JobMemory job{.rank = options.rank, .adapter_bytes = layout.total_bytes, .has_dropout = recipe.dropout > 0};
    job.prompts_per_step = kPromptsPerStep;
    job.group_size = kGroupSize;
    job.shortest_prompt_tokens = 5;
    job.longest_prompt_tokens = kLongestPrompt;
    job.max_completion_tokens = kLongestCompletion;
    job.micro_batch_tokens = kLongestPrompt + kLongestCompletion;
    const PlannedMemory planned = PlanMemory(base.config, job, node);
    ASSERT_TRUE(planned.faults.empty()) << planned.faults[0];
    const std::uint64_t planned_bytes = PlannedOf(planned.figures, "activations") + PlannedOf(planned.figures, "layer_inputs");

    std::uint64_t largest = 0;
    for (int step = 1; step <= recipe.num_steps; ++step) {
      const auto batches = testing::Pack(StepGroups(static_cast<std::uint64_t>(step), step == recipe.longest_step),
                                         static_cast<std::int64_t>(job.micro_batch_tokens));
      const ArenaScope scope(elastic.span(), "activations");
      for (const MicroBatch& batch : batches) {
        ASSERT_TRUE((*policy)->Forward(batch, recipe.has_entropy_bonus, static_cast<std::uint64_t>(step)).ok());
        const std::vector<double> entropies = recipe.has_entropy_bonus ? testing::RowGradients(batch, 2) : std::vector<double>();
        ASSERT_TRUE((*policy)->Backward(testing::RowGradients(batch, 1), entropies).ok());
      }
      EXPECT_LE(scope.peak_bytes(), planned_bytes) << "step " << step;
      largest = std::max(largest, scope.peak_bytes());
    }
    EXPECT_GE(static_cast<double>(largest), 0.95 * static_cast<double>(planned_bytes)) << "planned " << planned_bytes;
    RecordProperty(absl::StrCat("use_of_plan_", recipe.model.family), absl::StrCat(100 * largest / planned_bytes, " %"));
  }
}

}  // namespace
}  // namespace tandem
