#include "rollout_server/sample/sampler.h"

#include <chrono>
#include <cmath>
#include <limits>
#include <numeric>

#include "common/base/random.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "rollout_server/sample/softmax.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

absl::StatusOr<DrawnToken> DrawRow(const std::vector<float>& row, const DrawInput& input) {
  const auto sampler = Sampler::Create({.vocab_size = static_cast<int>(row.size())});
  const Logits logits = {.data = row.data(), .num_rows = 1, .vocab_size = static_cast<std::int64_t>(row.size())};
  return (*sampler)->Draw(logits, {&input, 1}).front();
}

DrawnToken Draw(const std::vector<float>& logits, const SamplingParams& params, std::uint64_t seed = 1,
                std::uint32_t position = 0, const std::vector<std::uint32_t>& prompt = {},
                const std::vector<std::uint32_t>& completion = {}) {
  const absl::StatusOr<DrawnToken> token =
      DrawRow(logits, {.params = &params, .seed = seed, .position = position, .prompt = prompt, .completion = completion});
  EXPECT_TRUE(token.ok()) << token.status();
  return token.ok() ? *token : DrawnToken();
}

// The first seed whose draw is `id`.
DrawnToken DrawOf(std::uint32_t id, const std::vector<float>& logits, const SamplingParams& params) {
  for (std::uint64_t seed = 0; seed < 100000; ++seed) {
    const DrawnToken token = Draw(logits, params, seed);
    if (token.id == id) return token;
  }
  ADD_FAILURE() << "token " << id << " is never drawn";
  return {};
}

std::vector<float> Logs(const std::vector<double>& probabilities) {
  std::vector<float> logits;
  for (double p : probabilities) logits.push_back(static_cast<float>(std::log(p)));
  return logits;
}

// CASES C01
TEST(SamplerTest, ReturnsLogprobsOfTheDistributionDrawnFromAndOfTheRawPolicy) {
  const DrawnToken token = DrawOf(0, {2, 1, 0}, {.temperature = 0.5});
  EXPECT_NEAR(token.rollout_logprob, -0.142932, 1e-6);
  EXPECT_NEAR(token.raw_logprob, -0.407606, 1e-6);
  EXPECT_EQ(token.kept_mass, 1);
}

// CASES C02
TEST(SamplerTest, RolloutProbabilitiesSumToOneAtAnyTemperature) {
  for (double temperature : {0.1, 0.5, 1.0, 1.7, 20.0}) {
    double sum = 0;
    for (std::uint32_t id = 0; id < 3; ++id) {
      // At 0.1 the last token has probability 2e-9: its log-prob is checked by the formula instead.
      if (temperature == 0.1 && id == 2) continue;
      sum += std::exp(double{DrawOf(id, {2, 1, 0}, {.temperature = temperature}).rollout_logprob});
    }
    EXPECT_NEAR(sum, 1, 1e-6) << temperature;
  }
}

// CASES C03
TEST(SamplerTest, KeptMassIsWhatTruncationLeft) {
  const DrawnToken token = DrawOf(0, Logs({.5, .3, .15, .05}), {.top_p = 0.75});
  EXPECT_NEAR(token.rollout_logprob, std::log(.625), 1e-6);
  EXPECT_NEAR(token.raw_logprob, std::log(.5), 1e-6);
  EXPECT_NEAR(token.kept_mass, 0.8, 1e-6);
}

