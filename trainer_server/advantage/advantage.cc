#include "trainer_server/advantage/advantage.h"

#include <algorithm>
#include <cmath>

namespace tandem {
namespace {

// [begin, end) of sequences.
struct Group {
  std::size_t begin = 0;
  std::size_t end = 0;
};

std::vector<Group> GroupsOf(std::size_t num_sequences, std::size_t group_size) {
  std::vector<Group> groups;
  for (std::size_t begin = 0; begin < num_sequences; begin += group_size) groups.push_back({begin, begin + group_size});
  return groups;
}

using Values = std::vector<std::optional<double>>;

std::vector<double> Present(const Values& values, Group range) {
  std::vector<double> present;
  for (std::size_t i = range.begin; i < range.end; ++i) {
    if (values[i].has_value()) present.push_back(*values[i]);
  }
  return present;
}

// (v - mean over `range`) / (std + epsilon), written into `out`; 0 where either needs two values and has fewer, or all are equal.
void Normalize(const Values& values, Group range, const Spread& scale, double epsilon, Values* out) {
  const Spread spread = ComputeSpread(Present(values, range));
  for (std::size_t i = range.begin; i < range.end; ++i) {
    if (!values[i].has_value()) continue;
    const double centred = *values[i] - spread.mean;
    const bool is_flat = spread.count < 2 || scale.count < 2 || centred == 0;
    (*out)[i] = is_flat ? 0 : centred / (scale.std + epsilon);
  }
}

std::vector<double> OrZero(const Values& values) {
  std::vector<double> result;
  for (const auto& value : values) result.push_back(value.value_or(0));
  return result;
}

std::vector<double> NormalizeThenSum(const AdvantageOptions& options, std::span<const AdvantageSequence> sequences,
                                     const std::vector<Group>& groups) {
  const std::size_t num_functions = sequences[0].rewards.size();
  std::vector<Values> normalized(sequences.size(), Values(num_functions));
  for (std::size_t k = 0; k < num_functions; ++k) {
    Values column(sequences.size()), out(sequences.size());
    for (std::size_t i = 0; i < sequences.size(); ++i) column[i] = sequences[i].rewards[k];
    for (const Group& group : groups) { Normalize(column, group, ComputeSpread(Present(column, group)), options.epsilon, &out); }
    for (std::size_t i = 0; i < sequences.size(); ++i) normalized[i][k] = out[i];
  }
  Values total(sequences.size()), out(sequences.size());
  for (std::size_t i = 0; i < sequences.size(); ++i) total[i] = WeightedReward(normalized[i], options.weights);
  const Group all{0, sequences.size()};
  Normalize(total, all, ComputeSpread(Present(total, all)), options.epsilon, &out);
  return OrZero(out);
}

std::vector<double> GroupAdvantages(const AdvantageOptions& options, const Values& rewards, const std::vector<Group>& groups) {
  Values out(rewards.size());
  const Spread batch = ComputeSpread(Present(rewards, {0, rewards.size()}));
  for (const Group& group : groups) {
    const Spread spread = ComputeSpread(Present(rewards, group));
    if (options.scale != AdvantageScale::kNone) {
      Normalize(rewards, group, options.scale == AdvantageScale::kBatch ? batch : spread, options.epsilon, &out);
      continue;
    }
    for (std::size_t i = group.begin; i < group.end; ++i) {
      if (rewards[i].has_value()) out[i] = *rewards[i] - spread.mean;
    }
  }
  return OrZero(out);
}

// k1 of one token: coefficient x (old - ref); 0 outside the mask.
double TokenPenalty(const AdvantageOptions& options, const AdvantageSequence& sequence, std::size_t t) {
  if (options.kl_in_reward == 0 || sequence.loss_mask[t] == 0) return 0;
  return options.kl_in_reward * (sequence.old_logprobs[t] - sequence.ref_logprobs[t]);
}

std::vector<double> LeaveOneOut(const AdvantageOptions& options, std::span<const AdvantageSequence> sequences,
                                const Values& rewards, const std::vector<Group>& groups) {
  Values shaped = rewards;
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    if (!shaped[i].has_value()) continue;
    double penalty = 0;
    for (std::size_t t = 0; t < sequences[i].loss_mask.size(); ++t) penalty += TokenPenalty(options, sequences[i], t);
    *shaped[i] -= penalty;
  }
  std::vector<double> result(sequences.size(), 0);
  for (const Group& group : groups) {
    for (std::size_t i = group.begin; i < group.end; ++i) {
      if (!shaped[i].has_value()) continue;
      std::vector<double> others = Present(shaped, {group.begin, i});
      const std::vector<double> after = Present(shaped, {i + 1, group.end});
      others.insert(others.end(), after.begin(), after.end());
      const Spread spread = ComputeSpread(others);
      if (spread.count > 0) result[i] = *shaped[i] - spread.mean;
    }
  }
  return result;
}

double NumTrainedTokens(const AdvantageSequence& sequence) {
  return static_cast<double>(sequence.loss_mask.size() - std::ranges::count(sequence.loss_mask, 0));
}

std::vector<double> LengthWeighted(std::span<const AdvantageSequence> sequences, const Values& rewards,
                                   const std::vector<Group>& groups) {
  std::vector<double> result(sequences.size(), 0);
  for (const Group& group : groups) {
    double num_tokens = 0, sum = 0;
    for (std::size_t i = group.begin; i < group.end; ++i) {
      if (!rewards[i].has_value()) continue;
      num_tokens += NumTrainedTokens(sequences[i]);
      sum += NumTrainedTokens(sequences[i]) * *rewards[i];
    }
    if (num_tokens == 0) continue;
    const std::vector<double> present = Present(rewards, group);
    const auto [low, high] = std::ranges::minmax(present);
    const double baseline = low == high ? low : sum / num_tokens;
    for (std::size_t i = group.begin; i < group.end; ++i) {
      if (rewards[i].has_value()) result[i] = *rewards[i] - baseline;
    }
  }
  return result;
}

// Over the trained tokens of the sequences that have a reward: mean 0, variance 1 (ddof 1, 1e-8 inside the root); 0 elsewhere.
void Whiten(std::span<const AdvantageSequence> sequences, const Values& rewards, std::vector<std::vector<double>>* values) {
  const auto counts = [&](std::size_t i, std::size_t t) { return rewards[i].has_value() && sequences[i].loss_mask[t] != 0; };
  std::vector<double> flat;
  for (std::size_t i = 0; i < values->size(); ++i) {
    for (std::size_t t = 0; t < (*values)[i].size(); ++t) {
      if (counts(i, t)) flat.push_back((*values)[i][t]);
    }
  }
  const Spread spread = ComputeSpread(flat);
  const double scale = 1 / std::sqrt(spread.std * spread.std + 1e-8);
  for (std::size_t i = 0; i < values->size(); ++i) {
    for (std::size_t t = 0; t < (*values)[i].size(); ++t) {
      double& value = (*values)[i][t];
      value = counts(i, t) && spread.count >= 2 ? (value - spread.mean) * scale : 0;
    }
  }
}

std::vector<std::vector<double>> WhitenedReturns(const AdvantageOptions& options, std::span<const AdvantageSequence> sequences,
                                                 const Values& rewards) {
  std::vector<std::vector<double>> returns;
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    const AdvantageSequence& sequence = sequences[i];
    std::vector<double> row(sequence.loss_mask.size(), 0);
    double running = 0;
    bool is_last_seen = false;
    for (std::size_t t = row.size(); t-- > 0;) {
      const bool is_last = sequence.loss_mask[t] != 0 && !is_last_seen;
      is_last_seen |= is_last;
      running += (is_last ? rewards[i].value_or(0) : 0) - TokenPenalty(options, sequence, t);
      row[t] = running;
    }
    returns.push_back(std::move(row));
  }
  Whiten(sequences, rewards, &returns);
  return returns;
}

