// Random recipes over all axes: the loss against a naive objective with explicit stop-gradients, its gradients against finite
// differences, and independence of the split.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "gtest/gtest.h"
#include "tests/trainer_server/loss/golden_cases.h"
#include "trainer_server/loss/loss.h"

namespace tandem {
namespace {

constexpr Surrogate kSurrogates[] = {Surrogate::kClip,  Surrogate::kCispo, Surrogate::kSapo,
                                     Surrogate::kVespo, Surrogate::kGmpo,  Surrogate::kReinforce};
constexpr RatioLevel kLevels[] = {RatioLevel::kToken, RatioLevel::kSequence, RatioLevel::kSequenceToken,
                                  RatioLevel::kSequenceProduct};
constexpr Aggregation kAggregations[] = {Aggregation::kSequenceMean, Aggregation::kTokenMean, Aggregation::kMicroBatchTokenMean,
                                         Aggregation::kConstant, Aggregation::kSequenceSum};
constexpr RolloutCorrectionMode kModes[] = {RolloutCorrectionMode::kNone,         RolloutCorrectionMode::kTokenTruncate,
                                            RolloutCorrectionMode::kTokenMask,    RolloutCorrectionMode::kSequenceTruncate,
                                            RolloutCorrectionMode::kSequenceMask, RolloutCorrectionMode::kGeometricMask};

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  double Normal(double spread) { return std::normal_distribution<double>(0, spread)(engine_); }
  double Uniform(double low, double high) { return std::uniform_real_distribution<double>(low, high)(engine_); }
  bool Coin(double probability) { return Uniform(0, 1) < probability; }
  std::size_t Below(std::size_t bound) { return std::uniform_int_distribution<std::size_t>(0, bound - 1)(engine_); }
  std::mt19937& engine() { return engine_; }

 private:
  std::mt19937 engine_;
};

struct RandomStep {
  LossStep step;
  Rows advantages;
};

RandomStep MakeStep(Surrogate surrogate, RatioLevel level, Aggregation aggregation, unsigned seed) {
  Random random(seed);
  RandomStep result;
  LossStep& step = result.step;
  LossOptions& options = step.loss;
  options.surrogate = surrogate;
  options.ratio_level = level;
  options.aggregation = aggregation;
  options.epsilon_high = 0.28;
  if (surrogate == Surrogate::kClip && random.Coin(0.5)) options.delta = 1.6;
  if (surrogate == Surrogate::kCispo && random.Coin(0.5)) {
    options.cispo_min_ratio = 0.8;
    options.cispo_max_ratio = 1.2;
  }
  const bool uses_ratio = surrogate == Surrogate::kClip || surrogate == Surrogate::kCispo || surrogate == Surrogate::kSapo;
  if (uses_ratio && random.Coin(0.3)) options.log_ratio_clamp = 0.3;
  if (random.Coin(0.6)) {
    options.beta = 0.1;
    options.kl_estimator = std::vector{KlEstimator::kK1, KlEstimator::kK2, KlEstimator::kK3}[random.Below(3)];
    options.kl_bias_correction = random.Coin(0.5);
    if (random.Coin(0.5)) options.kl_log_ratio_clamp = 0.5;
    if (random.Coin(0.5)) options.kl_output_clamp = 0.15;
  }
  options.mask_truncated = random.Coin(0.5);
  options.count_empty_sequences = random.Coin(0.5);
  const std::size_t num_modes = surrogate == Surrogate::kVespo ? 3 : std::size(kModes);
  options.rollout_correction = kModes[random.Below(num_modes)];
  if (options.rollout_correction != RolloutCorrectionMode::kNone) {
    options.correction_min = 0.8;
    options.correction_max = 1.3;
  }
  if (random.Coin(0.3)) options.off_policy_threshold = 0.02;
  if (random.Coin(0.3)) options.top_entropy_quantile = 0.4;
  if (random.Coin(0.5)) options.entropy_coefficient = 0.05;
  EXPECT_TRUE(ValidateLossOptions(options).ok()) << ValidateLossOptions(options);

  const bool has_old = random.Coin(0.8), has_per_token = random.Coin(0.4), has_kept_mass = random.Coin(0.5);
  for (const std::size_t length : {5u, 0u, 3u, 8u, 1u, 4u, 6u, 2u, 7u}) {
    std::vector<double> policy, old, ref, rollout, entropies, kept_mass, advantages;
    std::vector<std::uint8_t> mask;
    for (std::size_t t = 0; t < length; ++t) {
      policy.push_back(-std::abs(random.Normal(1.2)) - 0.5);
      old.push_back(policy.back() + random.Normal(0.25));
      ref.push_back(policy.back() + random.Normal(0.4));
      kept_mass.push_back(random.Uniform(0.7, 1));
      rollout.push_back((has_old ? old : policy).back() + random.Normal(0.15) - (has_kept_mass ? std::log(kept_mass.back()) : 0));
      entropies.push_back(std::abs(random.Normal(1)));
      advantages.push_back(random.Normal(1));
      mask.push_back(random.Coin(0.85) ? 1 : 0);
    }
    if (!has_per_token) advantages = {random.Normal(1)};
    step.policy_logprobs.push_back(policy);
    if (has_old) step.old_logprobs.push_back(old);
    step.ref_logprobs.push_back(ref);
    step.rollout_logprobs.push_back(rollout);
    if (has_kept_mass) step.kept_mass.push_back(kept_mass);
    step.entropies.push_back(entropies);
    step.loss_mask.push_back(mask);
    step.is_truncated.push_back(random.Coin(0.2));
    result.advantages.push_back(advantages);
  }
  step.micro_batches = {{0, 1, 2}, {3, 4}, {5, 6, 7, 8}};
  return result;
}

// One sequence's share of the objective as MATHS writes it, before the entropy bonus: `live` is differentiated, `frozen` is its
// stop-gradient copy. Masks multiply here; the product selects.
class NaiveSequence {
 public:
  NaiveSequence(const RandomStep& random, const StepTotals& totals, std::size_t i)
      : options_(random.step.loss), totals_(totals), step_(random.step), i_(i) {
    const std::size_t length = step_.policy_logprobs[i].size();
    for (std::size_t t = 0; t < length; ++t) {
      mask_.push_back(options_.mask_truncated && step_.is_truncated[i] ? 0 : step_.loss_mask[i][t]);
      advantages_.push_back(random.advantages[i].size() == 1 ? random.advantages[i][0] : random.advantages[i][t]);
    }
    n_ = std::max(1.0, std::accumulate(mask_.begin(), mask_.end(), 0.0));
  }

