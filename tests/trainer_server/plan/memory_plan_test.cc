#include "trainer_server/plan/memory_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "common/base/random.h"
#include "common/base/units.h"
#include "common/memory/pool_plan.h"
#include "common/model/random_model_source.h"
#include "trainer_server/policy/policy_memory.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;

ModelConfig Llama8b() { return *ConfigOfShape("llama-3.1-8b"); }

// An 80 GiB pool on a GPU with Llama-3.1-8B in NF4 and a KV cache in FP8.
NodeMemory GpuNode(const ModelConfig& model) {
  NodeMemory node;
  node.device = Device::kCuda;
  node.weight_format = StorageFormat::kNf4;
  node.weights_bytes = RoundUp(WeightLayout::Create(model, node.weight_format).total_bytes, 2 * kMiB);
  node.model_bytes = 10 * kMiB;
  node.rollout_standing_bytes = node.trainer_standing_bytes = 2 * kGiB;
  node.elastic_bytes = 70 * kGiB;
  node.host_limit_bytes = 64 * kGiB;
  v1::OwnedBytes* workspace = &node.trainer_fixed.emplace_back();
  workspace->set_owner("gemm_workspace");
  workspace->set_bytes(32 * kMiB);
  node.rollout.set_block_tokens(16);
  node.rollout.set_kv_block_bytes(std::uint64_t{2} * 32 * 1024 * 16);
  node.rollout.set_max_sequences(256);
  v1::OwnedBytes* standing = node.rollout.add_standing();
  standing->set_owner("decoder_workspace");
  standing->set_bytes(900 * kMiB);
  return node;
}

JobMemory Job(const ModelConfig& model, std::uint64_t context, std::uint64_t group_size) {
  JobMemory job;
  job.rank = 16;
  std::vector<LinearKind> targets;
  for (int kind = 0; kind < kNumLinearKinds; ++kind) targets.push_back(static_cast<LinearKind>(kind));
  job.adapter_bytes = AdapterLayout::Create(model, job.rank, targets).total_bytes;
  job.group_size = group_size;
  job.shortest_prompt_tokens = 100;
  job.longest_prompt_tokens = 512;
  job.max_completion_tokens = context - 512;
  return job;
}

// The node again with the pool that flags of these sizes make.
NodeMemory WithPool(NodeMemory node, std::uint64_t pool_bytes, const v1::MemoryPlan& plan) {
  const auto pool = PoolPlan::Create({.pool_bytes = pool_bytes,
                                      .weights_bytes = node.weights_bytes,
                                      .model_bytes = node.model_bytes,
                                      .rollout_standing_bytes = plan.asked_rollout_standing_bytes(),
                                      .trainer_standing_bytes = plan.asked_trainer_standing_bytes(),
                                      .elastic_on_chunk = node.device == Device::kCuda},
                                     2 * kMiB);
  EXPECT_TRUE(pool.ok()) << pool.status();
  const auto size_of = [&](std::size_t i) {
    return pool->regions[i].range().end_bytes() - pool->regions[i].range().begin_bytes();
  };
  node.rollout_standing_bytes = size_of(2);
  node.trainer_standing_bytes = size_of(3);
  node.elastic_bytes = size_of(4);
  return node;
}

std::uint64_t ContextOf(const v1::MemoryPlan& plan, const std::string& name) {
  for (const v1::ContextWall& wall : plan.walls()) {
    if (wall.name() == name) return wall.context_tokens();
  }
  ADD_FAILURE() << "no wall " << name;
  return 0;
}

