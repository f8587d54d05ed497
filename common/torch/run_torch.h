// The one place where LibTorch's exceptions become a Status.
#pragma once

#include <string_view>

#include "absl/functional/function_ref.h"
#include "common/base/status.h"

namespace tandem {

// Runs `body` without autograd. Errors: the body's own; RESOURCE_EXHAUSTED (memory), INTERNAL (LibTorch's words), each begun with
// `what`
// ("decoding 64 tokens").
absl::Status RunTorch(std::string_view what, absl::FunctionRef<absl::Status()> body);

}  // namespace tandem
