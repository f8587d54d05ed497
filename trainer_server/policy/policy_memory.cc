#include "trainer_server/policy/policy_memory.h"

#include <algorithm>

#include "common/base/units.h"

namespace tandem {
namespace {

constexpr std::int64_t kSumBytes = 4;
constexpr std::int64_t kHeadRows = 1024;
constexpr std::int64_t kHeadColumns = 16384;
constexpr std::int64_t kHeadStateBytes = 64;  // at least a TokenLogprobState
constexpr std::int64_t kIndexArrays = 16;     // of 4 bytes a row: tokens, positions, head rows, ranges of attention

constexpr std::int64_t kArenaAlignmentBytes = 256;

// The CPU's: columns of packed keys, tiles of LinearHead's defaults, and buffers that live at a time.
constexpr std::int64_t kColumnAlignment = 16;
constexpr std::int64_t kCpuHeadRows = 256;
constexpr std::int64_t kCpuHeadColumns = 2048;
constexpr std::int64_t kCpuBuffers = 24;

std::uint64_t Unsigned(std::int64_t bytes) { return static_cast<std::uint64_t>(bytes); }
// A tile of the widest input, with its dropout mask on.
std::int64_t DroppedBytes(const ModelConfig& config, const PolicyPass& pass, std::int64_t element, std::int64_t tile_rows) {
  const std::int64_t widest = std::max({config.hidden_size, config.q_size(), config.intermediate_size});
  return pass.has_dropout ? element * widest * std::min(pass.rows, tile_rows) : 0;
}
std::uint64_t InSlot(std::int64_t bytes) { return RoundUp(Unsigned(bytes), static_cast<std::uint64_t>(kArenaAlignmentBytes)); }

}  // namespace

HeadTile ChooseHeadTile(const ModelConfig& config, std::int64_t element_bytes, std::int64_t logit_chunk,
                        std::int64_t num_head_rows) {
  HeadTile tile;
  tile.columns = std::min<std::int64_t>(config.vocab_size, kHeadColumns);
  const std::int64_t row_bytes = tile.columns * (kSumBytes + element_bytes) + config.hidden_size * kSumBytes + kHeadStateBytes;
  const std::int64_t wanted =
      std::min(logit_chunk > 0 ? logit_chunk : kHeadRows, static_cast<std::int64_t>(kMaxHeadScratchBytes) / row_bytes);
  tile.rows = std::max<std::int64_t>(std::min(wanted, num_head_rows), 1);
  tile.scratch_bytes = Unsigned(tile.rows * row_bytes);
  return tile;
}

PolicyMemory PlanPolicyMemory(const ModelConfig& config, StorageFormat format, const AttentionOptions& attention,
                              const PolicyPass& pass) {
  const std::int64_t rows = pass.rows, head_rows = pass.head_rows, rank = pass.rank;
  const std::int64_t element = format == StorageFormat::kFp32 ? kSumBytes : 2;
  const std::int64_t d = config.hidden_size, f = config.intermediate_size, q = config.q_size(), kv = config.kv_size();
  const std::int64_t qkv = q + 2 * kv;
  const std::int64_t layer_weights = d * qkv + q * d + d * 2 * f + f * d;
  const std::int64_t adapter_elements = config.num_layers * rank * ((d + q) + 2 * (d + kv) + (q + d) + 2 * (d + f) + (f + d));

  // The whole pass: indices, the rotary tables, the adapter as elements.
  const std::int64_t standing =
      4 * kIndexArrays * rows + 4 * config.head_dim * rows + (element == kSumBytes ? 0 : element * adapter_elements);
  // All rows at once.
  const std::int64_t residual = kSumBytes * d * rows;  // hidden, or its gradient: there is room for both from the start
  const std::int64_t attention_output = (element * q + kSumBytes * config.num_heads) * rows;
  const std::int64_t unnormed = config.has_qk_norm ? element * (q + kv) * rows : 0;
  const std::int64_t attention_gradients = element * (q + qkv) * rows;
  const std::int64_t values = IsQuantized(format) ? element * layer_weights : 0;
  // One tile.
  const std::int64_t tile_rows = std::min(rows, kCudaTileRows);
  const std::int64_t forward_tile = element * (d + f + rank) + kSumBytes * 2 * f;
  const std::int64_t backward_tile = element * (2 * d + 4 * f + 4 * rank) + kSumBytes * d;

  const AttentionScratch scratch = PlanAttentionScratch(config, format, attention, rows);
  const std::int64_t head = 2 * residual + element * d * head_rows + 24 * head_rows +
                            static_cast<std::int64_t>(ChooseHeadTile(config, element, pass.logit_chunk, head_rows).scratch_bytes);
  const std::int64_t head_gradient = 2 * residual + element * d * (head_rows + std::min(rows, head_rows));
  const auto peak_of = [&](std::int64_t output) {
    const std::int64_t layer = residual + element * qkv * rows + output + values;
    const std::int64_t forward = layer + residual + std::max(tile_rows * forward_tile, scratch.forward_bytes);
    const std::int64_t mlp_backward = layer + unnormed + tile_rows * backward_tile;
    const std::int64_t attention_backward = layer + unnormed + attention_gradients + scratch.backward_bytes;
    return Unsigned(standing + std::max({forward, head, head_gradient, mlp_backward, attention_backward}));
  };

  PolicyMemory memory;
  memory.working_bytes = peak_of(attention_output);
  memory.saved_bytes = memory.working_bytes - peak_of(0);
  memory.working_bytes += Unsigned(DroppedBytes(config, pass, element, kCudaTileRows));
  memory.layer_input_bytes = InSlot(element * d * rows);
  memory.layer_attention_bytes = InSlot(element * q * rows) + InSlot(kSumBytes * config.num_heads * rows);
  return memory;
}

KeptLayers ChooseKeptLayers(const PolicyMemory& memory, std::int64_t num_layers, std::uint64_t spare_bytes,
                            std::uint64_t host_limit_bytes) {
  const auto choose = [&](bool keeps_attention) {
    KeptLayers kept{.keeps_attention = keeps_attention};
    kept.slot_bytes = memory.layer_input_bytes + (keeps_attention ? memory.layer_attention_bytes : 0);
    const auto room = static_cast<std::int64_t>(spare_bytes / kept.slot_bytes);
    kept.num_slots = std::clamp(room, std::min(kMinLayerInputSlots, num_layers), num_layers);
    kept.host_bytes = Unsigned(num_layers - kept.num_slots) * kept.slot_bytes;
    return kept;
  };
  const KeptLayers with_attention = choose(true);
  const bool fits = Unsigned(with_attention.num_slots) * with_attention.slot_bytes <= spare_bytes &&
                    with_attention.host_bytes <= host_limit_bytes;
  return fits ? with_attention : choose(false);
}

PolicyMemory PlanCpuPolicyMemory(const ModelConfig& config, const PolicyPass& pass) {
  const std::int64_t rows = pass.rows, head_rows = pass.head_rows, rank = pass.rank;
  const std::int64_t d = config.hidden_size, f = config.intermediate_size, q = config.q_size(), kv = config.kv_size();
  const std::int64_t qkv = q + 2 * kv;
  const std::int64_t columns = kv * (rows + (kColumnAlignment - 1) * pass.num_segments);  // of keys, and of values
  const std::int64_t tile_rows = std::min(rows, kCpuTileRows);
  const std::int64_t head_tile_rows = std::min(head_rows, pass.logit_chunk > 0 ? pass.logit_chunk : kCpuHeadRows);
  const std::int64_t head_tile = head_tile_rows * (std::min<std::int64_t>(config.vocab_size, kCpuHeadColumns) + d);

  const std::int64_t forward_rows = rows * (qkv + q + config.num_heads);
  const std::int64_t unnormed = config.has_qk_norm ? rows * (q + kv) : 0;
  const std::int64_t forward = columns + 2 * rows * d + forward_rows + tile_rows * (d + 3 * f + rank);
  const std::int64_t head = columns + 2 * rows * d + 2 * head_rows * d + head_tile;
  const std::int64_t head_gradient = columns + 2 * rows * d + head_rows * d;
  const std::int64_t backward = 2 * columns + rows * d + forward_rows + unnormed;
  const std::int64_t lora = 4 * rank;  // x through A, and the gradients of up to three linears of one product
  const std::int64_t mlp_backward = backward + tile_rows * (3 * d + 4 * f + lora);
  const std::int64_t output_backward = backward + rows * (qkv + q) + tile_rows * (2 * d + lora);
  const std::int64_t qkv_backward = backward + rows * qkv + tile_rows * (3 * d + lora);

  PolicyMemory memory;
  memory.working_bytes =
      Unsigned(kSumBytes * std::max({forward, head, head_gradient, mlp_backward, output_backward, qkv_backward}) +
               kCpuBuffers * kArenaAlignmentBytes + DroppedBytes(config, pass, kSumBytes, kCpuTileRows));
  memory.layer_input_bytes = Unsigned(kSumBytes * d * rows);
  return memory;
}

}  // namespace tandem