TEST(SamplerTest, TruncationsKeepWhatTheirNamesSay) {
  const std::vector<float> logits = Logs({.05, .5, .15, .3});
  const auto kept = [&](const SamplingParams& params) {
    std::vector<bool> is_drawn(4);
    for (std::uint64_t seed = 0; seed < 2000; ++seed) is_drawn[Draw(logits, params, seed).id] = true;
    return is_drawn;
  };
  EXPECT_EQ(kept({.top_k = 1}), (std::vector<bool>{false, true, false, false}));
  EXPECT_EQ(kept({.top_k = 3}), (std::vector<bool>{false, true, true, true}));
  EXPECT_EQ(kept({.top_p = 0.01}), (std::vector<bool>{false, true, false, false}));
  EXPECT_EQ(kept({.min_p = 0.25}), (std::vector<bool>{false, true, true, true}));
  EXPECT_EQ(kept({.min_p = 0.5}), (std::vector<bool>{false, true, false, true}));
  EXPECT_EQ(kept({.top_k = 3, .top_p = 0.6, .min_p = 0.0}), (std::vector<bool>{false, true, false, true}));
  EXPECT_EQ(kept({}), (std::vector<bool>{true, true, true, true}));
}

TEST(SamplerTest, DrawsFollowTheProbabilities) {
  const std::vector<double> probabilities = {.5, .3, .15, .05};
  const std::vector<float> logits = Logs(probabilities);
  for (const SamplingParams& params : {SamplingParams{}, SamplingParams{.top_k = 4, .min_p = 1e-6}}) {
    std::vector<int> counts(4);
    constexpr int kDraws = 40000;
    for (int i = 0; i < kDraws; ++i) ++counts[Draw(logits, params, 7, i).id];
    for (int id = 0; id < 4; ++id) {
      // Four standard deviations of a binomial count.
      const double tolerance = 4 * std::sqrt(kDraws * probabilities[id] * (1 - probabilities[id]));
      EXPECT_NEAR(counts[id], kDraws * probabilities[id], tolerance) << id;
    }
  }
}

TEST(SamplerTest, IsAFunctionOfSeedAndPosition) {
  std::vector<float> logits(1000);
  for (std::size_t i = 0; i < logits.size(); ++i) logits[i] = static_cast<float>(3 * RandomUniform(5, i));
  for (std::uint32_t position = 0; position < 20; ++position) {
    EXPECT_EQ(Draw(logits, {}, 3, position).id, Draw(logits, {}, 3, position).id);
  }
  EXPECT_NE(Draw(logits, {}, 3, 0).id, Draw(logits, {}, 3, 1).id);
  EXPECT_NE(Draw(logits, {}, 3, 0).id, Draw(logits, {}, 4, 0).id);
}

TEST(SamplerTest, MatchesANaiveDoubleSoftmaxOverALargeVocabulary) {
  std::vector<float> logits(49152 + 3);  // no multiple of lanes or tiles
  for (std::size_t i = 0; i < logits.size(); ++i) logits[i] = static_cast<float>(30 * RandomUniform(11, i) - 10);
  for (double temperature : {1.0, 0.7}) {
    double sum = 0;
    double raw_sum = 0;
    for (float logit : logits) {
      sum += std::exp(double{logit} / temperature);
      raw_sum += std::exp(double{logit});
    }
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
      const DrawnToken token = Draw(logits, {.temperature = temperature}, seed);
      EXPECT_NEAR(token.rollout_logprob, logits[token.id] / temperature - std::log(sum), 5e-6);
      EXPECT_NEAR(token.raw_logprob, logits[token.id] - std::log(raw_sum), 5e-6);
      double below = 0;  // the inverse CDF in order of ids, in double
      std::uint32_t id = 0;
      for (; id + 1 < logits.size(); ++id) {
        below += std::exp(double{logits[id]} / temperature) / sum;
        if (below > RandomUniform(seed, 0)) break;
      }
      EXPECT_LE(std::abs(static_cast<int>(id) - static_cast<int>(token.id)), 1);
    }
  }
}

TEST(SamplerTest, GreedyTakesTheFirstLargest) {
  const DrawnToken token = Draw({1, 3, 3, 2}, {.temperature = 0});
  EXPECT_EQ(token.id, 1u);
  EXPECT_EQ(token.rollout_logprob, 0);
  EXPECT_NEAR(token.raw_logprob, 3 - std::log(std::exp(1) + 2 * std::exp(3) + std::exp(2)), 1e-6);
}

