// Head size 128.
#include "kernels/attention/paged_attention_head.cuh"

namespace tandem::internal {

cudaError_t LaunchPagedPrefill128(const PagedPrefillParams& params, std::int64_t tile, __nv_bfloat16* partial_output,
                                  float* partial_lse, cudaStream_t stream) {
  return LaunchPagedPrefill<128>(params, tile, partial_output, partial_lse, stream);
}

}  // namespace tandem::internal
