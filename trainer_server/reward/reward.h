// Reward functions that ship with Tandem. A function scores one completion against its data set row; it is pure and thread-safe.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/base/status.h"
#include "nlohmann/json.hpp"
#include "proto/job.pb.h"

namespace tandem {

struct RewardInput {
  const nlohmann::json* row = nullptr;  // the data set row, all fields
  std::string completion;               // text without end token
  int completion_tokens = 0;
  bool is_truncated = false;  // ended by the token limit
};

class RewardFunction {
 public:
  virtual ~RewardFunction() = default;
  virtual const std::string& name() const = 0;
  virtual double weight() const = 0;
  // nullopt: the function does not apply to this row (a field it needs is null). Errors: INVALID_ARGUMENT naming function, row
  // field.
  virtual absl::StatusOr<std::optional<double>> Score(const RewardInput& input) const = 0;
  // Fields a row must have, checked when a job is submitted.
  virtual std::vector<std::string> required_fields() const = 0;
};

// Errors: INVALID_ARGUMENT listing every faulty field, one a line, each begun with `field_path` ("rewards[1].").
absl::StatusOr<std::unique_ptr<RewardFunction>> MakeRewardFunction(const v1::RewardConfig& config, const std::string& field_path);

}  // namespace tandem
