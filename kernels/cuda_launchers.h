// What the launchers dispatch to for Device::kCuda once they have checked their parameters: each room's .cu file, or no_cuda.cc
// where the build has no device code.
#pragma once

#include "kernels/adamw/adamw.h"
#include "kernels/checksum/checksum.h"
#include "kernels/embedding/embedding.h"
#include "kernels/gemm/gemm.h"
#include "kernels/rms_norm/rms_norm.h"
#include "kernels/rope/rope.h"
#include "kernels/swiglu/swiglu.h"

namespace tandem::internal {

// The most blocks that sum up squares, each into a double of its own.
inline constexpr int kSquaredNormBlocks = 1024;
absl::Status SquaredNormCuda(const SquaredNormParams& params, void* stream);
absl::Status AdamWUpdateCuda(const AdamWUpdateParams& params, void* stream);
// The two sums over the words of `data`. Waits for them.
absl::Status ChecksumSumsCuda(const void* data, std::size_t size_bytes, std::uint64_t (&sums)[2]);
absl::Status EmbeddingCuda(const EmbeddingParams& params, void* stream);
absl::StatusOr<std::unique_ptr<Gemm>> CreateCudaGemm(std::span<std::byte> workspace);
absl::Status RmsNormCuda(const RmsNormParams& params, void* stream);
absl::Status RmsNormBackwardCuda(const RmsNormBackwardParams& params, void* stream);
absl::Status RopeCuda(const RopeParams& params, void* stream);
absl::Status SwigluCuda(const SwigluParams& params, void* stream);
absl::Status SwigluBackwardCuda(const SwigluBackwardParams& params, void* stream);

}  // namespace tandem::internal
