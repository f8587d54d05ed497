#include "rollout_server/model/cuda_decoder_places.h"

#include <algorithm>

#include "common/base/units.h"
#include "common/model/kv_scale_table.h"
#include "kernels/gemm/gemm.h"
#include "kernels/rms_norm/rms_norm.h"
#include "kernels/sampling/sampling.h"
#include "rollout_server/model/decoder_backends.h"
#include "rollout_server/model/device_adapters.h"

namespace tandem {
namespace {

constexpr std::uint64_t kAlignment = 256;

}  // namespace

PagedAttentionShape AttentionShapeOf(const ModelConfig& config, int block_tokens) {
  return {.dtype = DType::kBf16,
          .num_heads = config.num_heads,
          .num_kv_heads = config.num_kv_heads,
          .head_dim = config.head_dim,
          .page_tokens = block_tokens};
}

StepPlaces::StepPlaces(const ModelConfig& config, const DecoderModelOptions& options) {
  const auto put = [this](std::int64_t count) {
    const std::int64_t begin = size;
    size = static_cast<std::int64_t>(RoundUp(static_cast<std::uint64_t>(size + count), kAlignment / 4));
    return begin;
  };
  token_ids = put(options.max_batch_tokens);
  token_places = put(2 * std::int64_t{options.max_batch_tokens});
  positions = put(options.max_batch_tokens);
  slots = put(options.max_batch_tokens);
  logit_rows = put(options.max_logit_rows);
  query_indptr = put(options.max_sequences + 1);
  page_indptr = put(options.max_sequences + 1);
  last_page_tokens = put(options.max_sequences);
  max_pages = std::int64_t{options.max_sequences} * ((config.max_positions + options.block_tokens - 1) / options.block_tokens);
  page_indices = put(max_pages);
}

WorkspacePlaces::WorkspacePlaces(const ModelConfig& config, const DecoderModelOptions& options) : step(config, options) {
  const auto put = [this](std::uint64_t bytes) {
    const std::uint64_t begin = total_bytes;
    total_bytes = RoundUp(total_bytes + bytes, kAlignment);
    return begin;
  };
  const bool is_fp8 = options.kv_dtype == DType::kFp8E3m4;
  kv_scales = put(KvScaleTable::Bytes(config));  // first: the trainer and the next process look for them here
  const auto tokens = static_cast<std::uint64_t>(options.max_batch_tokens);
  const auto d = static_cast<std::uint64_t>(config.hidden_size), f = static_cast<std::uint64_t>(config.intermediate_size);
  const auto q = static_cast<std::uint64_t>(config.q_size()), kv = static_cast<std::uint64_t>(config.kv_size());
  const auto put_rows = [&](std::uint64_t width) { return put(tokens * width * kBf16Bytes); };
  hidden = put(tokens * d * sizeof(float));
  normed = put_rows(d);
  qkv = put(tokens * (q + 2 * kv) * sizeof(float));
  queries = put_rows(q);
  attention = put_rows(q);
  key_rows = put_rows(is_fp8 ? kv : 0);
  value_rows = put_rows(is_fp8 ? kv : 0);
  gate_up = put(tokens * 2 * f * sizeof(float));
  activated = put_rows(f);
  adapter_x = put_rows(DeviceAdapters::MaxWidth(options.max_adapter_rank));
  logits =
      put(static_cast<std::uint64_t>(options.max_logit_rows) * static_cast<std::uint64_t>(config.vocab_size) * sizeof(float));
  const std::uint64_t table = static_cast<std::uint64_t>(config.max_positions) * static_cast<std::uint64_t>(config.head_dim / 2);
  cosines = put(table * sizeof(float));
  sines = put(table * sizeof(float));
  step_indices = put(static_cast<std::uint64_t>(step.size) * sizeof(std::int32_t));
  const PagedAttentionShape shape = AttentionShapeOf(config, options.block_tokens);
  attention_partial_bytes = PagedAttentionPartialBytes(shape, options.max_batch_tokens, options.max_sequences);
  attention_partials = put(attention_partial_bytes);
  attention_index_bytes = PagedAttentionIndexBytes(shape, options.max_batch_tokens, options.max_sequences);
  attention_indices = put(attention_index_bytes);
  gemm = put(kGemmWorkspaceBytes);
  dense = put(IsQuantized(options.weight_format) ? std::max({d * (q + 2 * kv), d * q, d * 2 * f}) * kBf16Bytes : 0);
  adapter_bytes = DeviceAdapters::Bytes(config, options.max_adapters, options.max_adapter_rank);
  adapters = put(adapter_bytes);
}

absl::Status CheckCudaDecoderOptions(const ModelConfig& config, const WeightLayout& layout, const DecoderModelOptions& options) {
  const auto fault = [&](const auto&... parts) {
    return absl::InvalidArgumentError(absl::StrCat("model '", config.name, "' on the GPU: ", parts...));
  };
  if (layout.format == StorageFormat::kFp32 || layout.format != options.weight_format) {
    return fault("weights are ", StorageFormatName(layout.format), ", the workspace is for ",
                 StorageFormatName(options.weight_format), "; bf16, fp8, fp8_block and nf4 are supported");
  }
  if (options.kv_dtype == DType::kFp32) return fault("the KV cache is bf16 or fp8");
  if (config.head_dim != 64 && config.head_dim != 128 && config.head_dim != 256) {
    return fault("head_dim ", config.head_dim, "; 64, 128 and 256 are supported");
  }
  if (config.hidden_size > kMaxRmsNormWidth) return fault("hidden_size ", config.hidden_size, "; at most ", kMaxRmsNormWidth);
  if (config.vocab_size > kMaxSampledVocab) return fault("vocab_size ", config.vocab_size, "; at most ", kMaxSampledVocab);
  if (options.max_batch_tokens < 1 || options.max_sequences < 1 || options.max_logit_rows < 1 || options.max_adapters < 0 ||
      options.max_adapter_rank < 0) {
    return fault("max_batch_tokens ", options.max_batch_tokens, ", max_sequences ", options.max_sequences, ", max_logit_rows ",
                 options.max_logit_rows, ", max_adapters ", options.max_adapters, ", max_adapter_rank ",
                 options.max_adapter_rank);
  }
  if (std::int64_t{options.num_blocks} * options.block_tokens > INT32_MAX) {
    return fault(options.num_blocks, " blocks of ", options.block_tokens, " tokens; slots are counted in 31 bits");
  }
  const std::uint64_t needed = WorkspacePlaces(config, options).total_bytes;
  if (options.workspace.size() < needed || reinterpret_cast<std::uintptr_t>(options.workspace.data()) % kAlignment != 0) {
    return fault("a workspace of ", options.workspace.size(), " bytes; ", needed, " on a ", kAlignment,
                 "-byte boundary are needed");
  }
  return absl::OkStatus();
}

std::vector<WorkspacePart> CudaDecoderWorkspaceParts(const ModelConfig& config, const DecoderModelOptions& options) {
  const WorkspacePlaces places(config, options);
  return {{"rollout_kv_scales", places.hidden - places.kv_scales},
          {"rollout_activations", places.logits - places.hidden},
          {"rollout_logits", places.cosines - places.logits},
          {"rollout_step_arrays", places.attention_partials - places.cosines},
          {"rollout_attention", places.gemm - places.attention_partials},
          {"rollout_gemm_workspace", places.dense - places.gemm},
          {"rollout_dense_weight", places.adapters - places.dense},
          {"rollout_adapters", places.total_bytes - places.adapters}};
}

}  // namespace tandem