// CASES C38, the planned part: tiles of the head take as much at any context, and the pass no more than its rows' share.
TEST(MemoryPlan, C38HeadScratchIsBoundedAtAnyContext) {
  ModelConfig model = Llama8b();
  for (const int vocab_size : {257, 32000, 128256, 151936, 262144}) {
    model.vocab_size = vocab_size;
    for (const std::int64_t element_bytes : {2, 4}) {
      std::uint64_t largest = 0;
      for (const std::int64_t head_rows : {1, 255, 1024, 20480, 40960, 1 << 20}) {
        const HeadTile tile = ChooseHeadTile(model, element_bytes, 0, head_rows);
        EXPECT_LE(tile.scratch_bytes, 256 * kMiB) << vocab_size << " " << head_rows;
        EXPECT_GE(tile.rows, 1);
        if (head_rows >= 20480) { EXPECT_EQ(tile.scratch_bytes, largest) << "more tokens, more scratch"; }
        largest = std::max(largest, tile.scratch_bytes);
      }
    }
  }
  // Twice the tokens: twice the rows' memory, the tiles' once. Logits would be 501 KiB a row.
  model.vocab_size = 128256;
  const PolicyMemory once = PlanPolicyMemory(model, StorageFormat::kBf16, {}, {.rank = 16, .rows = 20480, .head_rows = 20480});
  const PolicyMemory twice = PlanPolicyMemory(model, StorageFormat::kBf16, {}, {.rank = 16, .rows = 40960, .head_rows = 40960});
  EXPECT_LE(twice.working_bytes, 2 * once.working_bytes);
  EXPECT_LT((twice.working_bytes - once.working_bytes) / 20480, 100 * kKiB);
}

TEST(MemoryPlan, OwnersAddUpToThePoolInBothPhases) {
  const ModelConfig model = Llama8b();
  const NodeMemory node = GpuNode(model);
  for (const std::uint64_t context : {std::uint64_t{1024}, std::uint64_t{20480}, std::uint64_t{100000}}) {
    JobMemory job = Job(model, context, 8);
    const std::uint64_t asked = PlanMemory(model, job, node).figures.asked_trainer_standing_bytes();
    job.has_reference_adapter = true;
    const PlannedMemory planned = PlanMemory(model, job, node);
    EXPECT_TRUE(planned.faults.empty()) << planned.faults[0];
    EXPECT_EQ(PlannedOf(planned.figures, "reference_adapter"), PlannedOf(planned.figures, "adapter_masters"));
    EXPECT_GT(planned.figures.asked_trainer_standing_bytes(), asked);
    std::uint64_t generation = 0, training = 0;
    for (const v1::PlannedBytes& owned : planned.figures.owners()) {
      if (owned.place() != v1::MEMORY_PLACE_POOL) continue;
      generation += owned.generation_bytes();
      training += owned.training_bytes();
    }
    EXPECT_EQ(generation, node.pool_bytes());
    EXPECT_EQ(training, node.pool_bytes());
  }
}

// Blocks of 16: a prompt of 40 tokens has two full blocks and half of a third, 24 more tokens fill it and one more.
TEST(MemoryPlan, LiveSequencesShareTheBlocksOfTheirPrompt) {
  const ModelConfig model = Llama8b();
  NodeMemory node = GpuNode(model);
  JobMemory job = Job(model, 1024, 4);
  job.longest_prompt_tokens = 40;
  job.max_completion_tokens = 24;
  const auto kv_bytes = [&](std::uint64_t live) {
    job.live_sequences = live;
    return PlannedOf(PlanMemory(model, job, node).figures, "kv_cache") / node.rollout.kv_block_bytes();
  };
  EXPECT_EQ(kv_bytes(1), 4u);          // 64 tokens
  EXPECT_EQ(kv_bytes(2), 3 + 2 * 2u);  // the prompt, and each from its third block on
  EXPECT_EQ(kv_bytes(4), 3 + 4 * 2u);
  job.prompts_per_step = 2;
  EXPECT_EQ(kv_bytes(5), 2 * 3 + 5 * 2u);
  EXPECT_EQ(kv_bytes(100), 2 * 3 + 8 * 2u);  // no more than the step has
  job.longest_evaluation_prompt_tokens = 400;
  EXPECT_EQ(kv_bytes(1), 27u) << "evaluation draws from longer prompts";
  // The cache decides how many live.
  node.elastic_bytes = 33 * node.rollout.kv_block_bytes();
  job.longest_evaluation_prompt_tokens = 0;
  job.live_sequences = 0;
  job.prompts_per_step = 100;
  const v1::MemoryPlan plan = PlanMemory(model, job, node).figures;
  EXPECT_EQ(plan.live_sequences(), 12u);  // three groups of four: 3 x 11
  EXPECT_EQ(plan.wanted_live_sequences(), 256u);
  EXPECT_EQ(plan.largest_group(), 15u);  // 3 + 2 x 15
}

