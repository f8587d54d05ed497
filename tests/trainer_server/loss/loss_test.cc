#include "trainer_server/loss/loss.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/trainer_server/loss/golden_cases.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// One owned sequence, all tokens trained.
struct Owned {
  std::vector<double> policy = {}, old = {}, ref = {}, rollout = {}, entropies = {}, kept_mass = {};
  std::vector<double> advantages = {1};
  std::vector<std::uint8_t> mask = std::vector<std::uint8_t>(policy.size(), 1);
  bool is_truncated = false;
  LossSequence View() const {
    return {.policy_logprobs = policy,
            .old_logprobs = old,
            .ref_logprobs = ref,
            .rollout_logprobs = rollout,
            .entropies = entropies,
            .loss_mask = mask,
            .kept_mass = kept_mass,
            .advantages = advantages,
            .is_truncated = is_truncated};
  }
};

absl::StatusOr<LossResult> EvaluateOne(const LossOptions& options, const Owned& sequence) {
  const LossSequence views[] = {sequence.View()};
  return EvaluateLoss(options, ComputeStepTotals(options, views, 1), views);
}

// REINFORCE with log-prob -1: a token's loss is its sequence's advantage.
LossOptions PlainOptions(Aggregation aggregation) {
  LossOptions options;
  options.surrogate = Surrogate::kReinforce;
  options.aggregation = aggregation;
  return options;
}

double LargestOf(const Rows& rows) {
  double largest = 0;
  for (const auto& row : rows) {
    for (const double value : row) largest = std::max(largest, std::abs(value));
  }
  return largest;
}

void ExpectRowsNear(const Rows& actual, const Rows& expected, double tolerance) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    ASSERT_EQ(actual[i].size(), expected[i].size()) << "sequence " << i;
    for (std::size_t t = 0; t < actual[i].size(); ++t) {
      EXPECT_NEAR(actual[i][t], expected[i][t], tolerance) << "sequence " << i << " token " << t;
    }
  }
}

// The golden file's metric names, from sums and counts.
std::map<std::string, double> NamedMetrics(const LossMetrics& m) {
  const double tokens = std::max(1.0, m.token_count), ratios = std::max(1.0, m.ratio_count);
  std::map<std::string, double> values = {{"tokens", m.token_count},
                                          {"sequences", m.sequence_count},
                                          {"ratio_mean", m.ratio_sum / ratios},
                                          {"clip_low_fraction", m.clip_low / ratios},
                                          {"clip_high_fraction", m.clip_high / ratios},
                                          {"clip_fraction", (m.clip_low + m.clip_high) / ratios},
                                          {"delta_clip_fraction", m.delta_clip / ratios},
                                          {"phi_mean", m.phi_sum / std::max(1.0, m.sequence_count)},
                                          {"kl", m.kl_sum / tokens},
                                          {"approx_kl_old", m.approx_kl_old_sum / tokens},
                                          {"entropy", m.entropy_sum / tokens},
                                          {"top_entropy_fraction", m.top_entropy_count / tokens}};
  values["rollout_logprob_gap_mean"] = m.logprob_difference_sum / std::max(1.0, m.difference_count);
  values["rollout_logprob_gap_max"] = m.logprob_difference_max;
  values["rollout_weight_mean"] = m.rollout_weight_sum / std::max(1.0, m.rollout_weight_count);
  values["rollout_masked_fraction"] = m.rollout_masked / std::max(1.0, m.rollout_weight_count);
  return values;
}

class GoldenLossTest : public ::testing::TestWithParam<std::size_t> {
 protected:
  const GoldenCase& Case() const { return GoldenCases()[GetParam()]; }
};