TEST(SamplerTest, PenaltiesTouchWhatWasSaidOnce) {
  // Repetition over prompt and completion: 2 / 2 = 1, -1 * 2 = -2; presence over the completion only: 3 / 2 - 1.5 = 0.
  const std::vector<float> logits = {2, -1, 3, 0.5};
  const SamplingParams params = {.repetition_penalty = 2, .presence_penalty = 1.5};
  const DrawnToken token =
      Draw(logits, {.temperature = 0, .repetition_penalty = 2, .presence_penalty = 1.5}, 0, 0, {0, 1, 0}, {2, 2});
  EXPECT_EQ(token.id, 0u);
  const std::vector<std::uint32_t> prompt = {0, 1, 0};
  const std::vector<std::uint32_t> completion = {2, 2};
  const double total = std::exp(1) + std::exp(-2) + std::exp(0) + std::exp(0.5);
  const std::vector<double> penalised = {1, -2, 0, 0.5};
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    const DrawnToken drawn =
        *DrawRow(logits, {.params = &params, .seed = seed, .position = 2, .prompt = prompt, .completion = completion});
    EXPECT_NEAR(drawn.rollout_logprob, penalised[drawn.id] - std::log(total), 1e-5);
    EXPECT_NEAR(drawn.raw_logprob, logits[drawn.id] - std::log(std::exp(2) + std::exp(-1) + std::exp(3) + std::exp(0.5)), 1e-5);
  }
}

TEST(SamplerTest, MaskedLogitsAreNeverDrawn) {
  const std::vector<float> logits = {-kInfinity, 0, -kInfinity, 0, -kInfinity};
  for (std::uint64_t seed = 0; seed < 500; ++seed) EXPECT_EQ(Draw(logits, {}, seed).id % 2, 1u);
}

// CASES C06
TEST(SamplerTest, RefusesLogitsThatAreNoNumbers) {
  const SamplingParams params;
  for (std::size_t bad : {0u, 3u, 4u}) {
    std::vector<float> logits(5, 1.0f);
    logits[bad] = kNan;
    const absl::StatusOr<DrawnToken> token = DrawRow(logits, {.params = &params, .position = 17});
    ASSERT_FALSE(token.ok());
    EXPECT_THAT(std::string(token.status().message()), HasSubstr("NaN logits at completion position 17"));
  }
  EXPECT_FALSE(DrawRow({1, kInfinity}, {.params = &params}).ok());
  EXPECT_FALSE(DrawRow({-kInfinity, -kInfinity}, {.params = &params}).ok());
}

TEST(SoftmaxTest, ExponentialIsAccurateOverItsRange) {
  std::vector<float> row;
  for (float x = 0; x > -87; x -= 0.0137f) row.push_back(x);
  std::vector<float> exponentials(row.size());
  std::vector<double> tile_sums;
  const double total = Exponentiate(row, 0, 1, exponentials, &tile_sums);
  for (std::size_t i = 0; i < row.size(); ++i) { EXPECT_NEAR(exponentials[i] / std::exp(double{row[i]}), 1, 3e-7) << row[i]; }
  EXPECT_NEAR(total, std::accumulate(exponentials.begin(), exponentials.end(), 0.0), total * 1e-6);
  EXPECT_NEAR(total, std::accumulate(tile_sums.begin(), tile_sums.end(), 0.0), total * 1e-12);
}

TEST(SoftmaxTest, UnderflowIsZero) {
  const std::vector<float> row = {0, -88, -kInfinity, -1e30f};
  std::vector<float> exponentials(row.size());
  std::vector<double> tile_sums;
  EXPECT_EQ(Exponentiate(row, 0, 1, exponentials, &tile_sums), 1);
  EXPECT_EQ(exponentials, (std::vector<float>{1, 0, 0, 0}));
}

}  // namespace
}  // namespace tandem
