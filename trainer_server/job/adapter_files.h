// A job's adapter as a PEFT directory's files: read where a job starts from one, made where it is exported. Pure but for reading;
// thread-safe.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "trainer_server/job/job_plan.h"

namespace tandem {

// Fills `slot` (AdapterLayout order) from the job's start adapter. Requires: spec.adapter() names one. Errors: INVALID_ARGUMENT
// when its rank, scale or targets are not the job's, both named; what the reader says of a faulty file.
absl::Status ReadStartAdapter(const JobPlan& plan, const ModelConfig& model, const ContentStore& content,
                              std::span<std::byte> slot);

// Name and bytes of each file of the directory. Requires: adapter.size() == plan.layout.total_bytes.
absl::StatusOr<std::vector<std::pair<std::string, std::string>>> ExportFiles(const JobPlan& plan, const ModelConfig& model,
                                                                             const std::string& adapter);

}  // namespace tandem