// CASES C10 C18 C21 C22: rollout_*, split_*, everything_*, kl_*.
TEST_P(GoldenLossTest, LossGradientsAndMetricsEqualTheReference) {
  const LossStep& step = Case().step;
  ASSERT_TRUE(ValidateLossOptions(step.loss).ok()) << ValidateLossOptions(step.loss);
  Rows advantages = step.given_advantages.value_or(Rows{});
  AdvantageResult computed;
  {
    const auto result = Advantages(step);
    ASSERT_TRUE(result.ok()) << result.status();
    computed = *result;
    if (advantages.empty()) advantages = computed.advantages;
  }
  const auto result = EvaluateStep(step, advantages);
  ASSERT_TRUE(result.ok()) << result.status();
  const auto& expected = Case().expected;
  const auto tolerance = [](double value) { return 1e-10 * std::max(1.0, std::abs(value)); };

  EXPECT_NEAR(result->loss, expected["loss"].get<double>(), tolerance(expected["loss"]));
  const auto losses = expected["micro_batch_losses"].get<std::vector<double>>();
  ASSERT_EQ(result->micro_batch_losses.size(), losses.size());
  for (std::size_t b = 0; b < losses.size(); ++b) EXPECT_NEAR(result->micro_batch_losses[b], losses[b], tolerance(losses[b]));

  const Rows gradient = expected["grad_policy_logprobs"].get<Rows>();
  ExpectRowsNear(result->grad_logprobs, gradient, 1e-10 * LargestOf(gradient));
  if (expected.contains("grad_entropies")) {
    const Rows entropy_gradient = expected["grad_entropies"].get<Rows>();
    ExpectRowsNear(result->grad_entropies, entropy_gradient, 1e-10 * LargestOf(entropy_gradient));
  }

  std::map<std::string, double> metrics = NamedMetrics(result->metrics);
  metrics["reward_mean"] = computed.reward_mean;
  metrics["reward_std"] = computed.reward_std;
  metrics["zero_std_fraction"] = computed.zero_std_fraction;
  for (const auto& [name, value] : expected["metrics"].items()) {
    ASSERT_TRUE(metrics.contains(name)) << name;
    EXPECT_NEAR(metrics[name], value.get<double>(), tolerance(value)) << name;
  }
}

std::string CaseName(const ::testing::TestParamInfo<std::size_t>& parameter) { return GoldenCases()[parameter.param].name; }

INSTANTIATE_TEST_SUITE_P(AllCases, GoldenLossTest, ::testing::Range<std::size_t>(0, GoldenCases().size()), CaseName);

TEST(GoldenCasesTest, AllArePresent) { EXPECT_EQ(GoldenCases().size(), 107u); }

// CASES C01
TEST(LossTest, RatioIsOneWhenBothSidesScoreTheTemperedDistribution) {
  const std::vector<double> logits = {2, 1, 0};
  const auto logprob = [&](double temperature) {
    double sum = 0;
    for (const double logit : logits) sum += std::exp(logit / temperature);
    return logits[0] / temperature - std::log(sum);
  };
  EXPECT_NEAR(logprob(0.5), -0.142932, 5e-7);
  EXPECT_NEAR(logprob(1), -0.407606, 5e-7);
  LossOptions options;
  options.rollout_correction = RolloutCorrectionMode::kTokenTruncate;
  options.correction_max = 2;
  const auto same = EvaluateOne(options, {.policy = {logprob(0.5)}, .rollout = {logprob(0.5)}});
  ASSERT_TRUE(same.ok()) << same.status();
  EXPECT_EQ(same->metrics.rollout_weight_sum, 1);
  EXPECT_EQ(same->metrics.logprob_difference_max, 0);
  const auto raw = EvaluateOne(options, {.policy = {logprob(0.5)}, .rollout = {logprob(1)}});
  ASSERT_TRUE(raw.ok()) << raw.status();
  EXPECT_NEAR(raw->metrics.logprob_difference_max, 0.264674, 1e-6);
}

