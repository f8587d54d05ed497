// Compiled with -fopenmp: without it at::parallel_for is a plain loop.
#include "common/torch/parallel.h"

#include <ATen/Parallel.h>

namespace tandem {

void ParallelFor(std::int64_t count, std::int64_t grain, absl::FunctionRef<void(std::int64_t, std::int64_t)> body) {
  at::parallel_for(0, count, grain, body);
}

int NumTorchThreads() { return at::get_num_threads(); }

}  // namespace tandem
