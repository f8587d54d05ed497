// All reward functions of a job: scores the completions of a group, each function logged apart. Between rollout and advantage in
// the loop. Immutable after Create; thread-safe.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "trainer_server/reward/reward.h"

namespace tandem {

// [completion][function]; nullopt: the function did not apply.
using RewardTable = std::vector<std::vector<std::optional<double>>>;

// One function's values over the completions that it applied to.
struct RewardMetrics {
  std::string name;
  double mean = 0;
  double std = 0;  // sample, ddof 1; 0 below two values
  std::size_t num_applied = 0;
};

class RewardSet {
 public:
  static constexpr int kMaxFunctions = 32;

  // Errors: INVALID_ARGUMENT listing every fault of every function (paths begin with "rewards[i]."), a name used twice, or a
  // count outside 1 to kMaxFunctions.
  static absl::StatusOr<RewardSet> Create(const google::protobuf::RepeatedPtrField<v1::RewardConfig>& configs,
                                          const RewardSurroundings& surroundings = {});
  // Errors: INVALID_ARGUMENT, as above without the faults of single functions.
  static absl::StatusOr<RewardSet> Create(std::vector<std::unique_ptr<RewardFunction>> functions);

  // The completions of one prompt. Blocks for as long as the functions' limits allow. Errors: naming function and completion,
  // those of the functions; INVALID_ARGUMENT when a reward is not finite.
  absl::StatusOr<RewardTable> Score(std::span<const RewardInput> completions, const RewardCall& call = {}) const;
  // That each function can be called here. Errors: every fault, one a line, each begun with "rewards[i]"; FAILED_PRECONDITION
  // where this node lacks something, else INVALID_ARGUMENT.
  absl::Status Check() const;
  // Errors: INVALID_ARGUMENT when a row of the table does not have one entry a function; nothing is broadcast.
  absl::StatusOr<std::vector<RewardMetrics>> Summarize(std::span<const std::vector<std::optional<double>>> table) const;

  std::size_t size() const { return functions_.size(); }
  const std::vector<std::string>& names() const { return names_; }  // in the order of the job file
  const std::vector<double>& weights() const { return weights_; }
  // Fields that a data set row must have, each once.
  std::vector<std::string> required_fields() const;

 private:
  explicit RewardSet(std::vector<std::unique_ptr<RewardFunction>> functions);

  std::vector<std::unique_ptr<RewardFunction>> functions_;
  std::vector<std::string> names_;
  std::vector<double> weights_;
};

}  // namespace tandem
