// A job's adapter as a PEFT directory: opened where a job starts from one, made where it is exported. Thread-safe.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "common/model/merged_model.h"
#include "common/model/peft_adapter.h"
#include "proto/job.pb.h"
#include "trainer_server/job/content_store.h"

namespace tandem {

// Whether the job begins at an adapter, of the store or of another job.
bool HasStartAdapter(const v1::AdapterConfig& adapter);
// What the adapter's PEFT directory says of it.
PeftConfig PeftConfigOf(const v1::AdapterConfig& adapter);

// The adapter that a job names as its start, from the store. Errors: NOT_FOUND (content), what is wrong with the files.
absl::StatusOr<PeftAdapter> OpenStartAdapter(const v1::AdapterConfig& adapter, const ModelConfig& model,
                                             const ContentStore& content);

// Name and bytes of each file of the PEFT directory; `adapter` holds the slot. Errors: what the writer says.
absl::StatusOr<std::vector<std::pair<std::string, std::string>>> ExportFiles(const v1::AdapterConfig& config,
                                                                             const ModelConfig& model,
                                                                             const std::string& adapter);

// The model of `model_path`, which must be the one that the pool holds, with the adapter merged into it: see StreamMergedModel.
// Errors: FAILED_PRECONDITION (no such model there), else its own.
absl::Status ExportMerged(const v1::AdapterConfig& config, const ModelDescription& model, const std::string& model_path,
                          const std::string& adapter, const FileSink& sink);

}  // namespace tandem
