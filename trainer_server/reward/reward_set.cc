#include "trainer_server/reward/reward_set.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "absl/strings/str_join.h"
#include "trainer_server/reward/spread.h"

namespace tandem {
namespace {

absl::Status CheckCount(std::size_t count) {
  if (count >= 1 && count <= RewardSet::kMaxFunctions) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("rewards: ", count, " functions, must be 1 to ", RewardSet::kMaxFunctions));
}

}  // namespace

RewardSet::RewardSet(std::vector<std::unique_ptr<RewardFunction>> functions) : functions_(std::move(functions)) {
  for (const auto& function : functions_) {
    names_.push_back(function->name());
    weights_.push_back(function->weight());
  }
}

absl::StatusOr<RewardSet> RewardSet::Create(const google::protobuf::RepeatedPtrField<v1::RewardConfig>& configs) {
  TANDEM_RETURN_IF_ERROR(CheckCount(static_cast<std::size_t>(configs.size())));
  std::vector<std::unique_ptr<RewardFunction>> functions;
  std::vector<std::string> faults;
  std::set<std::string> names;
  for (int i = 0; i < configs.size(); ++i) {
    auto function = MakeRewardFunction(configs[i], absl::StrCat("rewards[", i, "]."));
    if (!function.ok()) {
      faults.emplace_back(function.status().message());
      continue;
    }
    if (!names.insert((*function)->name()).second) {
      faults.push_back(absl::StrCat("rewards[", i, "].name: '", (*function)->name(), "' names another function already"));
    }
    functions.push_back(*std::move(function));
  }
  if (!faults.empty()) return absl::InvalidArgumentError(absl::StrJoin(faults, "\n"));
  return RewardSet(std::move(functions));
}

absl::StatusOr<RewardSet> RewardSet::Create(std::vector<std::unique_ptr<RewardFunction>> functions) {
  TANDEM_RETURN_IF_ERROR(CheckCount(functions.size()));
  std::set<std::string> names;
  for (const auto& function : functions) {
    if (!names.insert(function->name()).second) {
      return absl::InvalidArgumentError(absl::StrCat("rewards: '", function->name(), "' names two functions"));
    }
  }
  return RewardSet(std::move(functions));
}

absl::StatusOr<RewardTable> RewardSet::Score(std::span<const RewardInput> completions) const {
  RewardTable table;
  for (std::size_t i = 0; i < completions.size(); ++i) {
    std::vector<std::optional<double>> row;
    for (const auto& function : functions_) {
      const auto reward = function->Score(completions[i]);
      if (!reward.ok()) return Annotate(reward.status(), absl::StrCat("scoring completion ", i));
      if (reward->has_value() && !std::isfinite(**reward)) {
        return absl::InvalidArgumentError(absl::StrCat("reward function '", function->name(), "' gave completion ", i,
                                                       " the value ", **reward, ", must be finite"));
      }
      row.push_back(*reward);
    }
    table.push_back(std::move(row));
  }
  return table;
}

absl::StatusOr<std::vector<RewardMetrics>> RewardSet::Summarize(std::span<const std::vector<std::optional<double>>> table) const {
  for (std::size_t i = 0; i < table.size(); ++i) {
    if (table[i].size() != size()) {
      return absl::InvalidArgumentError(absl::StrCat("rewards: completion ", i, " has ", table[i].size(), " values, expected ",
                                                     size(), ", one of each of ", absl::StrJoin(names_, ", ")));
    }
  }
  std::vector<RewardMetrics> metrics;
  for (std::size_t k = 0; k < size(); ++k) {
    std::vector<double> values;
    for (const auto& row : table) {
      if (row[k].has_value()) values.push_back(*row[k]);
    }
    const Spread spread = ComputeSpread(values);
    metrics.push_back({.name = names_[k], .mean = spread.mean, .std = spread.std, .num_applied = values.size()});
  }
  return metrics;
}

std::vector<std::string> RewardSet::required_fields() const {
  std::set<std::string> fields;
  for (const auto& function : functions_) {
    for (const std::string& field : function->required_fields()) fields.insert(field);
  }
  return {fields.begin(), fields.end()};
}

}  // namespace tandem
