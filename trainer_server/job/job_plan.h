// A job file, read and checked as a whole: every fault at once, each with field, value and limit. What passes is everything the
// loop needs, as plain options. Pure but for reading the data set; thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/model/prompt_encoder.h"
#include "common/model/weight_layout.h"
#include "proto/job.pb.h"
#include "trainer_server/advantage/advantage.h"
#include "trainer_server/job/content_store.h"
#include "trainer_server/loss/loss.h"
#include "trainer_server/optim/adamw.h"
#include "trainer_server/optim/learning_rate.h"
#include "trainer_server/policy/policy_model.h"
#include "trainer_server/prompt/data_set.h"
#include "trainer_server/reward/reward_set.h"

namespace tandem {

// What a job is checked against.
struct JobSurroundings {
  ModelConfig model;
  std::shared_ptr<const PromptEncoder> encoder;
  const ContentStore* content = nullptr;
  std::uint64_t standing_bytes = 0;  // of the trainer's standing region
};

struct JobPlan {
  v1::JobSpec spec;  // defaults filled in
  std::vector<std::string> warnings;
  std::shared_ptr<const DataSet> data;
  std::shared_ptr<const DataSet> evaluation;  // null: none
  std::optional<RewardSet> rewards;
  LossOptions loss;
  AdvantageOptions advantage;
  AdamWOptions adamw;
  LearningRateOptions learning_rate;
  PolicyOptions policy;
  AdapterLayout layout;
  std::uint64_t steps_per_epoch = 0;
};

inline constexpr std::size_t kMaxJobTextBytes = 256 << 10;
// Prompts of at most this many rows are encoded when a job is submitted; further ones are checked when they are drawn.
inline constexpr std::size_t kMaxEncodedRows = 4096;

// kSubmitted: rows are checked too. kStored: they were, and content does not change under its address.
enum class JobOrigin { kSubmitted, kStored };

// Errors: INVALID_ARGUMENT listing every fault, one a line; RESOURCE_EXHAUSTED (text longer than kMaxJobTextBytes).
absl::StatusOr<JobPlan> PlanJob(const std::string& job_text, const JobSurroundings& surroundings, JobOrigin origin);

}  // namespace tandem
