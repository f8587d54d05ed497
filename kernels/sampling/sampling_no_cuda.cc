// Stands in for sampling.cu where the build has no device code.
#include "kernels/sampling/sampling.h"

namespace tandem::internal {

absl::Status SampleCuda(const SampleParams&, void*) { return BuiltWithoutCuda("sampling"); }

}  // namespace tandem::internal
