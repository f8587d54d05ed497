// What a step leaves behind: its figures in the history and its completions, under the names that docs/metrics.md tells. Pure;
// thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/model/tokenizer.h"
#include "proto/job.pb.h"
#include "trainer_server/checkpoint/checkpoint_store.h"
#include "trainer_server/job/history.h"
#include "trainer_server/job/job_plan.h"
#include "trainer_server/reward/reward_set.h"
#include "trainer_server/step/step_driver.h"

namespace tandem {

// A step's groups as they are trained on, and what was drawn for them.
struct DrawnStep {
  std::vector<ScoredGroup> groups;
  std::uint64_t num_prompts = 0;  // drawn
  std::uint64_t num_rounds = 0;
  std::uint64_t completion_tokens = 0;  // drawn
  std::size_t num_flat = 0;             // groups drawn whose rewards are all equal
  std::vector<double> drawn_totals;     // weighted rewards of all completions drawn
  double rollout_seconds = 0, reward_seconds = 0;
};

// `state`: of the boundary after the step. `num_rows`: of the data set.
NamedValues StepValues(const JobPlan& plan, const CheckpointState& state, std::size_t num_rows, const DrawnStep& drawn,
                       const std::vector<RewardMetrics>& functions, const StepReport& report);
// In the order of groups and members; texts are cut at the lengths that CompletionRecord has.
std::vector<v1::CompletionRecord> CompletionRecords(std::uint64_t step, const RewardSet& rewards, const Tokenizer& tokenizer,
                                                    const std::vector<ScoredGroup>& groups, const StepReport& report);
// Appends mean, least and largest under TRL's names.
void AppendLengths(const std::string& suffix, const std::vector<double>& lengths, NamedValues* values);
double Mean(const std::vector<double>& values);  // of none: 0

}  // namespace tandem