// CASES C03
TEST(LossTest, KeptMassMakesTheRatioOfATruncatedSamplerOne) {
  LossOptions options;
  options.rollout_correction = RolloutCorrectionMode::kTokenTruncate;
  options.correction_max = 2;
  Owned sequence{.policy = {std::log(0.5)}, .rollout = {std::log(0.5 / 0.8)}, .kept_mass = {0.8}};
  EXPECT_NEAR(sequence.rollout[0], -0.470004, 5e-7);
  const auto corrected = EvaluateOne(options, sequence);
  ASSERT_TRUE(corrected.ok()) << corrected.status();
  EXPECT_NEAR(corrected->metrics.rollout_weight_sum, 1, 1e-15);
  EXPECT_NEAR(corrected->metrics.logprob_difference_max, 0, 1e-15);
  sequence.kept_mass.clear();
  const auto uncorrected = EvaluateOne(options, sequence);
  ASSERT_TRUE(uncorrected.ok()) << uncorrected.status();
  EXPECT_NEAR(uncorrected->metrics.rollout_weight_sum, 0.8, 1e-15);
}

TEST(LossTest, KeptMassOutsideZeroToOneIsRefused) {
  for (const double mass : {0.0, -0.5, 1.5, kNan}) {
    const auto result = EvaluateOne({}, {.policy = {-1}, .rollout = {-1}, .kept_mass = {mass}});
    EXPECT_EQ(result.status().code(), absl::StatusCode::kFailedPrecondition) << mass;
    EXPECT_THAT(std::string(result.status().message()), HasSubstr("kept_mass"));
  }
}

// CASES C10
TEST(LossTest, AShiftOfEveryTokenIsMaskedBySequenceProductsOnly) {
  Owned sequence{.policy = std::vector<double>(100, -1), .rollout = std::vector<double>(100, -1.012)};
  struct Expectation {
    RolloutCorrectionMode mode;
    double raw, weight, num_clipped, num_masked;
  };
  const double token = std::exp(0.012), product = std::exp(1.2);
  EXPECT_NEAR(product, 3.3201, 5e-5);
  EXPECT_NEAR(token, 1.01207, 5e-6);
  const Expectation expectations[] = {
      {RolloutCorrectionMode::kSequenceMask, product, 0, 0, 100},  {RolloutCorrectionMode::kSequenceTruncate, product, 3, 100, 0},
      {RolloutCorrectionMode::kGeometricMask, token, token, 0, 0}, {RolloutCorrectionMode::kTokenMask, token, token, 0, 0},
      {RolloutCorrectionMode::kTokenTruncate, token, token, 0, 0},
  };
  for (const Expectation& expected : expectations) {
    LossOptions options;
    options.rollout_correction = expected.mode;
    options.correction_max = 3;
    const auto result = EvaluateOne(options, sequence);
    ASSERT_TRUE(result.ok()) << result.status();
    const LossMetrics& metrics = result->metrics;
    EXPECT_NEAR(metrics.rollout_ratio_max, expected.raw, 1e-12);
    EXPECT_NEAR(metrics.rollout_weight_sum / metrics.rollout_weight_count, expected.weight, 1e-12);
    EXPECT_EQ(metrics.rollout_clipped, expected.num_clipped);
    EXPECT_EQ(metrics.rollout_masked, expected.num_masked);
    EXPECT_EQ(RolloutMaskWarning(metrics).has_value(), expected.num_masked > 0);
  }
}

// CASES C10
TEST(LossTest, MaskedShareWarnsAboveTenPercent) {
  LossOptions options;
  options.rollout_correction = RolloutCorrectionMode::kTokenMask;
  options.correction_max = 3;
  Owned sequence{.policy = std::vector<double>(20, -1), .rollout = std::vector<double>(20, -1)};
  sequence.rollout[3] = sequence.rollout[7] = -6;
  auto result = EvaluateOne(options, sequence);
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->metrics.rollout_masked, 2);
  EXPECT_FALSE(RolloutMaskWarning(result->metrics).has_value());
  sequence.rollout[11] = -6;
  result = EvaluateOne(options, sequence);
  ASSERT_TRUE(result.ok());
  ASSERT_TRUE(RolloutMaskWarning(result->metrics).has_value());
  EXPECT_THAT(*RolloutMaskWarning(result->metrics), HasSubstr("15.0 % of 20 tokens"));
}

