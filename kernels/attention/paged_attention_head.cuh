// FlashInfer's paged prefill for one head size. Each size is a file of its own: a size costs 20 s to compile.
#pragma once

#include <cuda_bf16.h>

#include <cmath>
#include <exception>
#include <flashinfer/attention/default_prefill_params.cuh>
#include <flashinfer/attention/mask.cuh>
#include <flashinfer/attention/prefill.cuh>
#include <flashinfer/attention/scheduler.cuh>
#include <flashinfer/attention/variants.cuh>

#include "common/gpu/cuda_status.h"
#include "kernels/attention/paged_attention.h"

namespace tandem::internal {

struct Fp8KvCode {  // kv_cache/fp8_kv.h
  std::uint8_t bits;
};

}  // namespace tandem::internal

namespace flashinfer {

// Exponent and mantissa of a code move to the place that they have in bf16, and the product adds the difference of the biases.
template <>
struct vec_cast<nv_bfloat16, tandem::internal::Fp8KvCode> {
  template <std::size_t kCount>
  __device__ __forceinline__ static void cast(nv_bfloat16* numbers, const tandem::internal::Fp8KvCode* codes) {
    static_assert(kCount % 4 == 0);
    const __nv_bfloat162 bias = __float2bfloat162_rn(0x1p124f);
#pragma unroll
    for (std::size_t i = 0; i < kCount; i += 4) {
      const std::uint32_t four = *reinterpret_cast<const std::uint32_t*>(codes + i);
#pragma unroll
      for (std::uint32_t pair = 0; pair < 2; ++pair) {
        const std::uint32_t bits = __byte_perm(four, 0, pair == 0 ? 0x1404 : 0x3424);  // each code the upper half of its 16 bits
        const std::uint32_t moved = (bits & 0x80008000u) | ((bits & 0x7f007f00u) >> 5);
        __nv_bfloat162 two;
        memcpy(&two, &moved, sizeof(two));
        *reinterpret_cast<__nv_bfloat162*>(numbers + i + 2 * pair) = __hmul2(two, bias);
      }
    }
  }
};

}  // namespace flashinfer

namespace tandem::internal {

using PagedPrefillParams = flashinfer::BatchPrefillPagedParams<__nv_bfloat16, __nv_bfloat16, __nv_bfloat16, std::int32_t>;

using Fp8PrefillBase = flashinfer::BatchPrefillPagedParams<__nv_bfloat16, Fp8KvCode, __nv_bfloat16, std::int32_t>;
struct Fp8PagedPrefillParams : Fp8PrefillBase {
  using Fp8PrefillBase::Fp8PrefillBase;
  const float* key_scales = nullptr;  // [num_kv_heads]
  const float* value_scales = nullptr;
};

using PlainHeads = flashinfer::DefaultAttention</*use_custom_mask=*/false, /*use_sliding_window=*/false,
                                                /*use_logits_soft_cap=*/false, /*use_alibi=*/false>;

// Keys and values as codes: a score is multiplied with its KV head's key scale, an output with its value scale, so sums are those
// of the codes.
struct ScaledHeads
    : flashinfer::DefaultAttention</*use_custom_mask=*/false, /*use_sliding_window=*/false, /*use_logits_soft_cap=*/false,
                                   /*use_alibi=*/false> {
  using Base = flashinfer::DefaultAttention<false, false, false, false>;
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
    const float inverse = m != -flashinfer::math::inf ? flashinfer::math::ptx_rcp(d) : 0.f;
    return output * (inverse * __ldg(params.value_scales + kv_head_idx));
  }
};

// Tiles of 128 query rows do not fit beside heads of 256; FlashInfer's plan has none then.
template <std::uint32_t kHeadDim, typename Variant = PlainHeads, typename Params>
cudaError_t LaunchPagedPrefill(const Params& params, std::int64_t tile, __nv_bfloat16* partial_output, float* partial_lse,
                               cudaStream_t stream) {
  namespace fi = flashinfer;
  const auto launch = [&]<std::uint32_t kTile>() {
    return fi::BatchPrefillWithPagedKVCacheDispatched<kTile, kHeadDim, kHeadDim, fi::PosEncodingMode::kNone,
                                                      /*USE_FP16_QK_REDUCTION=*/false, fi::MaskMode::kCausal, Variant>(
        params, partial_output, partial_lse, /*enable_pdl=*/false, stream);
  };
  switch (tile) {
    case 16:
      return launch.template operator()<16>();
    case 64:
      return launch.template operator()<64>();
    case 128:
      if constexpr (kHeadDim < 256) return launch.template operator()<128>();
      return cudaErrorInvalidValue;
    default:
      return cudaErrorInvalidValue;
  }
}

// One of each head size, by the file that compiles it.
cudaError_t LaunchPagedPrefill64(const PagedPrefillParams& params, std::int64_t tile, __nv_bfloat16* partial_output,
                                 float* partial_lse, cudaStream_t stream);
cudaError_t LaunchPagedPrefill128(const PagedPrefillParams& params, std::int64_t tile, __nv_bfloat16* partial_output,
                                  float* partial_lse, cudaStream_t stream);
cudaError_t LaunchPagedPrefill256(const PagedPrefillParams& params, std::int64_t tile, __nv_bfloat16* partial_output,
                                  float* partial_lse, cudaStream_t stream);
cudaError_t LaunchFp8PagedPrefill64(const Fp8PagedPrefillParams& params, std::int64_t tile, __nv_bfloat16* partial_output,
                                    float* partial_lse, cudaStream_t stream);
cudaError_t LaunchFp8PagedPrefill128(const Fp8PagedPrefillParams& params, std::int64_t tile, __nv_bfloat16* partial_output,
                                     float* partial_lse, cudaStream_t stream);
cudaError_t LaunchFp8PagedPrefill256(const Fp8PagedPrefillParams& params, std::int64_t tile, __nv_bfloat16* partial_output,
                                     float* partial_lse, cudaStream_t stream);

}  // namespace tandem::internal