std::vector<std::vector<double>> WhitenedBaseline(std::span<const AdvantageSequence> sequences, const Values& rewards,
                                                  const std::vector<Group>& groups) {
  std::vector<std::vector<double>> values(sequences.size());
  for (const Group& group : groups) {
    // A group of one has no baseline: its reward stands as it is.
    const double mean = group.end - group.begin > 1 ? ComputeSpread(Present(rewards, group)).mean : 0;
    for (std::size_t i = group.begin; i < group.end; ++i) {
      values[i].assign(sequences[i].loss_mask.size(), rewards[i].value_or(mean) - mean);
    }
  }
  Whiten(sequences, rewards, &values);
  return values;
}

std::string FunctionName(const AdvantageOptions& options, std::size_t k) {
  return k < options.function_names.size() ? absl::StrCat("'", options.function_names[k], "'") : absl::StrCat(k);
}

absl::Status CheckInputs(const AdvantageOptions& options, std::span<const AdvantageSequence> sequences, int group_size) {
  if (group_size < 1 || sequences.size() % static_cast<std::size_t>(group_size) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("advantages: ", sequences.size(), " sequences do not make whole groups of ", group_size));
  }
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    const AdvantageSequence& sequence = sequences[i];
    const std::size_t expected = options.weights.empty() ? sequences[0].rewards.size() : options.weights.size();
    if (sequence.rewards.size() != expected || expected == 0) {
      return absl::InvalidArgumentError(absl::StrCat("advantages: row ", i, " has ", sequence.rewards.size(),
                                                     " rewards, expected ", expected,
                                                     ", one a reward function and at least one"));
    }
    for (std::size_t k = 0; k < expected; ++k) {
      if (sequence.rewards[k].has_value() && !std::isfinite(*sequence.rewards[k])) {
        return absl::InvalidArgumentError(absl::StrCat("advantages: reward function ", FunctionName(options, k), " gave row ", i,
                                                       " the value ", *sequence.rewards[k], ", must be finite"));
      }
    }
    if (options.kl_in_reward == 0) continue;
    const std::size_t length = sequence.loss_mask.size();
    if (sequence.old_logprobs.size() != length || sequence.ref_logprobs.size() != length) {
      return absl::InvalidArgumentError(
          absl::StrCat("advantages: kl_in_reward ", options.kl_in_reward, " needs old and reference log-probs; row ", i, " has ",
                       sequence.old_logprobs.size(), " and ", sequence.ref_logprobs.size(), " for ", length, " tokens"));
    }
    for (std::size_t t = 0; t < length; ++t) {
      if (!std::isfinite(TokenPenalty(options, sequence, t))) {
        return absl::InvalidArgumentError(absl::StrCat("advantages: row ", i, " token ", t, ": old log-prob ",
                                                       sequence.old_logprobs[t], ", reference log-prob ",
                                                       sequence.ref_logprobs[t], ", must be finite"));
      }
    }
  }
  return absl::OkStatus();
}

