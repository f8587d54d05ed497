#include "trainer_server/step/step_driver.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/trainer_server/support/fake_model.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;

// Groups of two completions with rewards (1, 0), or (1, 1) where `flat` says so.
std::vector<ScoredGroup> Groups(int count, std::vector<int> flat = {}) {
  std::vector<ScoredGroup> groups;
  for (int g = 0; g < count; ++g) {
    ScoredGroup group;
    group.prompt_ids = {100, 101};
    for (int m = 0; m < 2; ++m) {
      Rollout rollout;
      for (int t = 0; t <= m + g; ++t) rollout.token_ids.push_back(static_cast<std::uint32_t>(10 * g + 3 * m + t));
      rollout.rollout_logprobs.assign(rollout.token_ids.size(), -0.7);
      rollout.finish_reason = v1::FINISH_REASON_STOP;
      group.rollouts.members.push_back(rollout);
      const bool is_flat = std::ranges::find(flat, g) != flat.end();
      group.rewards.push_back({m == 0 || is_flat ? 1.0 : 0.0});
    }
    groups.push_back(std::move(group));
  }
  return groups;
}

class StepDriverTest : public ::testing::Test {
 protected:
  StepDriverTest()
      : standing_(pool_.region(v1::REGION_KIND_TRAINER_STANDING)),
        peer_({.address = "127.0.0.1:1", .is_attached = [] { return false; }, .patience = absl::Milliseconds(20)}),
        phase_(&peer_, {.member = &pool_, .enter_arena = {}}) {
    layout_ = AdapterLayout::Create(SmallModel(), 2, {LinearKind::kQProj});
    for (auto& piece : pieces_) piece = *standing_.Allocate(layout_.total_bytes, "test");
    policy_ = std::make_unique<FakePolicy>(AdapterMemory{pieces_[0], pieces_[1]}, layout_);
    EXPECT_TRUE(policy_->InitializeAdapters(1).ok());
    state_ = {Floats(0), Floats(1), Floats(2), Floats(3), 0};
    options_.loss.aggregation = Aggregation::kTokenMean;
    options_.learning_rate = {.peak = 0.1, .num_steps = 10};
    options_.is_interrupted = [this] { return is_interrupted_; };
  }
  std::span<float> Floats(std::size_t i) {
    return {static_cast<float*>(static_cast<void*>(pieces_[i].data())), pieces_[i].size() / sizeof(float)};
  }
  absl::StatusOr<StepReport> Run(const std::vector<ScoredGroup>& groups, std::uint64_t step = 1) {
    return StepDriver(policy_.get(), &state_, &phase_, options_).Run(step, groups);
  }
  std::vector<float> Everything() {
    std::vector<float> all;
    for (const std::size_t i : {0u, 2u, 3u}) all.insert(all.end(), Floats(i).begin(), Floats(i).end());
    return all;
  }

  FakePool pool_;
  FakeStanding standing_;
  RolloutPeer peer_;
  ElasticPhase phase_;
  AdapterLayout layout_;
  std::span<std::byte> pieces_[4];
  std::unique_ptr<FakePolicy> policy_;
  TrainedState state_;
  StepDriver::Options options_;
  bool is_interrupted_ = false;
};

