#include "trainer_server/advantage/advantage.h"

#include <cmath>
#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/trainer_server/loss/golden_cases.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;

// One reward function; three trained tokens a completion, or as given.
absl::StatusOr<AdvantageResult> Compute(const AdvantageOptions& options, const std::vector<std::optional<double>>& rewards,
                                        int group_size, std::size_t num_tokens = 3) {
  const std::vector<std::uint8_t> mask(num_tokens, 1);
  std::vector<AdvantageSequence> sequences;
  for (const auto& reward : rewards) sequences.push_back({{reward}, {}, {}, mask});
  return ComputeAdvantages(options, sequences, group_size);
}

std::vector<double> Scalars(const AdvantageResult& result) {
  std::vector<double> values;
  for (const auto& row : result.advantages) values.push_back(row.at(0));
  return values;
}

std::vector<std::optional<double>> SevenLowOneHigh() {
  std::vector<std::optional<double>> rewards(7, 0.35);
  rewards.push_back(0.95);
  return rewards;
}

AdvantageOptions WithEstimator(AdvantageEstimator estimator) {
  AdvantageOptions options;
  options.estimator = estimator;
  return options;
}

TEST(AdvantageTest, EveryGoldenCaseEqualsTheReference) {
  int num_checked = 0;
  for (const GoldenCase& golden : GoldenCases()) {
    if (golden.step.given_advantages.has_value()) continue;
    SCOPED_TRACE(golden.name);
    const auto result = Advantages(golden.step);
    ASSERT_TRUE(result.ok()) << result.status();
    const auto& expected = golden.expected["advantages"];
    ASSERT_EQ(result->advantages.size(), expected.size());
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const std::vector<double> row =
          expected[i].is_array() ? expected[i].get<std::vector<double>>() : std::vector<double>{expected[i].get<double>()};
      ASSERT_EQ(result->advantages[i].size(), row.size());
      for (std::size_t t = 0; t < row.size(); ++t) EXPECT_NEAR(result->advantages[i][t], row[t], 1e-10);
    }
    ++num_checked;
  }
  EXPECT_GT(num_checked, 100);
}

// CASES C24
TEST(AdvantageTest, LeaveOneOutNeverDividesByAVanishingSpread) {
  const auto result = Compute(WithEstimator(AdvantageEstimator::kRloo), SevenLowOneHigh(), 8);
  ASSERT_TRUE(result.ok()) << result.status();
  const std::vector<double> values = Scalars(*result);
  EXPECT_NEAR(values[7], 0.6, 1e-15);
  for (std::size_t i = 0; i < 7; ++i) EXPECT_NEAR(values[i], -0.085714, 5e-7);
  EXPECT_EQ(ComputeSpread(std::vector<double>(7, 0.35)).std, 0);
  EXPECT_EQ(ComputeSpread(std::vector<double>(7, 0.35)).mean, 0.35);
}

// CASES C24
TEST(AdvantageTest, OneHighRewardOfEightIsScaledByTheGroup) {
  const auto result = Compute({}, SevenLowOneHigh(), 8);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_NEAR(Scalars(*result)[7], 2.473708, 5e-7);
  EXPECT_NEAR(Scalars(*result)[0], -0.353387, 5e-7);
}

// CASES C24
TEST(AdvantageTest, EqualRewardsGiveExactlyZeroWithEveryEstimatorAndScale) {
  for (const double reward : {0.35, 0.1, 1.0 / 3, -0.7}) {
    for (const int group_size : {3, 7}) {
      for (const auto estimator : {AdvantageEstimator::kGroup, AdvantageEstimator::kRloo, AdvantageEstimator::kReinforcePlusPlus,
                                   AdvantageEstimator::kReinforcePlusPlusBaseline, AdvantageEstimator::kOpo}) {
        for (const auto scale : {AdvantageScale::kGroup, AdvantageScale::kBatch, AdvantageScale::kNone}) {
          for (const auto aggregation : {RewardAggregation::kSumThenNormalize, RewardAggregation::kNormalizeThenSum}) {
            AdvantageOptions options = WithEstimator(estimator);
            options.scale = scale;
            options.aggregation = aggregation;
            const std::vector<std::optional<double>> rewards(static_cast<std::size_t>(group_size), reward);
            const auto result = Compute(options, rewards, group_size);
            ASSERT_TRUE(result.ok()) << result.status();
            for (const auto& row : result->advantages) {
              for (const double value : row) EXPECT_EQ(value, 0);
            }
            EXPECT_EQ(result->zero_std_fraction, 1);
          }
        }
      }
    }
  }
}

TEST(AdvantageTest, AFlatGroupStaysAtZeroBesideAVaryingOneUnderBatchScale) {
  AdvantageOptions options;
  options.scale = AdvantageScale::kBatch;
  const auto result = Compute(options, {0.1, 0.1, 0.1, 0.0, 0.5, 1.0}, 3);
  ASSERT_TRUE(result.ok()) << result.status();
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(Scalars(*result)[i], 0);
  EXPECT_GT(Scalars(*result)[5], 0);
  EXPECT_EQ(result->zero_std_fraction, 0.5);
}

