// A job's adapter as a PEFT directory: opened where a job starts from one, made where it is exported. Thread-safe.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "common/model/peft_adapter.h"
#include "proto/job.pb.h"
#include "trainer_server/job/content_store.h"

namespace tandem {

// The adapter that a job names as its start, from the store. Errors: NOT_FOUND (content), what is wrong with the files.
absl::StatusOr<PeftAdapter> OpenStartAdapter(const v1::AdapterConfig& adapter, const ModelConfig& model,
                                             const ContentStore& content);

// Name and bytes of each file of the PEFT directory; `adapter` holds the slot. Errors: what the writer says.
absl::StatusOr<std::vector<std::pair<std::string, std::string>>> ExportFiles(const v1::AdapterConfig& config,
                                                                             const ModelConfig& model,
                                                                             const std::string& adapter);

}  // namespace tandem
