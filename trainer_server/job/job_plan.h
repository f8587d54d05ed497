// A job file, read and checked as a whole: every fault at once, each with field, value and limit. What passes is everything the
// loop needs, as plain options, and the memory that it takes of this node. Reads the data set and asks the node; thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/model/prompt_encoder.h"
#include "common/model/weight_layout.h"
#include "proto/job.pb.h"
#include "trainer_server/advantage/advantage.h"
#include "trainer_server/job/content_store.h"
#include "trainer_server/job/job_store.h"
#include "trainer_server/loss/loss.h"
#include "trainer_server/optim/adamw.h"
#include "trainer_server/optim/learning_rate.h"
#include "trainer_server/plan/memory_plan.h"
#include "trainer_server/policy/policy_model.h"
#include "trainer_server/prompt/data_set.h"
#include "trainer_server/prompt/row_selection.h"
#include "trainer_server/reward/reward_set.h"

namespace tandem {

// What a job is checked against.
struct JobSurroundings {
  ModelConfig model;
  std::shared_ptr<const PromptEncoder> encoder;
  const ContentStore* content = nullptr;
  std::function<NodeMemory()> node_memory;  // as it is now
  SandboxSource* sandbox = nullptr;         // of rewards
  // A job by its id, or by its name the newest of whoever submits this one; empty: there are no others.
  std::function<absl::StatusOr<StoredJob>(const std::string& id_or_name)> find_job = {};
};

// In tokens, of the prompts that were encoded.
struct PromptLengths {
  std::uint64_t shortest = 0;
  std::uint64_t longest = 0;
  std::uint64_t most_further = 0;  // behind the first turn of a conversation: what is said, and the model's other turns
};

struct JobPlan {
  v1::JobSpec spec;  // defaults filled in
  std::vector<std::string> warnings;
  std::shared_ptr<const DataSet> data;
  RowSelection rows;                          // of data
  std::shared_ptr<const DataSet> evaluation;  // null: none; data itself where its rows are held out
  RowIndices evaluation_rows;                 // of evaluation
  std::optional<RewardSet> rewards;
  LossOptions loss;
  AdvantageOptions advantage;
  AdamWOptions adamw;
  LearningRateOptions learning_rate;
  PolicyOptions policy;
  AdapterLayout layout;
  std::uint64_t steps_per_epoch = 0;
  std::optional<PromptLengths> prompts, evaluation_prompts;
  JobMemory needs;       // with `memory`: of MeasureMemory
  PlannedMemory memory;  // its faults are no errors: see CheckMemory
};

inline constexpr std::size_t kMaxJobTextBytes = 256 << 10;
inline constexpr int kMaxAfter = 16;
// When a job is submitted, the prompts of so many first rows are encoded, and those of so many of the longest lines beyond; the
// others are checked when they are drawn.
inline constexpr std::size_t kMaxEncodedRows = 4096;
inline constexpr std::size_t kMaxEncodedLongRows = 256;

// kSubmitted: rows are checked too, and the jobs that it comes after, whose ids take the place of their names. kStored: they
// were, and content does not change under its address. kSettings: the data set is not looked at, and the plan has none.
enum class JobOrigin { kSubmitted, kStored, kSettings };

// Errors: INVALID_ARGUMENT listing every fault, one a line; RESOURCE_EXHAUSTED (text longer than kMaxJobTextBytes).
absl::StatusOr<JobPlan> PlanJob(const std::string& job_text, const JobSurroundings& surroundings, JobOrigin origin);

// The job as it runs, recipe and defaults filled in: what is stored with it. It plans to itself. Errors: RESOURCE_EXHAUSTED
// (longer than kMaxJobTextBytes).
absl::StatusOr<std::string> JobText(const JobPlan& plan);

// Fills `needs`, but for its live_sequences, and `memory` of a plan from PlanJob. `node`: as surroundings.node_memory() tells it.
// Errors: those of reading and encoding a row.
absl::Status MeasureMemory(const JobSurroundings& surroundings, const NodeMemory& node, JobPlan* plan);
// Where the job leaves its micro-batches open and its groups' prompts are worth it: whole groups, if the node has memory for
// them. It is chosen when a job is submitted and stored with it, so that its bits do not depend on the node's memory later.
// Requires: MeasureMemory.
void KeepGroupsWhole(const JobSurroundings& surroundings, const NodeMemory& node, JobPlan* plan);
// Errors: RESOURCE_EXHAUSTED listing every reason why the node does not hold the job, one a line.
absl::Status CheckMemory(const PlannedMemory& memory);

}  // namespace tandem
