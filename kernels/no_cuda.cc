// Stands in for device code where the build has none.
#include "kernels/cuda_launchers.h"

namespace tandem::internal {

absl::Status SquaredNormCuda(const SquaredNormParams&, void*) { return BuiltWithoutCuda("squared norm"); }
absl::Status AdamWUpdateCuda(const AdamWUpdateParams&, void*) { return BuiltWithoutCuda("adamw"); }
absl::Status ChecksumSumsCuda(const void*, std::size_t, std::uint64_t (&)[2]) { return BuiltWithoutCuda("checksum"); }
absl::Status EmbeddingCuda(const EmbeddingParams&, void*) { return BuiltWithoutCuda("embedding"); }
absl::StatusOr<std::unique_ptr<Gemm>> CreateCudaGemm(std::span<std::byte>) { return BuiltWithoutCuda("gemm"); }
absl::Status RmsNormCuda(const RmsNormParams&, void*) { return BuiltWithoutCuda("rms_norm"); }
absl::Status RmsNormBackwardCuda(const RmsNormBackwardParams&, void*) { return BuiltWithoutCuda("rms_norm_backward"); }
absl::Status RopeCuda(const RopeParams&, void*) { return BuiltWithoutCuda("rope"); }
absl::Status SwigluCuda(const SwigluParams&, void*) { return BuiltWithoutCuda("swiglu"); }
absl::Status SwigluBackwardCuda(const SwigluBackwardParams&, void*) { return BuiltWithoutCuda("swiglu_backward"); }

}  // namespace tandem::internal
