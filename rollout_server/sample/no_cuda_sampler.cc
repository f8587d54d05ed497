// Stands in for cuda_sampler.cc where the build has no device code.
#include "rollout_server/sample/sampler_backends.h"

namespace tandem {

absl::StatusOr<std::unique_ptr<Sampler>> CreateCudaSampler(const SamplerOptions&) { return BuiltWithoutCuda("sampler"); }

std::uint64_t CudaSamplerWorkspaceBytes(const SamplerOptions&) { return 0; }

}  // namespace tandem