// CASES C19: one optimizer step whatever the number of micro-batches, with the same gradient and its norm before clipping.
TEST_F(StepDriverTest, GradientDoesNotDependOnTheCutIntoMicroBatches) {
  options_.adamw.max_grad_norm = 1e-3;
  std::vector<std::vector<float>> gradients, parameters;
  std::vector<double> norms;
  const std::vector<float> before(Floats(0).begin(), Floats(0).end());
  for (const std::int64_t max_tokens : {1000, 20, 9}) {
    std::ranges::copy(before, Floats(0).begin());
    for (const std::size_t i : {2u, 3u}) std::ranges::fill(Floats(i), 0.0f);
    state_.optimizer_steps = 0;
    options_.micro_batch_tokens = max_tokens;
    const auto report = Run(Groups(4));
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_TRUE(report->optimizer.is_clipped);
    EXPECT_EQ(state_.optimizer_steps, 1u);
    for (const absl::Duration time : {report->forward_time, report->backward_time, report->optimizer_time}) {
      EXPECT_GT(time, absl::ZeroDuration());
    }
    norms.push_back(report->optimizer.grad_norm);
    gradients.emplace_back(Floats(1).begin(), Floats(1).end());
  }
  for (std::size_t i = 1; i < norms.size(); ++i) {
    EXPECT_NEAR(norms[i], norms[0], 1e-6 * norms[0]);
    for (std::size_t k = 0; k < gradients[0].size(); ++k) EXPECT_NEAR(gradients[i][k], gradients[0][k], 1e-6);
  }
  EXPECT_GT(policy_->num_forwards, 3);
}

TEST_F(StepDriverTest, SmallerPiecesAreHalfAsLargeAsFarAsTheLongestSequenceAllows) {
  const auto num_micro_batches = [&](std::int64_t micro_batch_tokens, bool is_halved) {
    options_.micro_batch_tokens = micro_batch_tokens;
    options_.halves_micro_batches = is_halved;
    const auto report = Run(Groups(4));  // groups of 2 + 1 + 2, 2 + 2 + 3, 2 + 3 + 4, 2 + 4 + 5 rows
    EXPECT_TRUE(report.ok()) << report.status();
    return report.ok() ? report->num_micro_batches : 0;
  };
  EXPECT_EQ(num_micro_batches(32, false), 1u);
  EXPECT_EQ(num_micro_batches(32, true), num_micro_batches(16, false));
  EXPECT_GT(num_micro_batches(32, true), 1u);
  EXPECT_EQ(num_micro_batches(8, true), num_micro_batches(7, false)) << "a whole sequence has 7 rows";
}

// Of the elastic region, as the phase's memory tells it when the region is given back.
TEST_F(StepDriverTest, ScoredPromptsWeighNothing) {
  const std::vector<float> before(Floats(0).begin(), Floats(0).end());
  std::vector<std::vector<float>> masters;
  std::vector<double> losses;
  for (const bool scores_prompts : {false, true}) {
    std::ranges::copy(before, Floats(0).begin());
    for (const std::size_t i : {2u, 3u}) std::ranges::fill(Floats(i), 0.0f);
    state_.optimizer_steps = 0;
    options_.scores_prompts = scores_prompts;
    const auto report = Run(Groups(4));
    ASSERT_TRUE(report.ok()) << report.status();
    masters.emplace_back(Floats(0).begin(), Floats(0).end());
    losses.push_back(report->loss);
  }
  EXPECT_EQ(losses[0], losses[1]);
  EXPECT_EQ(masters[0], masters[1]);
  EXPECT_NE(masters[0], before);
}

TEST_F(StepDriverTest, PeakOfTrainingMemoryIsReported) {
  class Memory : public PhaseMemory {
    std::uint64_t peak_bytes() const override { return 12345; }
  };
  ElasticPhase phase(&peer_, {.member = &pool_, .enter_arena = [](auto) { return std::make_unique<Memory>(); }});
  StepDriver driver(policy_.get(), &state_, &phase, options_);
  const auto report = driver.Run(1, Groups(2));
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->peak_bytes, 12345u);
  EXPECT_EQ(driver.Run(2, Groups(2, {0, 1}))->peak_bytes, 0u) << "nothing was computed";
}