// CASES C11
TEST(LossTest, SequenceRatioIsTheExpOfTheSumNotTheSumOfExps) {
  LossOptions options;
  options.ratio_level = RatioLevel::kSequenceProduct;
  const auto result = EvaluateOne(options, {.policy = {-0.9, -0.8, -1.3}, .old = {-1, -1, -1}});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_NEAR(result->metrics.ratio_sum, 1, 1e-12);
  EXPECT_EQ(result->metrics.ratio_count, 1);
  EXPECT_NEAR(result->loss, -1, 1e-12);
}

// CASES C12
TEST(LossTest, HistogramHoldsTheRatioBeforeClipping) {
  LossOptions options;
  options.rollout_correction = RolloutCorrectionMode::kTokenTruncate;
  options.correction_max = 3;
  // A hair below 10, so that rounding cannot put it into the next bucket.
  const auto result = EvaluateOne(options, {.policy = {-1}, .rollout = {-1 - std::log(10.0) + 1e-12}});
  ASSERT_TRUE(result.ok()) << result.status();
  const LossMetrics& metrics = result->metrics;
  EXPECT_EQ(metrics.rollout_weight_sum, 3);
  EXPECT_EQ(metrics.rollout_clipped, 1);
  EXPECT_NEAR(metrics.rollout_ratio_max, 10, 1e-9);
  const std::vector<double> expected = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0};  // (5, 10]
  EXPECT_EQ(metrics.rollout_ratio_histogram, expected);
}

class SplitTest : public ::testing::TestWithParam<std::pair<Aggregation, double>> {};

