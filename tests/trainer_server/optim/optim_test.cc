#include <cmath>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "trainer_server/optim/adamw.h"
#include "trainer_server/optim/learning_rate.h"

namespace tandem {
namespace {

struct State {
  std::vector<float> parameters, gradients, first, second;
  explicit State(std::size_t size) : parameters(size), gradients(size), first(size), second(size) {
    for (std::size_t i = 0; i < size; ++i) {
      parameters[i] = std::sin(static_cast<float>(i));
      gradients[i] = 0.1f * std::cos(2.7f * static_cast<float>(i));
    }
  }
  absl::StatusOr<AdamWReport> Step(const AdamWOptions& options, double rate, std::uint64_t step) {
    return AdamWStep(options, rate, step, parameters, gradients, first, second);
  }
};

TEST(AdamW, FollowsTheFormulaInDouble) {
  const AdamWOptions options{.beta1 = 0.9, .beta2 = 0.99, .epsilon = 1e-8, .weight_decay = 0.01, .max_grad_norm = 0.5};
  State state(37);
  std::vector<double> p(state.parameters.begin(), state.parameters.end()), m(p.size()), v(p.size());
  for (std::uint64_t step = 1; step <= 5; ++step) {
    double norm = 0;
    for (float& g : state.gradients) {
      g *= step == 4 ? 10.f : 0.9f;
      norm += static_cast<double>(g) * g;
    }
    norm = std::sqrt(norm);
    const double clip = std::min(1.0, 0.5 / (norm + 1e-6));
    for (std::size_t i = 0; i < p.size(); ++i) {
      const double g = state.gradients[i] * clip;
      m[i] = 0.9 * m[i] + 0.1 * g;
      v[i] = 0.99 * v[i] + 0.01 * g * g;
      const double m_hat = m[i] / (1 - std::pow(0.9, step)), v_hat = v[i] / (1 - std::pow(0.99, step));
      p[i] = p[i] * (1 - 1e-2 * 0.01) - 1e-2 * m_hat / (std::sqrt(v_hat) + 1e-8);
    }
    const auto report = state.Step(options, 1e-2, step);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_NEAR(report->grad_norm, norm, 1e-12);
    EXPECT_EQ(report->is_clipped, clip < 1);
    for (std::size_t i = 0; i < p.size(); ++i)
      EXPECT_NEAR(state.parameters[i], p[i], 2e-6) << "step " << step << " element " << i;
  }
}

TEST(AdamW, LeavesEverythingAsItWasWhenTheNormIsNotFinite) {
  State state(9);
  ASSERT_TRUE(state.Step({}, 1e-3, 1).ok());
  state.gradients[4] = std::numeric_limits<float>::quiet_NaN();
  const State before = state;
  const auto report = state.Step({}, 1e-3, 2);
  EXPECT_EQ(report.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(state.parameters, before.parameters);
  EXPECT_EQ(state.first, before.first);
  EXPECT_EQ(state.second, before.second);
}

TEST(AdamW, DoesNotMovePaddingThatIsZero) {
  State state(8);
  state.parameters[3] = state.gradients[3] = 0;
  ASSERT_TRUE(state.Step({.weight_decay = 0.1}, 1e-2, 1).ok());
  EXPECT_EQ(state.parameters[3], 0.f);
}

TEST(AdamW, ClipsNothingWhenTheLimitIsZero) {
  State state(8);
  for (float& g : state.gradients) g *= 1e6f;
  const auto report = state.Step({.max_grad_norm = 0}, 1e-2, 1);
  ASSERT_TRUE(report.ok());
  EXPECT_FALSE(report->is_clipped);
}

std::vector<double> Rates(const LearningRateOptions& options, int steps) {
  std::vector<double> rates;
  for (int step = 1; step <= steps; ++step) rates.push_back(LearningRateAt(options, static_cast<std::uint64_t>(step)));
  return rates;
}

void ExpectRates(const std::vector<double>& rates, const std::vector<double>& expected) {
  ASSERT_EQ(rates.size(), expected.size());
  for (std::size_t i = 0; i < rates.size(); ++i) EXPECT_NEAR(rates[i], expected[i], 1e-12) << "step " << i + 1;
}

TEST(LearningRate, WarmsUpThenDecays) {
  using enum LearningRateDecay;
  ExpectRates(Rates({.peak = 1, .decay = kLinear, .warmup_steps = 2, .num_steps = 6}, 6), {0.5, 1, 0.75, 0.5, 0.25, 0});
  ExpectRates(Rates({.peak = 2, .decay = kCosine, .warmup_steps = 1, .num_steps = 5, .final_ratio = 0.1}, 5),
              {2, 0.2 + 1.8 * (0.5 + std::sqrt(0.125)), 1.1, 0.2 + 1.8 * (0.5 - std::sqrt(0.125)), 0.2});
  ExpectRates(Rates({.peak = 3, .decay = kConstant, .warmup_steps = 3, .num_steps = 5}, 5), {1, 2, 3, 3, 3});
}

TEST(LearningRate, WithoutWarmupTheFirstStepHasThePeakAndTheLastTheFinalRatio) {
  const LearningRateOptions options{.peak = 4, .decay = LearningRateDecay::kLinear, .num_steps = 5, .final_ratio = 0.5};
  EXPECT_EQ(LearningRateAt(options, 1), 4);
  EXPECT_EQ(LearningRateAt(options, 5), 2);
  EXPECT_EQ(LearningRateAt(options, 9), 2);
  EXPECT_EQ(LearningRateAt({.peak = 4, .decay = LearningRateDecay::kCosine, .num_steps = 1}, 1), 4);
}

}  // namespace
}  // namespace tandem