// CASES C06, the training part: the step is refused, nothing has changed, the region is given back.
TEST_F(StepDriverTest, NanRefusesTheStepAndLeavesEverything) {
  for (const std::uint32_t updates : {1u, 3u}) {
    SCOPED_TRACE(updates);
    options_.updates_per_rollout = updates;
    policy_->num_forwards = 0;
    policy_->nan_at_forward = static_cast<int>(updates);  // of the last update: the ones before were applied
    const std::vector<float> before = Everything();
    const auto report = Run(Groups(3));
    EXPECT_TRUE(absl::IsFailedPrecondition(report.status())) << report.status();
    EXPECT_THAT(std::string(report.status().message()), HasSubstr("policy_logprobs is nan"));
    EXPECT_EQ(Everything(), before);
    EXPECT_EQ(state_.optimizer_steps, 0u);
    EXPECT_FALSE(pool_.holds_elastic());
  }
  policy_->nan_at_forward = 0;
  EXPECT_TRUE(Run(Groups(3)).ok());
}

TEST_F(StepDriverTest, GroupsWithoutVarianceAreSkippedButStayInTheDenominators) {
  options_.micro_batch_tokens = 1000;
  const std::vector<ScoredGroup> groups = Groups(4, {1, 3});
  options_.loss.beta = 1e-12;  // with a KL term nothing may be skipped
  const std::vector<float> before(Floats(0).begin(), Floats(0).end());
  const auto whole = Run(groups);
  ASSERT_TRUE(whole.ok()) << whole.status();
  EXPECT_EQ(whole->num_groups_skipped, 0u);
  const std::vector<float> gradients(Floats(1).begin(), Floats(1).end());

  std::ranges::copy(before, Floats(0).begin());
  options_.loss.beta = 0;
  const auto skipped = Run(groups);
  ASSERT_TRUE(skipped.ok()) << skipped.status();
  EXPECT_EQ(skipped->num_groups_skipped, 2u);
  EXPECT_NEAR(skipped->loss, whole->loss, 1e-9);
  for (std::size_t k = 0; k < gradients.size(); ++k) EXPECT_NEAR(Floats(1)[k], gradients[k], 1e-7);
}

TEST_F(StepDriverTest, StepWithNothingToLearnTakesNoPhase) {
  const auto report = Run(Groups(3, {0, 1, 2}));
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->num_micro_batches, 0u);
  EXPECT_EQ(pool_.num_phases, 0);
  EXPECT_EQ(report->loss, 0);
  EXPECT_EQ(state_.optimizer_steps, 1u);
}

// CASES C29: masks come from lengths; an end id, or one that equals a pad id, is trained like any other.
TEST_F(StepDriverTest, EndTokenIsTrained) {
  std::vector<ScoredGroup> groups = Groups(1);
  for (Rollout& rollout : groups[0].rollouts.members) {
    rollout.token_ids = {5, 7, kEndToken};
    rollout.rollout_logprobs = {-1, -1, -1};
  }
  const auto report = Run(groups);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->metrics.token_count, 6);
}

TEST_F(StepDriverTest, TruncatedCompletionsLeaveWhenMasked) {
  options_.loss.mask_truncated = true;
  std::vector<ScoredGroup> groups = Groups(2);
  groups[0].rollouts.members[0].finish_reason = v1::FINISH_REASON_LENGTH;
  const std::size_t truncated = groups[0].rollouts.members[0].token_ids.size();
  std::size_t total = 0;
  for (const ScoredGroup& group : groups) {
    for (const Rollout& rollout : group.rollouts.members) total += rollout.token_ids.size();
  }
  const auto report = Run(groups);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->metrics.token_count, static_cast<double>(total - truncated));
}