  double Loss(const std::vector<double>& live, double weight) const {
    const std::vector<double>& frozen = step_.policy_logprobs[i_];
    const std::vector<double>& old = step_.old_logprobs.empty() ? frozen : step_.old_logprobs[i_];
    std::vector<double> sampler = step_.rollout_logprobs[i_];
    for (std::size_t t = 0; t < sampler.size() && !step_.kept_mass.empty(); ++t) sampler[t] += std::log(step_.kept_mass[i_][t]);
    const std::vector<double> corrections = Corrections(old, sampler);
    const std::vector<double> ratios = Ratios(live, frozen, old);
    const std::vector<double> frozen_ratios = Ratios(frozen, frozen, old);
    double drift = 0;
    for (std::size_t t = 0; t < live.size(); ++t) drift += mask_[t] * (sampler[t] - frozen[t]) / n_;

    double loss = 0;
    for (std::size_t t = 0; t < live.size(); ++t) {
      double multiplier = options_.surrogate == Surrogate::kVespo ? 1 : corrections[t];
      if (options_.off_policy_threshold && advantages_[t] < 0 && drift > *options_.off_policy_threshold) multiplier = 0;
      if (options_.top_entropy_quantile < 1 && step_.entropies[i_][t] < totals_.entropy_threshold) multiplier = 0;
      double term = multiplier * SurrogateValue(t, live, frozen, old, ratios, frozen_ratios, corrections);
      if (options_.beta != 0) {
        term += options_.beta * Kl(step_.ref_logprobs[i_][t] - live[t]) * (options_.kl_bias_correction ? ratios[t] : 1);
      }
      loss += weight * mask_[t] * term;
    }
    return loss;
  }

  double num_trained() const { return std::accumulate(mask_.begin(), mask_.end(), 0.0); }
  const std::vector<double>& mask() const { return mask_; }

