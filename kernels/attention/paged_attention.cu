// Planning, parameters, and head size 64. Grid: (tiles of query rows x group heads, by chunk of keys; KV heads); block: 4 warps
// of tensor-core tiles. Decode reads each sequence's keys and values once, 2 x context x kv_size x 2 bytes: bound by memory, 4.1
// to 4.3 TB/s measured on an H200 at long contexts.
#include "kernels/attention/paged_attention_head.cuh"

namespace tandem::internal {
namespace {

namespace fi = flashinfer;
using Bf16 = __nv_bfloat16;

// FlashInfer takes pointers to what it only reads.
std::int32_t* Mutable(const std::int32_t* values) { return const_cast<std::int32_t*>(values); }
template <typename T = Bf16>
T* Elements(const void* values) {
  return static_cast<T*>(const_cast<void*>(values));
}

// FlashInfer throws where it refuses; nothing may leave a launcher but a status.
template <typename Call>
absl::Status Guarded(const char* what, Call&& call) {
  try {
    return CudaToStatus(call(), what);
  } catch (const std::exception& error) { return absl::InternalError(absl::StrCat(what, ": ", error.what())); }
}

absl::Status CheckDeviceShape(const PagedAttentionShape& shape) {
  const bool has_kernel = shape.head_dim == 64 || shape.head_dim == 128 || shape.head_dim == 256;
  if (shape.dtype == DType::kBf16 && has_kernel) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("paged attention on the device: ", shape.dtype == DType::kBf16 ? "bf16" : "fp32",
                                                 " heads of ", shape.head_dim, "; bf16 of 64, 128 and 256 is supported"));
}

template <typename Launch>
Launch* ForHeadDim(int head_dim, Launch* of_64, Launch* of_128, Launch* of_256) {
  return head_dim == 64 ? of_64 : head_dim == 128 ? of_128 : of_256;
}

template <typename Params>
Params PrefillParams(const PagedAttentionParams& p, const fi::PrefillPlanInfo& plan, std::byte* indices) {
  using Kv = typename Params::DTypeKV;
  const PagedAttentionShape& shape = p.shape;
  const std::int64_t strides[] = {p.page_stride, std::int64_t{shape.num_kv_heads} * shape.head_dim, shape.head_dim};
  const fi::paged_kv_t<Kv, std::int32_t> cache(
      static_cast<std::uint32_t>(shape.num_kv_heads), static_cast<std::uint32_t>(shape.page_tokens),
      static_cast<std::uint32_t>(shape.head_dim), static_cast<std::uint32_t>(p.num_sequences), fi::QKVLayout::kNHD,
      Elements<Kv>(p.keys), Elements<Kv>(p.values), strides, Mutable(p.page_indices), Mutable(p.page_indptr),
      Mutable(p.last_page_tokens));
  Params params(Elements(p.query), cache, /*maybe_custom_mask=*/nullptr, Mutable(p.query_indptr),
                /*maybe_mask_indptr=*/nullptr, /*maybe_q_rope_offset=*/nullptr, static_cast<Bf16*>(p.output),
                /*lse=*/nullptr, /*maybe_alibi_slopes=*/nullptr, static_cast<std::uint32_t>(shape.num_heads),
                static_cast<std::int32_t>(p.query_row_stride), shape.head_dim, /*window_left=*/-1,
                /*logits_soft_cap=*/0.f, 1.f / std::sqrt(static_cast<float>(shape.head_dim)), /*rope_scale=*/1.f,
                /*rope_theta=*/1e4f);
  const auto at = [&](std::int64_t offset) { return fi::GetPtrFromBaseOffset<std::int32_t>(indices, offset); };
  params.request_indices = at(plan.request_indices_offset);
  params.qo_tile_indices = at(plan.qo_tile_indices_offset);
  params.kv_tile_indices = at(plan.kv_tile_indices_offset);
  params.o_indptr = at(plan.o_indptr_offset);
  params.kv_chunk_size_ptr = at(plan.kv_chunk_size_ptr_offset);
  params.padded_batch_size = static_cast<std::uint32_t>(plan.padded_batch_size);
  params.max_total_num_rows = static_cast<std::uint32_t>(plan.total_num_rows);
  if (plan.split_kv) {
    params.merge_indptr = at(plan.merge_indptr_offset);
    if (plan.enable_cuda_graph) params.block_valid_mask = fi::GetPtrFromBaseOffset<bool>(indices, plan.block_valid_mask_offset);
  }
  if (plan.enable_cuda_graph)
    params.total_num_rows = fi::GetPtrFromBaseOffset<std::uint32_t>(indices, plan.total_num_rows_offset);
  return params;
}

}  // namespace

