#include "rollout_server/sample/sampler.h"

#include <algorithm>

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

std::vector<absl::StatusOr<DrawnToken>> Sampler::Draw(const Logits& logits, std::span<const DrawInput> inputs) {
  const absl::StatusOr<PendingDraw> draw = Start(logits, inputs);
  if (draw.ok()) return Collect(*draw);
  return std::vector<absl::StatusOr<DrawnToken>>(inputs.size(), draw.status());
}

absl::StatusOr<int> DrawSlots::Take() {
  const auto free = std::find(is_taken_.begin(), is_taken_.end(), false);
  if (free == is_taken_.end()) {
    return absl::FailedPreconditionError(absl::StrCat("drawing: ", is_taken_.size(), " draws are under way already"));
  }
  *free = true;
  return static_cast<int>(free - is_taken_.begin());
}

}  // namespace tandem