 private:
  std::vector<double> Corrections(const std::vector<double>& old, const std::vector<double>& sampler) const {
    using Mode = RolloutCorrectionMode;
    const Mode mode = options_.rollout_correction;
    double sum = 0;
    for (std::size_t t = 0; t < old.size(); ++t) sum += mask_[t] * (old[t] - sampler[t]);
    std::vector<double> result;
    for (std::size_t t = 0; t < old.size(); ++t) {
      const double token = std::exp(old[t] - sampler[t]);
      if (mode == Mode::kNone) {
        result.push_back(1);
        continue;
      }
      const double low = *options_.correction_min, high = *options_.correction_max;
      const auto within = [&](double x) { return x >= low && x <= high; };
      if (mode == Mode::kTokenTruncate) result.push_back(std::clamp(token, low, high));
      if (mode == Mode::kTokenMask) result.push_back(within(token) ? token : 0);
      if (mode == Mode::kSequenceTruncate) result.push_back(std::clamp(std::exp(sum), low, high));
      if (mode == Mode::kSequenceMask) result.push_back(within(std::exp(sum)) ? std::exp(sum) : 0);
      if (mode == Mode::kGeometricMask) result.push_back(within(std::exp(sum / n_)) ? token : 0);
    }
    return result;
  }

  std::vector<double> Ratios(const std::vector<double>& live, const std::vector<double>& frozen,
                             const std::vector<double>& old) const {
    const auto clamped = [&](double x) {
      return options_.log_ratio_clamp ? std::clamp(x, -*options_.log_ratio_clamp, *options_.log_ratio_clamp) : x;
    };
    double live_sum = 0, frozen_sum = 0;
    for (std::size_t t = 0; t < live.size(); ++t) {
      live_sum += mask_[t] * clamped(live[t] - old[t]);
      frozen_sum += mask_[t] * clamped(frozen[t] - old[t]);
    }
    std::vector<double> result;
    for (std::size_t t = 0; t < live.size(); ++t) {
      switch (options_.ratio_level) {
        case RatioLevel::kToken:
          result.push_back(std::exp(clamped(live[t] - old[t])));
          break;
        case RatioLevel::kSequence:
          result.push_back(std::exp(live_sum / n_));
          break;
        case RatioLevel::kSequenceToken:
          result.push_back(std::exp(frozen_sum / n_) * std::exp(live[t] - frozen[t]));
          break;
        case RatioLevel::kSequenceProduct:
          result.push_back(std::exp(live_sum));
          break;
      }
    }
    return result;
  }

  double SurrogateValue(std::size_t t, const std::vector<double>& live, const std::vector<double>& frozen,
                        const std::vector<double>& old, const std::vector<double>& ratios,
                        const std::vector<double>& frozen_ratios, const std::vector<double>& corrections) const {
    const double a = advantages_[t], r = ratios[t];
    switch (options_.surrogate) {
      case Surrogate::kClip: {
        const double outer = options_.delta ? std::min(r, *options_.delta) : r;
        return -std::min(outer * a, std::clamp(r, 1 - options_.epsilon_low, 1 + options_.epsilon_high) * a);
      }
      case Surrogate::kCispo:
        return -std::clamp(frozen_ratios[t], options_.cispo_min_ratio.value_or(0), options_.cispo_max_ratio) * a * live[t];
      case Surrogate::kSapo: {
        const double tau = a > 0 ? options_.sapo_temperature_positive : options_.sapo_temperature_negative;
        return -4 / tau / (1 + std::exp(-tau * (r - 1))) * a;
      }
      case Surrogate::kVespo: {
        double log_w = 0;
        bool is_positive = true;
        for (std::size_t s = live.size(); s-- > 0;) {
          log_w += mask_[s] * (std::clamp(frozen[s] - old[s], -20.0, 20.0) + std::log(std::max(corrections[s], 1e-8)));
          if (mask_[s] != 0) is_positive = advantages_[s] >= 0;  // the first trained token's sign
        }
        log_w = std::clamp(log_w, std::log(1e-8), 20.0);
        const double k = is_positive ? options_.vespo_k_positive : options_.vespo_k_negative;
        const double lambda = is_positive ? options_.vespo_lambda_positive : options_.vespo_lambda_negative;
        return -std::exp(lambda + k * log_w - lambda * std::exp(log_w)) * a * live[t];
      }
      case Surrogate::kGmpo: {
        double sum = 0;
        for (std::size_t s = 0; s < live.size(); ++s) {
          const double x = live[s] - old[s], clipped = std::clamp(x, -options_.epsilon_low, options_.epsilon_high);
          sum += mask_[s] * (advantages_[s] > 0 ? std::min(x, clipped) : std::max(x, clipped));
        }
        return -std::exp(sum / n_) * a;
      }
      case Surrogate::kReinforce:
        return -a * live[t];
    }
    return 0;
  }

