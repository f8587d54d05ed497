// Head size 256, keys and values in bf16 and in fp8.
#include "kernels/attention/paged_attention_head.cuh"

namespace tandem::internal {

cudaError_t LaunchPagedPrefill256(const PagedPrefillParams& params, std::int64_t tile, __nv_bfloat16* partial_output,
                                  float* partial_lse, cudaStream_t stream) {
  return LaunchPagedPrefill<256>(params, tile, partial_output, partial_lse, stream);
}

cudaError_t LaunchFp8PagedPrefill256(const Fp8PagedPrefillParams& params, std::int64_t tile, __nv_bfloat16* partial_output,
                                     float* partial_lse, cudaStream_t stream) {
  return LaunchPagedPrefill<256, ScaledHeads>(params, tile, partial_output, partial_lse, stream);
}

}  // namespace tandem::internal