cudaError_t LaunchPagedPrefill64(const PagedPrefillParams& params, std::int64_t tile, Bf16* partial_output, float* partial_lse,
                                 cudaStream_t stream) {
  return LaunchPagedPrefill<64>(params, tile, partial_output, partial_lse, stream);
}

absl::Status PlanPagedAttentionCuda(const PagedAttentionPlanParams& params, const PagedAttentionScratch& scratch,
                                    PagedAttentionPlan* plan, void* stream) {
  const PagedAttentionShape& shape = params.shape;
  TANDEM_RETURN_IF_ERROR(CheckDeviceShape(shape));
  if (scratch.staging.size() < scratch.indices.size()) {
    return absl::InvalidArgumentError("paged attention: the staging memory is smaller than the index memory");
  }
  fi::PrefillPlanInfo info;
  TANDEM_RETURN_IF_ERROR(Guarded("paged attention plan", [&] {
    return fi::PrefillPlan<std::int32_t>(
        scratch.partials.data(), scratch.partials.size(), scratch.indices.data(), scratch.staging.data(), scratch.indices.size(),
        info, Mutable(params.query_indptr), Mutable(params.page_indptr), static_cast<std::uint32_t>(params.num_rows),
        static_cast<std::uint32_t>(params.num_sequences), static_cast<std::uint32_t>(shape.num_heads),
        static_cast<std::uint32_t>(shape.num_kv_heads), static_cast<std::uint32_t>(shape.head_dim),
        static_cast<std::uint32_t>(shape.head_dim), static_cast<std::uint32_t>(shape.page_tokens), params.is_fixed_shape,
        sizeof(Bf16), /*window_left=*/-1, /*fixed_split_size=*/-1, /*disable_split_kv=*/false, /*num_colocated_ctas=*/0,
        static_cast<cudaStream_t>(stream));
  }));
  plan->values = info.ToVector();
  return absl::OkStatus();
}

absl::Status PagedAttentionCuda(const PagedAttentionParams& params, const PagedAttentionPlan& plan,
                                const PagedAttentionScratch& scratch, void* stream) {
  TANDEM_RETURN_IF_ERROR(CheckDeviceShape(params.shape));
  return Guarded("paged attention launch", [&] {
    fi::PrefillPlanInfo info;
    info.FromVector(plan.values);
    Bf16* partial_output = nullptr;
    float* partial_lse = nullptr;
    if (info.split_kv) {
      partial_output = fi::GetPtrFromBaseOffset<Bf16>(scratch.partials.data(), info.v_offset);
      partial_lse = fi::GetPtrFromBaseOffset<float>(scratch.partials.data(), info.s_offset);
    }
    if (params.key_scales != nullptr) {
      auto prefill = PrefillParams<Fp8PagedPrefillParams>(params, info, scratch.indices.data());
      prefill.key_scales = params.key_scales;
      prefill.value_scales = params.value_scales;
      const auto launch =
          ForHeadDim(params.shape.head_dim, LaunchFp8PagedPrefill64, LaunchFp8PagedPrefill128, LaunchFp8PagedPrefill256);
      return launch(prefill, info.cta_tile_q, partial_output, partial_lse, static_cast<cudaStream_t>(stream));
    }
    const auto prefill = PrefillParams<PagedPrefillParams>(params, info, scratch.indices.data());
    const auto launch = ForHeadDim(params.shape.head_dim, LaunchPagedPrefill64, LaunchPagedPrefill128, LaunchPagedPrefill256);
    return launch(prefill, info.cta_tile_q, partial_output, partial_lse, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace tandem::internal