// CASES C39: what is refused names the largest context that fits, which is exact.
TEST(MemoryPlan, C39LargestContextIsWhereRefusalsBegin) {
  const ModelConfig model = Llama8b();
  for (std::uint64_t trial = 0; trial < 60; ++trial) {
    SCOPED_TRACE(trial);
    NodeMemory node = GpuNode(model);
    node.elastic_bytes = kGiB / 2 + RandomBelow(1, trial, 8 * kGiB);
    node.host_limit_bytes = RandomBelow(2, trial, 16 * kGiB);
    if (trial % 4 == 0) node.device = Device::kCpu;
    JobMemory job = Job(model, 4096, 1 + RandomBelow(3, trial, 16));
    job.prompts_per_step = 1 + RandomBelow(4, trial, 8);
    const std::uint64_t largest = PlanMemory(model, job, node).figures.largest_context_tokens();
    if (largest > 512) {
      job.max_completion_tokens = largest - 512;
      const PlannedMemory fits = PlanMemory(model, job, node);
      EXPECT_TRUE(fits.faults.empty()) << fits.faults[0];
      EXPECT_GE(fits.figures.live_sequences(), 1u);
    }
    if (largest == static_cast<std::uint64_t>(model.max_positions)) continue;  // positions are the job's own check
    job.max_completion_tokens = largest > 512 ? largest + 1 - 512 : 1;
    const PlannedMemory refused = PlanMemory(model, job, node);
    ASSERT_EQ(refused.faults.size(), 1u);
    EXPECT_THAT(refused.faults[0], HasSubstr(absl::StrCat("rollout.sampling.max_tokens: ", job.max_completion_tokens)));
    EXPECT_THAT(refused.faults[0],
                HasSubstr(largest == 0 ? "no context fits on this node"
                                       : absl::StrCat("the largest context that fits is ", largest, " tokens")));
  }
}

TEST(MemoryPlan, PoolThatIsAskedForHoldsTheJobAndOneChunkLessDoesNot) {
  const ModelConfig model = Llama8b();
  for (std::uint64_t trial = 0; trial < 40; ++trial) {
    SCOPED_TRACE(trial);
    NodeMemory node = GpuNode(model);
    node.host_limit_bytes = RandomBelow(5, trial, 2) == 0 ? kGiB / 4 : 64 * kGiB;
    JobMemory job = Job(model, 1024 + RandomBelow(6, trial, 100000), 1 + RandomBelow(7, trial, 16));
    const v1::MemoryPlan plan = PlanMemory(model, job, node).figures;
    const PlannedMemory asked = PlanMemory(model, job, WithPool(node, plan.asked_pool_bytes(), plan));
    EXPECT_TRUE(asked.faults.empty()) << asked.faults[0];
    EXPECT_EQ(asked.figures.live_sequences(), job.group_size);
    const PlannedMemory least = PlanMemory(model, job, WithPool(node, plan.least_pool_bytes(), plan));
    EXPECT_TRUE(least.faults.empty()) << least.faults[0];
    EXPECT_LE(plan.least_pool_bytes(), plan.asked_pool_bytes());
    const PlannedMemory less = PlanMemory(model, job, WithPool(node, plan.least_pool_bytes() - 256 * kMiB, plan));
    ASSERT_FALSE(less.faults.empty());
    EXPECT_THAT(less.faults[0], HasSubstr(absl::StrCat("--pool_bytes=", plan.least_pool_bytes() / kMiB, "MiB")));
  }
}

