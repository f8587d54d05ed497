// What the launchers dispatch to for Device::kCuda once they have checked their parameters: each room's .cu file, or no_cuda.cc
// where the build has no device code.
#pragma once

#include "kernels/embedding/embedding.h"
#include "kernels/gemm/gemm.h"
#include "kernels/rms_norm/rms_norm.h"
#include "kernels/rope/rope.h"
#include "kernels/swiglu/swiglu.h"

namespace tandem::internal {

absl::Status EmbeddingCuda(const EmbeddingParams& params, void* stream);
absl::StatusOr<std::unique_ptr<Gemm>> CreateCudaGemm(std::span<std::byte> workspace);
absl::Status RmsNormCuda(const RmsNormParams& params, void* stream);
absl::Status RmsNormBackwardCuda(const RmsNormBackwardParams& params, void* stream);
absl::Status RopeCuda(const RopeParams& params, void* stream);
absl::Status SwigluCuda(const SwigluParams& params, void* stream);
absl::Status SwigluBackwardCuda(const SwigluBackwardParams& params, void* stream);

}  // namespace tandem::internal
