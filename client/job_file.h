// A job file on the user's machine: parsed, completed by command-line overrides, its files uploaded and replaced by their
// content.
#pragma once

#include <string>
#include <vector>

#include "client/connection.h"
#include "common/base/status.h"

namespace tandem {

// Reads `path` and merges each of `overrides`, text format too ("seed: 1, num_steps: 5"), over it. Paths inside are relative to
// the file. Errors: NOT_FOUND, INVALID_ARGUMENT with line and column.
absl::StatusOr<v1::JobSpec> ReadJobFile(const std::string& path, const std::vector<std::string>& overrides);
// One RewardConfig of weight 1 for each function of "FILE:FUNCTION,FUNCTION,FILE:FUNCTION". Errors: INVALID_ARGUMENT naming the
// part.
absl::Status AddPythonRewards(const std::string& rewards, v1::JobSpec* spec);
// Sends every file that the job names and the server lacks, and puts content addresses in place of the paths. Errors:
// NOT_FOUND naming field and path.
absl::Status UploadFiles(const Connection& connection, v1::JobSpec* spec);

}  // namespace tandem
