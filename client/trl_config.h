// A GRPOConfig of TRL as a job file. Pure; thread-safe.
#pragma once

#include <string>
#include <vector>

#include "common/base/status.h"
#include "proto/job.pb.h"

namespace tandem {

struct NotKept {
  std::string option;
  std::string value;
  std::string reason;
};

struct ImportedJob {
  v1::JobSpec job;                // what the configuration says; data, rewards and what it leaves open are the user's to write
  std::vector<NotKept> not_kept;  // every option of it that the job does not hold, or not exactly so; by name
};

// `text`: JSON or YAML, a mapping of GRPOConfig's options, and of those of `trl grpo` beside them (model, data set, LoRA), each
// as TRL 1.16 names it; options that are left out have TRL's defaults. `name`: of the job. Errors: INVALID_ARGUMENT listing every
// fault, one a line: option, value, what it must be.
absl::StatusOr<ImportedJob> ImportTrlConfig(const std::string& text, const std::string& name);

// The job file that a user goes on with: what was not kept as comments, then the job.
absl::StatusOr<std::string> ToJobFile(const ImportedJob& imported);

}  // namespace tandem