  double Kl(double d) const {
    if (options_.kl_log_ratio_clamp) d = std::clamp(d, -*options_.kl_log_ratio_clamp, *options_.kl_log_ratio_clamp);
    double value = -d;
    if (options_.kl_estimator == KlEstimator::kK2) value = d * d / 2;
    if (options_.kl_estimator == KlEstimator::kK3) value = std::exp(d) - d - 1;
    return options_.kl_output_clamp ? std::clamp(value, -*options_.kl_output_clamp, *options_.kl_output_clamp) : value;
  }

  const LossOptions& options_;
  const StepTotals& totals_;
  const LossStep& step_;
  std::size_t i_;
  std::vector<double> mask_, advantages_;
  double n_ = 1;
};

double NaiveWeight(const LossOptions& options, double num_sequences, double num_tokens, double n, double micro_batch_tokens,
                   double num_micro_batches) {
  switch (options.aggregation) {
    case Aggregation::kSequenceMean:
      return 1 / (num_sequences * std::max(1.0, n));
    case Aggregation::kTokenMean:
      return 1 / std::max(1.0, num_tokens);
    case Aggregation::kMicroBatchTokenMean:
      return 1 / (num_micro_batches * std::max(1.0, micro_batch_tokens));
    case Aggregation::kConstant:
      return 1 / (num_sequences * options.max_completion_length);
    case Aggregation::kSequenceSum:
      return 1 / num_sequences;
  }
  return 0;
}

double EntropyBonus(const RandomStep& random, const std::vector<NaiveSequence>& naive, const StepTotals& totals) {
  double sum = 0, count = 0;
  for (std::size_t i = 0; i < naive.size(); ++i) {
    for (std::size_t t = 0; t < naive[i].mask().size(); ++t) {
      const double h = random.step.entropies[i][t];
      const bool counts = random.step.loss.top_entropy_quantile >= 1 || h >= totals.entropy_threshold;
      if (naive[i].mask()[t] == 0 || !counts) continue;
      sum += h;
      count += 1;
    }
  }
  return random.step.loss.entropy_coefficient * sum / std::max(1.0, count);
}

void CheckAgainstNaive(const RandomStep& random) {
  const LossStep& step = random.step;
  const auto result = EvaluateStep(step, random.advantages);
  ASSERT_TRUE(result.ok()) << result.status();
  const std::vector<LossSequence> sequences = Sequences(step, random.advantages);
  const StepTotals totals = ComputeStepTotals(step.loss, sequences, static_cast<int>(step.micro_batches.size()));

  std::vector<NaiveSequence> naive;
  double num_sequences = 0, num_tokens = 0;
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    naive.emplace_back(random, totals, i);
    num_tokens += naive[i].num_trained();
    num_sequences += step.loss.count_empty_sequences || naive[i].num_trained() > 0 ? 1 : 0;
  }
  const double gradient_scale = [&] {
    double largest = 1e-12;
    for (const auto& row : result->grad_logprobs) {
      for (const double value : row) largest = std::max(largest, std::abs(value));
    }
    return largest;
  }();

  double loss = -EntropyBonus(random, naive, totals);
  for (const auto& micro_batch : step.micro_batches) {
    double micro_batch_tokens = 0;
    for (const std::size_t i : micro_batch) micro_batch_tokens += naive[i].num_trained();
    for (const std::size_t i : micro_batch) {
      const double weight = NaiveWeight(step.loss, std::max(1.0, num_sequences), num_tokens, naive[i].num_trained(),
                                        micro_batch_tokens, static_cast<double>(step.micro_batches.size()));
      std::vector<double> live = step.policy_logprobs[i];
      loss += naive[i].Loss(live, weight);
      for (std::size_t t = 0; t < live.size(); ++t) {
        const double centre = live[t], exact = result->grad_logprobs[i][t];
        double error = 1e300;
        for (const double h : {1e-5, 1e-6}) {
          live[t] = centre + h;
          const double above = naive[i].Loss(live, weight);
          live[t] = centre - h;
          const double below = naive[i].Loss(live, weight);
          error = std::min(error, std::abs((above - below) / (2 * h) - exact));
        }
        live[t] = centre;
        EXPECT_LE(error, 2e-5 * std::max(std::abs(exact), 1e-2 * gradient_scale)) << "sequence " << i << " token " << t;
      }
    }
  }
  EXPECT_NEAR(result->loss, loss, 1e-12 * std::max(1.0, std::abs(loss)));
}

