// What the launchers dispatch to for Device::kCuda once they have checked their parameters: each room's .cu file, or no_cuda.cc
// where the build has no device code.
#pragma once

#include "kernels/gemm/gemm.h"
#include "kernels/rms_norm/rms_norm.h"

namespace tandem::internal {

absl::StatusOr<std::unique_ptr<Gemm>> CreateCudaGemm(std::span<std::byte> workspace);
absl::Status RmsNormCuda(const RmsNormParams& params, void* stream);
absl::Status RmsNormBackwardCuda(const RmsNormBackwardParams& params, void* stream);

}  // namespace tandem::internal
