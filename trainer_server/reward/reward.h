// Reward functions: those that ship with Tandem, and the ways to others: Python functions and programs in the sandbox, remote
// services. A function scores the completions of one prompt against its data set row. Thread-safe.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/base/status.h"
#include "nlohmann/json.hpp"
#include "proto/job.pb.h"
#include "trainer_server/sandbox/sandbox.h"

namespace tandem {

struct RewardInput {
  const nlohmann::json* row = nullptr;  // the data set row, all fields
  std::string completion;               // text without end token
  int completion_tokens = 0;
  bool is_truncated = false;  // ended by the token limit
  std::vector<std::uint32_t> token_ids = {};
};

// A failure that the function's policy counts as None.
struct RewardFailure {
  std::string function;  // name in logs
  std::string text;
};

// Around one call. All may be called on any thread.
struct RewardCall {
  std::uint64_t step = 0, num_steps = 0;
  std::function<bool()> is_interrupted = {};                          // the trainer stops; may be empty
  std::function<void(const RewardFailure& failure)> on_failure = {};  // may be empty
};

// [completion]; nullopt: the function did not apply.
using RewardColumn = std::vector<std::optional<double>>;

class RewardFunction {
 public:
  virtual ~RewardFunction() = default;
  virtual const std::string& name() const = 0;
  virtual double weight() const = 0;
  // nullopt: the function does not apply to this row (a field it needs is null). Blocks for as long as the function's limits
  // allow. Errors: INVALID_ARGUMENT naming function, row field and completion; ABORTED (a call failed for good); CANCELLED
  // (interrupted). Requires: one row in all inputs.
  virtual absl::StatusOr<RewardColumn> Score(std::span<const RewardInput> completions, const RewardCall& call) const = 0;
  // Fields a row must have, checked when a job is submitted.
  virtual std::vector<std::string> required_fields() const = 0;
  // That the function can be called here, asked when a job is submitted. Errors: FAILED_PRECONDITION (what this node lacks),
  // INVALID_ARGUMENT (what is wrong with the function).
  virtual absl::Status Check() const { return absl::OkStatus(); }
};

class PythonWorkerPools;

// What functions outside of this process need.
struct RewardSurroundings {
  SandboxSource* sandbox = nullptr;
  std::function<absl::StatusOr<std::string>(const std::string& sha256)> path_of_content;
  v1::DataConfig data;                              // which field of a row is the prompt
  std::shared_ptr<PythonWorkerPools> worker_pools;  // of this job; functions of one file share workers
};

// Puts a function's own defaults where a field is not set.
void FillRewardDefaults(v1::RewardConfig* config);

// Errors: INVALID_ARGUMENT listing every faulty field, one a line, each begun with `field_path` ("rewards[1].").
absl::StatusOr<std::unique_ptr<RewardFunction>> MakeRewardFunction(const v1::RewardConfig& config, const std::string& field_path,
                                                                   const RewardSurroundings& surroundings = {});

}  // namespace tandem