std::string Describe(const RandomStep& random, unsigned seed) {
  const LossOptions& o = random.step.loss;
  return absl::StrCat("seed ", seed, ", surrogate ", static_cast<int>(o.surrogate), ", level ", static_cast<int>(o.ratio_level),
                      ", aggregation ", static_cast<int>(o.aggregation), ", correction ", static_cast<int>(o.rollout_correction));
}

template <typename Check>
void ForEveryRecipe(int num_seeds, Check check) {
  unsigned seed = 100;
  for (const Surrogate surrogate : kSurrogates) {
    for (const RatioLevel level : kLevels) {
      for (const Aggregation aggregation : kAggregations) {
        for (int i = 0; i < num_seeds; ++i) {
          const RandomStep random = MakeStep(surrogate, level, aggregation, ++seed);
          SCOPED_TRACE(Describe(random, seed));
          check(random, seed);
          if (::testing::Test::HasFailure()) return;
        }
      }
    }
  }
}

TEST(LossPropertiesTest, LossAndGradientMatchFiniteDifferencesOfTheNaiveObjectiveOnAllAxes) {
  ForEveryRecipe(6, [](const RandomStep& random, unsigned) { CheckAgainstNaive(random); });
}

// CASES C18
TEST(LossPropertiesTest, GradientDoesNotDependOnSplitOrOrder) {
  ForEveryRecipe(2, [](const RandomStep& random, unsigned seed) {
    if (random.step.loss.aggregation == Aggregation::kMicroBatchTokenMean) return;
    const auto whole = EvaluateStep(random.step, random.advantages);
    ASSERT_TRUE(whole.ok()) << whole.status();
    for (const std::size_t num_parts : {1u, 2u, 7u}) {
      LossStep step = random.step;
      std::vector<std::size_t> order(step.policy_logprobs.size());
      std::iota(order.begin(), order.end(), 0);
      std::ranges::shuffle(order, Random(seed).engine());
      step.micro_batches.assign(num_parts, {});
      for (std::size_t k = 0; k < order.size(); ++k) step.micro_batches[k % num_parts].push_back(order[k]);
      const auto split = EvaluateStep(step, random.advantages);
      ASSERT_TRUE(split.ok()) << split.status();
      EXPECT_NEAR(split->loss, whole->loss, 1e-12 * std::max(1.0, std::abs(whole->loss)));
      EXPECT_EQ(split->grad_logprobs, whole->grad_logprobs);
      EXPECT_EQ(split->grad_entropies, whole->grad_entropies);
      EXPECT_NEAR(split->metrics.ratio_sum, whole->metrics.ratio_sum, 1e-10);
      EXPECT_EQ(split->metrics.token_count, whole->metrics.token_count);
      EXPECT_EQ(split->metrics.rollout_weight_min, whole->metrics.rollout_weight_min);
      EXPECT_EQ(split->metrics.rollout_ratio_histogram, whole->metrics.rollout_ratio_histogram);
    }
  });
}

TEST(LossPropertiesTest, EntropyGradientMatchesFiniteDifferences) {
  int num_checked = 0;
  ForEveryRecipe(2, [&](const RandomStep& random, unsigned) {
    if (random.step.loss.entropy_coefficient == 0) return;
    LossStep step = random.step;
    const StepTotals totals = ComputeStepTotals(step.loss, Sequences(step, random.advantages), 1);
    const auto evaluate = [&] { return EvaluateLoss(step.loss, totals, Sequences(step, random.advantages)); };
    const auto centre = evaluate();
    ASSERT_TRUE(centre.ok()) << centre.status();
    for (const std::size_t i : {0u, 3u, 8u}) {
      for (std::size_t t = 0; t < step.entropies[i].size(); ++t) {
        const double h = 1e-4, value = step.entropies[i][t];
        if (std::abs(value - totals.entropy_threshold) < 2 * h) continue;
        step.entropies[i][t] = value + h;
        const double above = evaluate()->loss;
        step.entropies[i][t] = value - h;
        const double below = evaluate()->loss;
        step.entropies[i][t] = value;
        EXPECT_NEAR(centre->grad_entropies[i][t], (above - below) / (2 * h), 1e-9);
        ++num_checked;
      }
    }
  });
  EXPECT_GT(num_checked, 500);
}

}  // namespace
}  // namespace tandem
