// A job's memory by owner in both phases, before a byte of it is taken, and the longest context that a node holds. Formulas:
// docs/memory.md. Pure functions over sizes; thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/gpu/device.h"
#include "common/model/weight_layout.h"
#include "proto/job.pb.h"
#include "proto/rollout.pb.h"
#include "trainer_server/policy/fused_attention.h"

namespace tandem {

// The node that a job comes to.
struct NodeMemory {
  Device device = Device::kCpu;
  StorageFormat weight_format = StorageFormat::kFp32;
  AttentionOptions attention;  // of the trainer on a GPU
  // The pool's regions.
  std::uint64_t weights_bytes = 0;
  std::uint64_t model_bytes = 0;
  std::uint64_t rollout_standing_bytes = 0;
  std::uint64_t trainer_standing_bytes = 0;
  std::uint64_t elastic_bytes = 0;
  std::vector<v1::OwnedBytes> trainer_fixed;  // of the trainer's standing region, whatever the job
  std::uint64_t outside_bytes = 0;            // device memory that is used and not the pool
  std::uint64_t host_limit_bytes = 0;         // that layer inputs may take of the host's; 0 on the CPU: they stay in the pool
  v1::RolloutMemory rollout;                  // as the server says
  bool is_rollout_assumed = false;            // it was never heard; see AssumedRolloutMemory

  std::uint64_t pool_bytes() const {
    return weights_bytes + model_bytes + rollout_standing_bytes + trainer_standing_bytes + elastic_bytes;
  }
};

// Of a rollout server that was not heard yet: its flags' defaults.
v1::RolloutMemory AssumedRolloutMemory(const ModelConfig& model, Device device);

// What of a job decides its memory and its time.
struct JobMemory {
  int rank = 0;
  std::uint64_t adapter_bytes = 0;     // AdapterLayout::total_bytes
  bool has_reference_adapter = false;  // one that the job starts from, or that moves; else the reference is the base model
  bool has_dropout = false;
  std::uint64_t prompts_per_step = 1;
  std::uint64_t group_size = 1;
  std::uint64_t shortest_prompt_tokens = 1;  // 0: prompts are scored too
  std::uint64_t longest_prompt_tokens = 1;
  std::uint64_t longest_evaluation_prompt_tokens = 0;  // drawn from, never trained on
  std::uint64_t max_completion_tokens = 1;             // further turns with it
  std::uint64_t further_tokens = 0;                    // of those turns
  std::uint64_t micro_batch_tokens = 0;                // see MicroBatchLimit
  std::uint64_t logit_chunk = 0;                       // rows of one head tile; 0: chosen
  std::uint64_t updates_per_rollout = 1;
  std::uint64_t scoring_passes = 0;  // of a step, beside the updates
  std::uint64_t live_sequences = 0;  // asked for; 0: as many as the rollout server runs
};

struct PlannedMemory {
  v1::MemoryPlan figures;
  std::vector<std::string> faults;  // why this node does not hold the job: field, value, limit, largest context that fits
  std::vector<std::string> warnings;
};
PlannedMemory PlanMemory(const ModelConfig& model, const JobMemory& job, const NodeMemory& node);

// Rows of a micro-batch that holds a whole group of full length, so that its prompt is computed once. 0: what MicroBatchLimit
// gives a job that leaves the choice open serves as well, prompts computed again are less than an eighth of the rows.
std::uint64_t RowsOfWholeGroup(const JobMemory& job);

// Planned bytes of `owner`, the larger of the two phases; 0: not in the plan.
std::uint64_t PlannedOf(const v1::MemoryPlan& plan, const std::string& owner);

}  // namespace tandem
