#include "rollout_server/sample/sampler.h"

#include "rollout_server/sample/sampler_backends.h"

namespace tandem {

absl::Status BadLogits(bool has_nan, float maximum, std::uint32_t position, bool is_penalised) {
  return absl::InternalError(absl::StrCat(has_nan ? "NaN logits" : absl::StrCat("logits with largest value ", maximum),
                                          is_penalised ? " after penalties" : "", " at completion position ", position));
}

std::uint64_t Sampler::WorkspaceBytes(const SamplerOptions& options) {
  return options.device == Device::kCuda ? CudaSamplerWorkspaceBytes(options) : 0;
}

absl::StatusOr<std::unique_ptr<Sampler>> Sampler::Create(const SamplerOptions& options) {
  if (options.device == Device::kCuda) return CreateCudaSampler(options);
  return CreateCpuSampler();
}

}  // namespace tandem