TEST_F(StepDriverTest, ScoringPassesAreMadeOnlyWhenTheRecipeNeedsThem) {
  options_.micro_batch_tokens = 1000;
  ASSERT_TRUE(Run(Groups(2)).ok());
  EXPECT_EQ(policy_->num_scores, 0);
  options_.loss.beta = 0.1;
  const auto with_kl = Run(Groups(2));
  ASSERT_TRUE(with_kl.ok()) << with_kl.status();
  EXPECT_EQ(policy_->num_scores, 1);
  EXPECT_GT(with_kl->metrics.kl_sum, 0);  // the first step moved the policy off its reference
  options_.loss.beta = 0;
  options_.updates_per_rollout = 3;
  policy_->num_scores = 0;
  policy_->dropout_streams.clear();
  const auto several = Run(Groups(2));
  ASSERT_TRUE(several.ok()) << several.status();
  EXPECT_EQ(policy_->num_scores, 1);  // old log-probs, once
  EXPECT_EQ(policy_->dropout_streams.size(), 3u);
  EXPECT_NE(policy_->dropout_streams[0], policy_->dropout_streams[1]);
  EXPECT_NE(several->metrics.ratio_sum, several->metrics.ratio_count);  // later updates see a moved policy
  options_.updates_per_rollout = 1;
  options_.loss.top_entropy_quantile = 0.5;
  policy_->num_scores = 0;
  const auto top = Run(Groups(2));
  ASSERT_TRUE(top.ok()) << top.status();
  EXPECT_EQ(policy_->num_scores, 1);
  EXPECT_LT(top->metrics.top_entropy_count, top->metrics.token_count);
}

// Groups 0 and 1 in the first optimizer step, 2 and 3 in the second: each divides by its own tokens, and both meet the old
// log-probs of before the first.
TEST_F(StepDriverTest, MiniBatchesAreOptimizerStepsOfTheirOwn) {
  const std::vector<float> before(Floats(0).begin(), Floats(0).end());
  const std::vector<ScoredGroup> groups = Groups(4);
  // As two steps of two groups each.
  ASSERT_TRUE(Run({groups[0], groups[1]}).ok());
  ASSERT_TRUE(Run({groups[2], groups[3]}).ok());
  const std::vector<float> in_two_steps(Floats(0).begin(), Floats(0).end());

  std::ranges::copy(before, Floats(0).begin());
  for (const std::size_t i : {2u, 3u}) std::ranges::fill(Floats(i), 0.0f);
  state_.optimizer_steps = 0;
  options_.mini_batches_per_rollout = 2;
  policy_->num_scores = 0;
  policy_->forwarded.clear();
  policy_->dropout_streams.clear();
  const auto report = Run(groups);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(state_.optimizer_steps, 2u);
  EXPECT_EQ(report->num_micro_batches, 2u);
  EXPECT_EQ(policy_->num_scores, 2) << "old log-probs of both, before the first update";
  EXPECT_EQ(report->advantages.advantages.size(), 8u);
  ASSERT_EQ(policy_->forwarded.size(), 2u);
  EXPECT_NE(policy_->dropout_streams[0], policy_->dropout_streams[1]);
  // These groups share no token, so that the second optimizer step finds its own log-probs as they were.
  EXPECT_EQ(std::vector<float>(Floats(0).begin(), Floats(0).end()), in_two_steps);
  EXPECT_NE(in_two_steps, before);
  std::vector<ScoredGroup> alike = groups;
  alike[2].rollouts = groups[0].rollouts;
  const auto moved = Run(alike);
  ASSERT_TRUE(moved.ok()) << moved.status();
  EXPECT_GT(moved->metrics.ratio_max, 1) << "the second meets a policy that is no more the one that drew";

  // Two passes over the two of them; a mask by entropies scores each mini-batch before each of its updates.
  options_.updates_per_rollout = 2;
  options_.loss.top_entropy_quantile = 0.5;
  policy_->num_scores = 0;
  ASSERT_TRUE(Run(groups).ok());
  EXPECT_EQ(state_.optimizer_steps, 4u + 4u);
  EXPECT_EQ(policy_->num_scores, 2 + 4);
}

