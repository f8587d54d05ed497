// Our errors as LibTorch's exceptions, for code that runs inside RunTorch, which turns them back.
#pragma once

#include <c10/util/Exception.h>

#include <string>

#include "common/base/status.h"

namespace tandem {

// Throws c10::OutOfMemoryError for RESOURCE_EXHAUSTED, c10::Error for all else that is not OK.
inline void CheckStatus(const absl::Status& status) {
  TORCH_CHECK_WITH(OutOfMemoryError, !absl::IsResourceExhausted(status), std::string(status.message()));
  TORCH_CHECK(status.ok(), std::string(status.message()));
}

}  // namespace tandem
