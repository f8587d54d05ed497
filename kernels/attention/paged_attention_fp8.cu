// Keys and values in fp8, head sizes 64 and 128.
#include "kernels/attention/paged_attention_head.cuh"

namespace tandem::internal {

cudaError_t LaunchFp8PagedPrefill64(const Fp8PagedPrefillParams& params, std::int64_t tile, __nv_bfloat16* partial_output,
                                    float* partial_lse, cudaStream_t stream) {
  return LaunchPagedPrefill<64, ScaledHeads>(params, tile, partial_output, partial_lse, stream);
}

cudaError_t LaunchFp8PagedPrefill128(const Fp8PagedPrefillParams& params, std::int64_t tile, __nv_bfloat16* partial_output,
                                     float* partial_lse, cudaStream_t stream) {
  return LaunchPagedPrefill<128, ScaledHeads>(params, tile, partial_output, partial_lse, stream);
}

}  // namespace tandem::internal