// CASES C18
TEST_P(SplitTest, MicroBatchSizeDoesNotMatter) {
  const auto [aggregation, expected] = GetParam();
  LossOptions options = PlainOptions(aggregation);
  options.max_completion_length = 8;
  std::vector<Owned> owned;
  for (std::size_t n = 1; n <= 8; ++n) {
    owned.push_back({.policy = std::vector<double>(n, -1), .advantages = {static_cast<double>(n)}});
  }
  std::vector<LossSequence> sequences;
  for (const Owned& sequence : owned) sequences.push_back(sequence.View());
  Rows whole;
  for (const std::size_t size : {8u, 4u, 2u, 1u}) {
    const std::size_t num_batches = 8 / size;
    const StepTotals totals = ComputeStepTotals(options, sequences, static_cast<int>(num_batches));
    double loss = 0;
    Rows gradient;
    for (std::size_t b = 0; b < num_batches; ++b) {
      const auto part = EvaluateLoss(options, totals, std::span(sequences).subspan(b * size, size));
      ASSERT_TRUE(part.ok()) << part.status();
      loss += part->loss;
      gradient.insert(gradient.end(), part->grad_logprobs.begin(), part->grad_logprobs.end());
    }
    if (whole.empty()) whole = gradient;
    if (aggregation == Aggregation::kMicroBatchTokenMean) {
      const std::map<std::size_t, double> by_size = {{1, 4.5}, {2, 4.579221}, {4, 4.846154}, {8, 5.666667}};
      EXPECT_NEAR(loss, by_size.at(size), 1e-6) << size;
    } else {
      EXPECT_NEAR(loss, expected, 1e-6) << size;
      ExpectRowsNear(gradient, whole, 1e-15);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Aggregations, SplitTest,
                         ::testing::Values(std::pair{Aggregation::kTokenMean, 17.0 / 3},
                                           std::pair{Aggregation::kSequenceMean, 4.5}, std::pair{Aggregation::kConstant, 3.1875},
                                           std::pair{Aggregation::kSequenceSum, 25.5},
                                           std::pair{Aggregation::kMicroBatchTokenMean, 0.0}));

// CASES C18
TEST(LossTest, TokensMaskedForTruncationLeaveTheDenominatorToo) {
  LossOptions options = PlainOptions(Aggregation::kTokenMean);
  options.mask_truncated = true;
  const std::vector<Owned> owned = {{.policy = {-1, -1}, .advantages = {3}},
                                    {.policy = {-1, -1, -1}, .advantages = {100}, .is_truncated = true}};
  const LossSequence views[] = {owned[0].View(), owned[1].View()};
  const StepTotals totals = ComputeStepTotals(options, views, 1);
  EXPECT_EQ(totals.num_tokens, 2);
  EXPECT_EQ(totals.num_sequences, 2);
  const auto result = EvaluateLoss(options, totals, views);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->loss, 3);
  EXPECT_EQ(result->grad_logprobs[1], std::vector<double>({0, 0, 0}));
}

// CASES C20
TEST(LossTest, TwoRanksReduceCountsBeforeTheyDivide) {
  const LossOptions options = PlainOptions(Aggregation::kTokenMean);
  const std::vector<Owned> owned = {{.policy = std::vector<double>(10, -1), .advantages = {1}},
                                    {.policy = std::vector<double>(90, -1), .advantages = {2}}};
  const std::vector<LossSequence> of_rank[] = {{owned[0].View()}, {owned[1].View()}, {}};
  for (const std::size_t num_ranks : {2u, 3u}) {  // the third has nothing and takes part
    StepTotals totals = ComputeStepTotals(options, of_rank[0], 1);
    for (std::size_t rank = 1; rank < num_ranks; ++rank) totals.Add(ComputeStepTotals(options, of_rank[rank], 1));
    double loss = 0;
    for (std::size_t rank = 0; rank < num_ranks; ++rank) {
      const auto result = EvaluateLoss(options, totals, of_rank[rank]);
      ASSERT_TRUE(result.ok()) << result.status();
      loss += result->loss;
    }
    EXPECT_NEAR(loss, 1.9, 1e-12);
  }
  const std::vector<LossSequence> all = {owned[0].View(), owned[1].View()};
  const auto one_rank = EvaluateLoss(options, ComputeStepTotals(options, all, 2), all);
  ASSERT_TRUE(one_rank.ok());
  EXPECT_NEAR(one_rank->loss, 1.9, 1e-12);
}

// CASES C22
TEST(LossTest, KlIsClampedAndCountedFarFromTheReference) {
  LossOptions options;
  options.beta = 1;
  options.kl_log_ratio_clamp = 20;
  options.kl_output_clamp = 10;
  const auto far = EvaluateOne(options, {.policy = {-101}, .ref = {-1}, .advantages = {0}});
  ASSERT_TRUE(far.ok()) << far.status();
  EXPECT_EQ(far->loss, 10);
  EXPECT_EQ(far->grad_logprobs[0][0], 0);
  EXPECT_EQ(far->metrics.kl_clamped, 1);
  EXPECT_EQ(far->metrics.kl_sum, 10);
  const auto near = EvaluateOne(options, {.policy = {-1e-4}, .ref = {0}, .advantages = {0}});
  ASSERT_TRUE(near.ok()) << near.status();
  EXPECT_NEAR(near->loss, 5.00017e-9, 1e-14);
  EXPECT_NEAR(near->grad_logprobs[0][0], -1.00005e-4, 1e-9);
  EXPECT_EQ(near->metrics.kl_clamped, 0);
}

// CASES C23
TEST(LossTest, RowsOutsideTheMaskAreNeverRead) {
  LossOptions options;
  options.beta = 0.1;
  options.top_entropy_quantile = 0.5;
  options.entropy_coefficient = 0.01;
  options.rollout_correction = RolloutCorrectionMode::kTokenTruncate;
  options.correction_max = 2;
  for (const Surrogate surrogate :
       {Surrogate::kClip, Surrogate::kCispo, Surrogate::kSapo, Surrogate::kVespo, Surrogate::kGmpo, Surrogate::kReinforce}) {
    for (const RatioLevel level :
         {RatioLevel::kToken, RatioLevel::kSequence, RatioLevel::kSequenceToken, RatioLevel::kSequenceProduct}) {
      options.surrogate = surrogate;
      options.ratio_level = level;
      const Owned without{.policy = {-0.5, -1.5},
                          .old = {-0.6, -1.3},
                          .ref = {-0.4, -1},
                          .rollout = {-0.5, -1.4},
                          .entropies = {0.3, 0.9},
                          .advantages = {-0.7}};
      const auto expected = EvaluateOne(options, without);
      ASSERT_TRUE(expected.ok()) << expected.status();
      for (const auto& [policy, old] : {std::pair{0.0, -200.0}, std::pair{kNan, kNan}, std::pair{kInfinity, -kInfinity}}) {
        const Owned with{.policy = {-0.5, policy, -1.5},
                         .old = {-0.6, old, -1.3},
                         .ref = {-0.4, policy, -1},
                         .rollout = {-0.5, old, -1.4},
                         .entropies = {0.3, policy, 0.9},
                         .advantages = {-0.7},
                         .mask = {1, 0, 1}};
        const auto result = EvaluateOne(options, with);
        ASSERT_TRUE(result.ok()) << result.status();
        EXPECT_EQ(result->loss, expected->loss);
        EXPECT_EQ(result->grad_logprobs[0],
                  std::vector<double>({expected->grad_logprobs[0][0], 0, expected->grad_logprobs[0][1]}));
        EXPECT_EQ(result->grad_entropies[0],
                  std::vector<double>({expected->grad_entropies[0][0], 0, expected->grad_entropies[0][1]}));
      }
    }
  }
}

TEST(LossTest, ATokenTheSamplerCouldNotDrawIsMasked) {
  LossOptions options;
  options.rollout_correction = RolloutCorrectionMode::kTokenTruncate;
  options.correction_max = 2;
  const auto expected = EvaluateOne(options, {.policy = {-1, -2}, .rollout = {-1, -2}});
  const auto result = EvaluateOne(options, {.policy = {-1, -5, -2}, .rollout = {-1, -kInfinity, -2}});
  ASSERT_TRUE(expected.ok() && result.ok());
  EXPECT_EQ(result->loss, expected->loss);
  EXPECT_EQ(result->metrics.token_count, 2);
  EXPECT_EQ(result->grad_logprobs[0][1], 0);
}

// CASES C29
TEST(LossTest, MaskComesFromTheLengthWhateverTheIdsAre) {
  const std::vector<int> completion = {5, 7, 2};  // 2 is the end id, and the pad id too
  LossOptions options;
  const std::vector<std::uint8_t> ones = {1, 1, 1}, zeros = {0, 0, 0};
  EXPECT_EQ(LossMaskFromLength(options, completion.size(), false), ones);
  EXPECT_EQ(LossMaskFromLength(options, completion.size(), true), ones);
  options.mask_truncated = true;
  EXPECT_EQ(LossMaskFromLength(options, completion.size(), false), ones);
  EXPECT_EQ(LossMaskFromLength(options, completion.size(), true), zeros);
}

TEST(LossTest, InputsThatAreNotFiniteAreNamed) {
  LossOptions options;
  const Owned good{
      .policy = {-1, -1}, .old = {-1, -1}, .ref = {-1, -1}, .rollout = {-1, -1}, .entropies = {1, 1}, .advantages = {1, 1}};
  ASSERT_TRUE(EvaluateOne(options, good).ok());
  const std::pair<std::vector<double> Owned::*, std::string> fields[] = {
      {&Owned::policy, "policy_logprobs"},   {&Owned::old, "old_logprobs"},    {&Owned::ref, "ref_logprobs"},
      {&Owned::rollout, "rollout_logprobs"}, {&Owned::entropies, "entropies"}, {&Owned::advantages, "advantages"}};
  for (const auto& [field, name] : fields) {
    Owned bad = good;
    (bad.*field)[1] = kNan;
    const auto status = EvaluateOne(options, bad).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << name;
    EXPECT_THAT(std::string(status.message()), HasSubstr("sequence 0 token 1: " + name + " is nan"));
  }
}

TEST(LossTest, AnUnboundedRatioIsAnErrorNotAnInfinity) {
  const auto result = EvaluateOne({}, {.policy = {-1, -1}, .old = {-1, -1000}, .advantages = {-1}});
  EXPECT_EQ(result.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("sequence 0 token 1"));
  LossOptions bounded;
  bounded.delta = 4;
  const auto with_delta = EvaluateOne(bounded, {.policy = {-1, -1}, .old = {-1, -1000}, .advantages = {-1}});
  ASSERT_TRUE(with_delta.ok()) << with_delta.status();
  EXPECT_EQ(with_delta->loss, 2.5);
}

TEST(LossTest, NeededInputsThatAreAbsentAreRefused) {
  LossOptions beta, correction, entropy, quantile;
  beta.beta = 0.1;
  correction.rollout_correction = RolloutCorrectionMode::kTokenTruncate;
  correction.correction_max = 2;
  entropy.entropy_coefficient = 0.1;
  quantile.top_entropy_quantile = 0.2;
  for (const auto& [options, name] : {std::pair{beta, "ref_logprobs"}, std::pair{correction, "rollout_logprobs"},
                                      std::pair{entropy, "entropies"}, std::pair{quantile, "entropies"}}) {
    const auto status = EvaluateOne(options, {.policy = {-1, -2}}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat(name, " has 0 values for 2 tokens")));
  }
}