TEST(MemoryPlan, LayerInputsThatFindNoRoomGoToTheHostAsFarAsItHasMemory) {
  const ModelConfig model = Llama8b();
  NodeMemory node = GpuNode(model);
  const JobMemory job = Job(model, 20480, 8);
  const PolicyMemory policy = PlanPolicyMemory(model, node.weight_format, {}, {.rank = 16, .rows = 20480, .head_rows = 20380});
  EXPECT_EQ(PlanMemory(model, job, node).figures.layers_in_pool(), 32u);
  node.elastic_bytes = policy.working_bytes + 10 * policy.layer_input_bytes + kMiB;
  // With attention's outputs, two and a bit of an input's size each, fewer stay; the host has room for the others.
  const v1::MemoryPlan with_attention = PlanMemory(model, job, node).figures;
  EXPECT_EQ(with_attention.layers_in_pool(), 4u);
  EXPECT_EQ(PlannedOf(with_attention, "host_layer_inputs"), 28 * (policy.layer_input_bytes + policy.layer_attention_bytes));
  EXPECT_EQ(PlannedOf(with_attention, "activations"), policy.working_bytes - policy.saved_bytes);
  // Without room for them in the host, inputs alone.
  node.host_limit_bytes = 22 * policy.layer_input_bytes;
  const PlannedMemory planned = PlanMemory(model, job, node);
  EXPECT_EQ(planned.figures.layers_in_pool(), 10u);
  EXPECT_EQ(PlannedOf(planned.figures, "host_layer_inputs"), 22 * policy.layer_input_bytes);
  node.host_limit_bytes = 22 * policy.layer_input_bytes - 1;
  const PlannedMemory short_of_host = PlanMemory(model, job, node);
  ASSERT_EQ(short_of_host.faults.size(), 1u);
  EXPECT_THAT(short_of_host.faults[0], HasSubstr("inputs of 22 layers"));
  EXPECT_THAT(short_of_host.faults[0], HasSubstr("of host memory"));
  EXPECT_EQ(ContextOf(short_of_host.figures, "host_memory"), short_of_host.figures.largest_context_tokens());
}

TEST(MemoryPlan, MicroBatchTokensAreHeldToTheirBounds) {
  const ModelConfig model = Llama8b();
  NodeMemory node = GpuNode(model);
  JobMemory job = Job(model, 20480, 8);
  job.micro_batch_tokens = 20479;
  const PlannedMemory too_few = PlanMemory(model, job, node);
  ASSERT_EQ(too_few.faults.size(), 1u);
  EXPECT_THAT(too_few.faults[0], HasSubstr("batch.micro_batch_tokens: 20479; must be at least 20480"));
  job.micro_batch_tokens = 100000;
  node.elastic_bytes = 6 * kGiB;
  const PlannedMemory too_many = PlanMemory(model, job, node);
  ASSERT_EQ(too_many.faults.size(), 1u);
  EXPECT_THAT(too_many.faults[0], HasSubstr("batch.micro_batch_tokens: 100000; must be small enough, 20480 is"));
  job.micro_batch_tokens = 20480;
  EXPECT_TRUE(PlanMemory(model, job, node).faults.empty());
}

TEST(MemoryPlan, RolloutServerThatWasNotHeardIsAssumedAndRefusesNothing) {
  const ModelConfig model = Llama8b();
  NodeMemory node = GpuNode(model);
  node.rollout = AssumedRolloutMemory(model, Device::kCuda);
  EXPECT_EQ(node.rollout.kv_block_bytes(), 16u * 128 * kKiB);
  node.elastic_bytes = 16 * kGiB;
  const JobMemory job = Job(model, 131072, 1);  // 16.0 GiB of KV in bf16: one block too many with a little less
  node.elastic_bytes -= 1;
  EXPECT_FALSE(PlanMemory(model, job, node).faults.empty());
  node.is_rollout_assumed = true;
  const PlannedMemory planned = PlanMemory(model, job, node);
  EXPECT_TRUE(planned.faults.empty()) << planned.faults[0];
  EXPECT_THAT(planned.warnings[0], HasSubstr("was not heard"));
}

