#include "trainer_server/reward/reward_set.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "absl/strings/str_join.h"
#include "trainer_server/reward/reward_functions.h"
#include "trainer_server/reward/spread.h"

namespace tandem {
namespace {

absl::Status CheckCount(std::size_t count) {
  if (count >= 1 && count <= RewardSet::kMaxFunctions) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("rewards: ", count, " functions, must be 1 to ", RewardSet::kMaxFunctions));
}

// Functions tell what they were told by programs, cut where it was too long.
absl::Status Printable(const absl::Status& status) {
  return absl::Status(status.code(), ToValidUtf8(std::string(status.message())));
}

}  // namespace

RewardSet::RewardSet(std::vector<std::unique_ptr<RewardFunction>> functions) : functions_(std::move(functions)) {
  for (const auto& function : functions_) {
    names_.push_back(function->name());
    weights_.push_back(function->weight());
  }
}

absl::StatusOr<RewardSet> RewardSet::Create(const google::protobuf::RepeatedPtrField<v1::RewardConfig>& configs,
                                            const RewardSurroundings& surroundings) {
  TANDEM_RETURN_IF_ERROR(CheckCount(static_cast<std::size_t>(configs.size())));
  std::vector<std::unique_ptr<RewardFunction>> functions;
  std::vector<std::string> faults;
  std::set<std::string> names;
  for (int i = 0; i < configs.size(); ++i) {
    auto function = MakeRewardFunction(configs[i], absl::StrCat("rewards[", i, "]."), surroundings);
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

absl::StatusOr<RewardTable> RewardSet::Score(std::span<const RewardInput> completions, const RewardCall& call) const {
  RewardTable table(completions.size(), std::vector<std::optional<double>>(size()));
  if (completions.empty()) return table;
  for (std::size_t k = 0; k < size(); ++k) {
    const absl::StatusOr<RewardColumn> scored = functions_[k]->Score(completions, call);
    if (!scored.ok()) return Printable(scored.status());
    const RewardColumn& rewards = *scored;
    if (rewards.size() != completions.size()) {
      return absl::InvalidArgumentError(absl::StrCat("reward function '", names_[k], "' gave ", rewards.size(), " values for ",
                                                     completions.size(), " completions"));
    }
    for (std::size_t i = 0; i < completions.size(); ++i) {
      if (rewards[i].has_value() && !std::isfinite(*rewards[i])) {
        return absl::InvalidArgumentError(absl::StrCat("reward function '", names_[k], "' gave completion ", i, " the value ",
                                                       *rewards[i], ", must be finite"));
      }
      table[i][k] = rewards[i];
    }
  }
  return table;
}

absl::Status RewardSet::Check() const {
  std::vector<std::string> faults;
  bool is_lacking = false;
  for (std::size_t k = 0; k < size(); ++k) {
    const absl::Status checked = functions_[k]->Check();
    if (checked.ok()) continue;
    is_lacking = is_lacking || absl::IsFailedPrecondition(checked);
    faults.push_back(absl::StrCat("rewards[", k, "] '", names_[k], "': ", checked.message()));
  }
  if (faults.empty()) return absl::OkStatus();
  const std::string text = ToValidUtf8(absl::StrJoin(faults, "\n"));
  return is_lacking ? absl::FailedPreconditionError(text) : absl::InvalidArgumentError(text);
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
