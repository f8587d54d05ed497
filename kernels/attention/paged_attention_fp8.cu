// Keys and values in E4M3, both head sizes. A score is multiplied with its KV head's key scale, an output with its value scale:
// sums are those of the codes.
#include <cuda_fp8.h>

#include "kernels/attention/paged_attention_head.cuh"

namespace tandem::internal {
namespace {

namespace fi = flashinfer;

struct ScaledHeads : fi::DefaultAttention</*use_custom_mask=*/false, /*use_sliding_window=*/false, /*use_logits_soft_cap=*/false,
                                          /*use_alibi=*/false> {
  using Base = fi::DefaultAttention<false, false, false, false>;
  template <typename Params>
  __device__ __host__ ScaledHeads(const Params& params, std::uint32_t batch_idx, std::uint8_t* smem)
      : Base(params, batch_idx, smem) {}

  template <typename Params, typename T>
  __device__ __forceinline__ T LogitsTransform(const Params& params, T logits, std::uint32_t, std::uint32_t, std::uint32_t,
                                               std::uint32_t, std::uint32_t kv_head_idx) {
    return logits * __ldg(params.key_scales + kv_head_idx);
  }

  template <typename Params, typename T, typename M>
  __device__ __forceinline__ T OutputTransform(const Params& params, T output, std::uint32_t, std::uint32_t,
                                               std::uint32_t qo_head_idx, M& m, float& d, float) {
    std::uint32_t kv_head_idx, rest;
    params.group_size.divmod(qo_head_idx, kv_head_idx, rest);
    const float inverse = m != -fi::math::inf ? fi::math::ptx_rcp(d) : 0.f;
    return output * (inverse * __ldg(params.value_scales + kv_head_idx));
  }
};

}  // namespace

cudaError_t LaunchPagedPrefillFp8(const Fp8PagedPrefillParams& params, int head_dim, std::int64_t tile,
                                  __nv_bfloat16* partial_output, float* partial_lse, cudaStream_t stream) {
  return head_dim == 64 ? LaunchPagedPrefill<64, ScaledHeads>(params, tile, partial_output, partial_lse, stream)
                        : LaunchPagedPrefill<128, ScaledHeads>(params, tile, partial_output, partial_lse, stream);
}

}  // namespace tandem::internal