void DescribeRewards(const std::vector<Group>& groups, AdvantageResult* result) {
  const std::size_t count = result->rewards.size();
  const Spread spread = ComputeSpread(Present(result->rewards, {0, count}));
  result->reward_mean = spread.mean;
  result->reward_std = spread.std;
  std::size_t num_flat = 0;
  for (const Group& group : groups) {
    const Spread group_spread = ComputeSpread(Present(result->rewards, group));
    if (group_spread.std == 0) num_flat += group.end - group.begin;
    if (group_spread.count == 0) ++result->groups_dropped;
  }
  result->zero_std_fraction = count == 0 ? 0 : static_cast<double>(num_flat) / static_cast<double>(count);
}

}  // namespace

std::optional<double> WeightedReward(std::span<const std::optional<double>> rewards, std::span<const double> weights) {
  std::optional<double> sum;
  for (std::size_t k = 0; k < rewards.size(); ++k) {
    if (rewards[k].has_value()) sum = sum.value_or(0) + (weights.empty() ? 1 : weights[k]) * *rewards[k];
  }
  return sum;
}

absl::StatusOr<AdvantageResult> ComputeAdvantages(const AdvantageOptions& options, std::span<const AdvantageSequence> sequences,
                                                  int group_size) {
  TANDEM_RETURN_IF_ERROR(CheckInputs(options, sequences, group_size));
  AdvantageResult result;
  if (sequences.empty()) return result;
  const std::vector<Group> groups = GroupsOf(sequences.size(), static_cast<std::size_t>(group_size));
  for (const AdvantageSequence& sequence : sequences) {
    result.rewards.push_back(WeightedReward(sequence.rewards, options.weights));
  }
  DescribeRewards(groups, &result);

  std::vector<double> scalars;
  switch (options.estimator) {
    case AdvantageEstimator::kGroup:
      scalars = options.aggregation == RewardAggregation::kNormalizeThenSum ? NormalizeThenSum(options, sequences, groups)
                                                                            : GroupAdvantages(options, result.rewards, groups);
      break;
    case AdvantageEstimator::kRloo:
      scalars = LeaveOneOut(options, sequences, result.rewards, groups);
      break;
    case AdvantageEstimator::kOpo:
      scalars = LengthWeighted(sequences, result.rewards, groups);
      break;
    case AdvantageEstimator::kReinforcePlusPlus:
      result.advantages = WhitenedReturns(options, sequences, result.rewards);
      return result;
    case AdvantageEstimator::kReinforcePlusPlusBaseline:
      result.advantages = WhitenedBaseline(sequences, result.rewards, groups);
      return result;
  }
  for (const double value : scalars) result.advantages.push_back({value});
  return result;
}

}  // namespace tandem