TEST(LossTest, LengthsThatDifferAreRefused) {
  for (const Owned& bad : {Owned{.policy = {-1, -2}, .old = {-1}}, Owned{.policy = {-1, -2}, .mask = {1}},
                           Owned{.policy = {-1, -2, -3}, .advantages = {1, 2}}, Owned{.policy = {-1}, .kept_mass = {1, 1}}}) {
    EXPECT_EQ(EvaluateOne({}, bad).status().code(), absl::StatusCode::kInvalidArgument);
  }
}

TEST(LossTest, OnPolicyGradientIsTheAdvantageTimesTheWeight) {
  for (const Surrogate surrogate :
       {Surrogate::kClip, Surrogate::kCispo, Surrogate::kSapo, Surrogate::kGmpo, Surrogate::kReinforce}) {
    LossOptions options;
    options.surrogate = surrogate;
    const auto result = EvaluateOne(options, {.policy = {-0.3, -2, -1}, .advantages = {-0.8}});
    ASSERT_TRUE(result.ok()) << result.status();
    for (const double gradient : result->grad_logprobs[0]) EXPECT_NEAR(gradient, 0.8 / 3, 1e-15);
    EXPECT_EQ(result->metrics.clip_low + result->metrics.clip_high, 0);
    EXPECT_EQ(result->metrics.ratio_max, 1);
  }
}

TEST(LossTest, MetricsAddUpOverMicroBatches) {
  LossMetrics sum;
  LossMetrics first, second;
  first.rollout_weight_min = 0.5;
  first.rollout_weight_max = 0.9;
  first.rollout_weight_count = 3;
  first.rollout_ratio_histogram.assign(13, 1);
  second.rollout_weight_min = 0.7;
  second.rollout_weight_max = 1.4;
  second.rollout_weight_count = 2;
  second.rollout_ratio_histogram.assign(13, 2);
  sum.Add(LossMetrics());
  sum.Add(second);
  sum.Add(first);
  sum.Add(LossMetrics());
  EXPECT_EQ(sum.rollout_weight_min, 0.5);
  EXPECT_EQ(sum.rollout_weight_max, 1.4);
  EXPECT_EQ(sum.rollout_weight_count, 5);
  EXPECT_EQ(sum.rollout_ratio_histogram, std::vector<double>(13, 3));
}

}  // namespace
}  // namespace tandem
