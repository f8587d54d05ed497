// Splits a loop among LibTorch's own threads, the ones that run its GEMMs.
#pragma once

#include <cstdint>

#include "absl/functional/function_ref.h"

namespace tandem {

// Calls `body(begin, end)` on disjoint ranges that cover [0, count); on this thread alone when count <= grain. How the range is
// cut depends on the number of threads: results must not.
void ParallelFor(std::int64_t count, std::int64_t grain, absl::FunctionRef<void(std::int64_t, std::int64_t)> body);
int NumTorchThreads();

}  // namespace tandem
