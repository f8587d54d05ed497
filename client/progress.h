// A running job as a person follows it: one line a step, a bar for the reward's moving mean, and the time left.
#pragma once

#include <deque>
#include <optional>
#include <string>

#include "proto/job.pb.h"

namespace tandem {

// "1m 05s", "2h 03m", "12s".
std::string FormatDuration(double seconds);

std::optional<double> ValueOf(const v1::StepMetrics& metrics, const std::string& name);

// Confined to one thread.
class ProgressPrinter {
 public:
  // The line for one step: step, reward (mean of the last five steps beside it), rewards by function, length, KL, tokens/s, time
  // left.
  std::string StepLine(const v1::StepMetrics& metrics, std::uint32_t num_steps);
  static std::string EvaluationLine(const v1::EvaluationMetrics& metrics);

 private:
  std::deque<double> recent_rewards_;
};

}  // namespace tandem
