// What sampler.cc dispatches to, one file per device, and the words for bad logits.
#pragma once

#include <array>
#include <cstddef>
#include <memory>

#include "rollout_server/sample/sampler.h"

namespace tandem {

std::unique_ptr<Sampler> CreateCpuSampler();
absl::StatusOr<std::unique_ptr<Sampler>> CreateCudaSampler(const SamplerOptions& options);
std::uint64_t CudaSamplerWorkspaceBytes(const SamplerOptions& options);

// Which places for the outcome of a draw are taken.
class DrawSlots {
 public:
  // Errors: FAILED_PRECONDITION (all are taken).
  absl::StatusOr<int> Take();
  void GiveBack(int slot) { is_taken_[static_cast<std::size_t>(slot)] = false; }

 private:
  std::array<bool, Sampler::kMaxPendingDraws> is_taken_ = {};
};

// The row's maximum, when no token can be drawn from it: NaN, infinite either way.
absl::Status BadLogits(bool has_nan, float maximum, std::uint32_t position, bool is_penalised);

}  // namespace tandem