// CASES C28: rows that ask the same are groups of their own, on one rank and on two, and a second update reuses what was drawn.
TEST_F(StepDriverTest, EqualPromptsStayTwoGroupsOnTwoRanksAndInEveryUpdate) {
  options_.updates_per_rollout = 2;
  std::vector<ScoredGroup> groups(2);
  const double rewards[2][4] = {{1, 0, 0, 0}, {1, 1, 1, 0}};
  for (std::size_t g = 0; g < 2; ++g) {
    groups[g].prompt_ids = {100, 101};
    for (std::uint32_t m = 0; m < 4; ++m) {
      Rollout rollout;
      rollout.token_ids = {static_cast<std::uint32_t>(10 * g + m), 3, kEndToken};
      rollout.rollout_logprobs.assign(3, -0.7);
      rollout.finish_reason = v1::FINISH_REASON_STOP;
      groups[g].rollouts.members.push_back(rollout);
      groups[g].rewards.push_back({rewards[g][m]});
    }
  }
  const auto whole = Run(groups);
  ASSERT_TRUE(whole.ok()) << whole.status();
  ASSERT_EQ(whole->advantages.advantages.size(), 8u);
  // Means 0.25 and 0.75, each with the spread 0.5; as one group of 8 the first would be 0.935.
  EXPECT_NEAR(whole->advantages.advantages[0][0], 0.75 / (0.5 + 1e-4), 1e-12);
  EXPECT_NEAR(whole->advantages.advantages[4][0], 0.25 / (0.5 + 1e-4), 1e-12);
  EXPECT_NEAR(whole->advantages.advantages[7][0], -0.75 / (0.5 + 1e-4), 1e-12);
  ASSERT_EQ(policy_->forwarded.size(), 2u);
  EXPECT_EQ(policy_->forwarded[0], policy_->forwarded[1]) << "the second update sees the same completions";
  // Each rank has one of the groups, with the advantages that it has beside the other.
  for (std::size_t rank = 0; rank < 2; ++rank) {
    const auto alone = Run({groups[rank]});
    ASSERT_TRUE(alone.ok()) << alone.status();
    for (std::size_t m = 0; m < 4; ++m) {
      EXPECT_EQ(alone->advantages.advantages[m], whole->advantages.advantages[4 * rank + m]) << rank << " " << m;
    }
  }
}

TEST_F(StepDriverTest, KlInRewardScoresBeforeTheAdvantages) {
  options_.advantage.estimator = AdvantageEstimator::kRloo;
  options_.advantage.kl_in_reward = 0.5;
  ASSERT_TRUE(Run(Groups(2)).ok());
  const auto report = Run(Groups(2));
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_GE(policy_->num_scores, 4);
  EXPECT_EQ(report->advantages.advantages.size(), 4u);
}

TEST_F(StepDriverTest, InterruptedStepChangesNothing) {
  is_interrupted_ = true;
  const std::vector<float> before = Everything();
  EXPECT_TRUE(absl::IsCancelled(Run(Groups(2)).status()));
  EXPECT_EQ(Everything(), before);
  EXPECT_FALSE(pool_.holds_elastic());
}

// The answer to a release may be lost although the rollout server has the region back.
TEST_F(StepDriverTest, RegionThatWasKeptIsGivenBackBeforeItIsUsed) {
  ASSERT_TRUE(pool_.AcquireElastic(v1::STREAM_MODE_PAUSE, MonotonicTime::InfiniteFuture()).ok());
  std::vector<std::string> moments;
  pool_.at = [&](const char* moment) { moments.push_back(moment); };
  ASSERT_TRUE(Run(Groups(2)).ok());
  EXPECT_EQ(moments, (std::vector<std::string>{"release", "acquire", "release"}));
}

TEST_F(StepDriverTest, RolloutServerThatStaysAwayEndsTheStepWithinThePatience) {
  pool_.num_acquire_failures = 1000;
  const std::vector<float> before = Everything();
  const auto report = Run(Groups(2));
  EXPECT_TRUE(absl::IsDeadlineExceeded(report.status())) << report.status();
  EXPECT_EQ(Everything(), before);
}

}  // namespace
}  // namespace tandem