// Llama-3.1-8B in NF4, rank 16, eight completions of 20,480 tokens: with the contexts of both processes (1.5 GiB at most) beside
// it, the pool leaves the step below 20 GiB with all eight alive over a cache in FP8, and below 12 GiB with one at a time.
TEST(MemoryPlan, EightBillionParametersTrainOnTwentyThousandTokensInLittle) {
  const ModelConfig model = Llama8b();
  NodeMemory node = GpuNode(model);
  const v1::MemoryPlan plan = PlanMemory(model, Job(model, 20480, 8), node).figures;
  EXPECT_LE(plan.asked_pool_bytes(), 18 * kGiB + kGiB / 2);
  EXPECT_LE(plan.least_pool_bytes(), 10 * kGiB + kGiB / 2);
  RecordProperty("asked_pool", FormatBytes(plan.asked_pool_bytes()));
  RecordProperty("least_pool", FormatBytes(plan.least_pool_bytes()));
  EXPECT_LE(ContextOf(plan, "live_sequences"), ContextOf(plan, "kv_cache"));
}

// 6 N T + 4 N_h T_h + 4.5 x 2 T^2 H L, less the down projection, which is not recomputed, and less attention's forward pass where
// there is room for its outputs.
TEST(MemoryPlan, TimesFollowTheFlopFormulas) {
  const ModelConfig model = Llama8b();
  const NodeMemory node = GpuNode(model);
  JobMemory job = Job(model, 20480, 1);
  const v1::MemoryPlan plan = PlanMemory(model, job, node).figures;
  const double tokens = 20480, linear = 6.979e9, head = 0.5253e9, down = 14336.0 * 4096 * 32;
  const double flops =
      6 * linear * tokens - 2 * down * tokens + 4 * head * (tokens - 512) + 3.5 * 2 * tokens * tokens * 4096 * 32;
  EXPECT_NEAR(plan.training_seconds(), flops / plan.flops_per_second(), 1e-3 * plan.training_seconds());
  job.group_size = 8;
  job.micro_batch_tokens = 512 + 8 * 19968;
  const double shared = PlanMemory(model, job, node).figures.training_seconds();
  job.micro_batch_tokens = 20480;
  const double apart = PlanMemory(model, job, node).figures.training_seconds();
  EXPECT_NEAR(apart, 8 * plan.training_seconds(), 1e-6 * apart);
  EXPECT_LT(shared, apart) << "the prompt is computed once";
  const v1::MemoryPlan eight = PlanMemory(model, job, node).figures;
  job.live_sequences = 1;
  EXPECT_GT(PlanMemory(model, job, node).figures.generation_seconds(), 4 * eight.generation_seconds())
      << "waves of one read the weights eight times as often";
}

TEST(MemoryPlan, GroupsAreKeptWholeWherePromptsAreWorthIt) {
  const auto rows = [](std::uint64_t prompt, std::uint64_t completion, std::uint64_t group_size) {
    JobMemory job;
    job.longest_prompt_tokens = prompt;
    job.max_completion_tokens = completion;
    job.group_size = group_size;
    return RowsOfWholeGroup(job);
  };
  EXPECT_EQ(rows(337000, 1024, 2), 339048u);
  EXPECT_EQ(rows(2000, 512, 8), 6096u);
  EXPECT_EQ(rows(512, 20480, 8), 0u) << "prompts are 2 % of the rows";
  EXPECT_EQ(rows(30, 16, 64), 0u) << "fits into the least micro-batch";
  EXPECT_EQ(rows(5000, 100, 1), 0u);
  EXPECT_EQ(rows(1, 1, 1), 0u);
}

}  // namespace
}  // namespace tandem
