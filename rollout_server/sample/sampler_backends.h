// What sampler.cc dispatches to, one file per device, and the words for bad logits.
#pragma once

#include <memory>

#include "rollout_server/sample/sampler.h"

namespace tandem {

std::unique_ptr<Sampler> CreateCpuSampler();
absl::StatusOr<std::unique_ptr<Sampler>> CreateCudaSampler(const SamplerOptions& options);
std::uint64_t CudaSamplerWorkspaceBytes(const SamplerOptions& options);

// The row's maximum, when no token can be drawn from it: NaN, infinite either way.
absl::Status BadLogits(bool has_nan, float maximum, std::uint32_t position, bool is_penalised);

}  // namespace tandem
