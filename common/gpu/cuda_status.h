// CUDA's errors as ours. Only device code and its launchers include this.
#pragma once

#include "common/base/status.h"

namespace tandem {

// `error` is a cudaError_t. Errors: RESOURCE_EXHAUSTED (memory), INVALID_ARGUMENT (value or launch configuration), else INTERNAL;
// the message has `what`, the error's name and the driver's words.
absl::Status CudaToStatus(int error, const char* what);

}  // namespace tandem