// CASES C27
TEST(AdvantageTest, NullRewardsLeaveTheBaseline) {
  const auto result = Compute({}, {1, std::nullopt, 0, std::nullopt}, 4);
  ASSERT_TRUE(result.ok()) << result.status();
  const std::vector<double> values = Scalars(*result);
  EXPECT_NEAR(values[0], 0.707007, 5e-7);
  EXPECT_EQ(values[1], 0);
  EXPECT_NEAR(values[2], -0.707007, 5e-7);
  EXPECT_EQ(values[3], 0);
  EXPECT_EQ(result->groups_dropped, 0);
}

// CASES C27
TEST(AdvantageTest, AGroupWithoutAnyRewardIsCountedAndGoesOn) {
  for (const auto estimator : {AdvantageEstimator::kGroup, AdvantageEstimator::kRloo, AdvantageEstimator::kReinforcePlusPlus,
                               AdvantageEstimator::kReinforcePlusPlusBaseline, AdvantageEstimator::kOpo}) {
    const auto result = Compute(WithEstimator(estimator), std::vector<std::optional<double>>(4), 4);
    ASSERT_TRUE(result.ok()) << result.status();
    for (const auto& row : result->advantages) {
      for (const double value : row) EXPECT_EQ(value, 0);
    }
    EXPECT_EQ(result->groups_dropped, 1);
    EXPECT_EQ(result->rewards[0], std::nullopt);
  }
}

// CASES C27
TEST(AdvantageTest, ARewardThatIsNotFiniteNamesFunctionAndRow) {
  AdvantageOptions options;
  options.function_names = {"correct"};
  for (const double value : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    const auto result = Compute(options, {1, value, 0, 0}, 4);
    EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(result.status().message()), HasSubstr("function 'correct' gave row 1"));
  }
}

TEST(AdvantageTest, CountsThatDoNotFitAreRefused) {
  EXPECT_EQ(Compute({}, {1, 0, 1}, 2).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Compute({}, {1, 0}, 0).status().code(), absl::StatusCode::kInvalidArgument);
  AdvantageOptions two_weights;
  two_weights.weights = {1, 2};
  EXPECT_THAT(std::string(Compute(two_weights, {1, 0}, 2).status().message()), HasSubstr("has 1 rewards, expected 2"));
  AdvantageOptions kl = WithEstimator(AdvantageEstimator::kRloo);
  kl.kl_in_reward = 0.1;
  EXPECT_THAT(std::string(Compute(kl, {1, 0}, 2).status().message()), HasSubstr("needs old and reference log-probs"));
}

TEST(AdvantageTest, LeaveOneOutIsTheScaledDistanceFromTheMean) {
  const std::vector<std::optional<double>> rewards = {0.2, 0.9, -0.4, 0.5};
  const auto result = Compute(WithEstimator(AdvantageEstimator::kRloo), rewards, 4);
  ASSERT_TRUE(result.ok());
  for (std::size_t i = 0; i < 4; ++i) EXPECT_NEAR(Scalars(*result)[i], 4.0 / 3 * (*rewards[i] - 0.3), 1e-15);
}

TEST(AdvantageTest, WhitenedTokensHaveMeanZeroAndVarianceOne) {
  const std::vector<std::uint8_t> masks[] = {{1, 0, 1, 1}, {1}, {0, 1}, {1, 1, 1}};
  std::vector<AdvantageSequence> sequences;
  const double rewards[] = {1, 0.25, -0.5, 0.75};
  for (std::size_t i = 0; i < 4; ++i) sequences.push_back({{rewards[i]}, {}, {}, masks[i]});
  for (const auto estimator : {AdvantageEstimator::kReinforcePlusPlus, AdvantageEstimator::kReinforcePlusPlusBaseline}) {
    const auto result = ComputeAdvantages(WithEstimator(estimator), sequences, 2);
    ASSERT_TRUE(result.ok()) << result.status();
    std::vector<double> trained;
    for (std::size_t i = 0; i < 4; ++i) {
      ASSERT_EQ(result->advantages[i].size(), masks[i].size());
      for (std::size_t t = 0; t < masks[i].size(); ++t) {
        if (masks[i][t] != 0) {
          trained.push_back(result->advantages[i][t]);
        } else {
          EXPECT_EQ(result->advantages[i][t], 0);
        }
      }
    }
    EXPECT_NEAR(ComputeSpread(trained).mean, 0, 1e-12);
    EXPECT_NEAR(ComputeSpread(trained).std, 1, 1e-6);
  }
}

TEST(AdvantageTest, WeightedRewardSkipsWhatDidNotApply) {
  const std::vector<std::optional<double>> rewards = {1.0, std::nullopt, 0.5};
  const std::vector<double> weights = {0.8, 5, 0.2};
  EXPECT_NEAR(*WeightedReward(rewards, weights), 0.9, 1e-15);
  EXPECT_EQ(WeightedReward(rewards, {}), 1.5);
  EXPECT_EQ(WeightedReward(std::vector<std::optional<double>>(2), {}), std::nullopt);
}

}  // namespace
}  // namespace tandem
