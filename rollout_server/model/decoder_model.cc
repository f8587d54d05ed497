#include "rollout_server/model/decoder_model.h"

#include <cmath>

#include "rollout_server/model/decoder_backends.h"

namespace tandem {
namespace {

absl::Status CheckSequence(const StepBatch& batch, std::size_t sequence, std::int64_t num_blocks, std::int64_t block_tokens) {
  const auto fault = [&](const auto&... parts) {
    return absl::InvalidArgumentError(absl::StrCat("step batch, sequence ", sequence, ": ", parts...));
  };
  const std::int64_t query_len = batch.cu_query_lens[sequence + 1] - batch.cu_query_lens[sequence];
  const std::int64_t context_len = batch.context_lens[sequence];
  if (query_len < 1 || query_len > context_len) return fault(query_len, " query tokens in a context of ", context_len);
  const std::int64_t blocks = (context_len + block_tokens - 1) / block_tokens;
  const std::vector<std::int32_t>& table = batch.block_tables[sequence];
  if (static_cast<std::int64_t>(table.size()) < blocks) return fault(table.size(), " blocks for a context that needs ", blocks);
  for (const std::int32_t block : table) {
    if (block < 0 || block >= num_blocks) return fault("block ", block, " of ", num_blocks);
  }
  const std::int32_t adapter = batch.adapter_of[sequence];
  if (adapter < -1 || adapter >= static_cast<std::int64_t>(batch.adapters.size())) {
    return fault("adapter ", adapter, " of ", batch.adapters.size());
  }
  return absl::OkStatus();
}

absl::Status CheckAdapter(const AdapterView& adapter, const ModelConfig& config) {
  const auto fault = [](const auto&... parts) { return absl::InvalidArgumentError(absl::StrCat("adapter: ", parts...)); };
  if (adapter.slot == nullptr || adapter.layout == nullptr) return fault("no slot or no layout");
  const AdapterLayout& layout = *adapter.layout;
  if (layout.rank < 1 || layout.places.size() != layout.targets.size() * static_cast<std::size_t>(config.num_layers)) {
    return fault("rank ", layout.rank, ", ", layout.places.size(), " places for ", layout.targets.size(), " targets in ",
                 config.num_layers, " layers");
  }
  if (!std::isfinite(adapter.scale)) return fault("scale ", adapter.scale);
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckStepBatch(const StepBatch& batch, const ModelConfig& config, std::int64_t num_blocks,
                            std::int64_t block_tokens) {
  const auto fault = [](const auto&... parts) { return absl::InvalidArgumentError(absl::StrCat("step batch: ", parts...)); };
  const std::size_t num_tokens = batch.token_ids.size(), num_sequences = batch.context_lens.size();
  if (num_tokens == 0) return fault("no tokens");
  if (batch.positions.size() != num_tokens || batch.slot_mapping.size() != num_tokens) {
    return fault(num_tokens, " tokens, ", batch.positions.size(), " positions, ", batch.slot_mapping.size(), " slots");
  }
  if (!batch.token_places.empty() && batch.token_places.size() != num_tokens) {
    return fault(num_tokens, " tokens, ", batch.token_places.size(), " places of drawn tokens");
  }
  if (batch.cu_query_lens.size() != num_sequences + 1 || batch.block_tables.size() != num_sequences ||
      batch.adapter_of.size() != num_sequences) {
    return fault(num_sequences, " context lengths, ", batch.cu_query_lens.size(), " cu_query_lens, ", batch.block_tables.size(),
                 " block tables, ", batch.adapter_of.size(), " adapter indices");
  }
  if (batch.cu_query_lens.front() != 0 || batch.cu_query_lens.back() != static_cast<std::int64_t>(num_tokens)) {
    return fault("cu_query_lens run from ", batch.cu_query_lens.front(), " to ", batch.cu_query_lens.back(), ", not 0 to ",
                 num_tokens);
  }
  const std::int64_t num_slots = num_blocks * block_tokens;
  for (std::size_t i = 0; i < num_tokens; ++i) {
    if (batch.token_ids[i] >= static_cast<std::uint32_t>(config.vocab_size)) {
      return fault("token id ", batch.token_ids[i], " of row ", i, ", vocabulary ", config.vocab_size);
    }
    if (batch.positions[i] < 0 || batch.positions[i] >= config.max_positions) {
      return fault("position ", batch.positions[i], " of row ", i, ", limit ", config.max_positions);
    }
    if (batch.slot_mapping[i] < 0 || batch.slot_mapping[i] >= num_slots) {
      return fault("slot ", batch.slot_mapping[i], " of row ", i, ", the cache has ", num_slots);
    }
  }
  for (const std::int32_t row : batch.logit_rows) {
    if (row < 0 || row >= static_cast<std::int64_t>(num_tokens)) return fault("logit row ", row, " of ", num_tokens);
  }
  for (std::size_t s = 0; s < num_sequences; ++s) TANDEM_RETURN_IF_ERROR(CheckSequence(batch, s, num_blocks, block_tokens));
  for (const AdapterView& adapter : batch.adapters) TANDEM_RETURN_IF_ERROR(CheckAdapter(adapter, config));
  return absl::OkStatus();
}

absl::Status CheckBlockCopy(std::int32_t from, std::int32_t to, std::int64_t num_blocks) {
  for (const std::int32_t block : {from, to}) {
    if (block >= 0 && block < num_blocks) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("copying KV block ", from, " to ", to, ": the cache has ", num_blocks, " blocks"));
  }
  return absl::OkStatus();
}

std::uint64_t DecoderModel::BlockBytes(const ModelConfig& config, int block_tokens, DType kv_dtype) {
  return 2 * ElementBytes(kv_dtype) * static_cast<std::uint64_t>(config.num_layers) *
         static_cast<std::uint64_t>(config.kv_size()) * static_cast<std::uint64_t>(block_tokens);
}

std::uint64_t DecoderModel::WorkspaceBytes(const ModelConfig& config, const DecoderModelOptions& options) {
  std::uint64_t bytes = 0;
  for (const WorkspacePart& part : WorkspaceParts(config, options)) bytes += part.size_bytes;
  return bytes;
}

std::vector<WorkspacePart> DecoderModel::WorkspaceParts(const ModelConfig& config, const DecoderModelOptions& options) {
  if (options.device == Device::kCpu) return {};
  return CudaDecoderWorkspaceParts(config, options);
}

absl::StatusOr<std::unique_ptr<DecoderModel>> DecoderModel::Create(const ModelConfig& config, const WeightLayout& layout,
                                                                   const std::byte* weights, std::span<std::byte> kv_cache,
                                                                   const DecoderModelOptions& options) {
  const auto fault = [&](const auto&... parts) {
    return absl::InvalidArgumentError(absl::StrCat("model '", config.name, "': ", parts...));
  };
  if (layout.layers.size() != static_cast<std::size_t>(config.num_layers)) {
    return fault(config.num_layers, " layers, the weight layout has ", layout.layers.size());
  }
  if (config.num_kv_heads < 1 || config.num_heads % config.num_kv_heads != 0) {
    return fault(config.num_heads, " heads over ", config.num_kv_heads, " KV heads; the quotient must be whole");
  }
  if (config.head_dim < 2 || config.head_dim % 2 != 0) return fault("head_dim ", config.head_dim, " is not even");
  if (options.block_tokens < 1 || options.num_blocks < 1) {
    return fault("KV cache of ", options.num_blocks, " blocks of ", options.block_tokens, " tokens");
  }
  const std::uint64_t needed =
      static_cast<std::uint64_t>(options.num_blocks) * BlockBytes(config, options.block_tokens, options.kv_dtype);
  if (kv_cache.size() < needed) {
    return fault("KV cache of ", options.num_blocks, " blocks of ", options.block_tokens, " tokens needs ", needed,
                 " bytes, the region has ", kv_cache.size());
  }
  return options.device == Device::kCuda ? CreateCudaDecoderModel(config, layout, weights, kv_cache, options)
                                         : CreateCpuDecoderModel(config, layout, weights, kv_cache, options);
}

}  // namespace tandem
