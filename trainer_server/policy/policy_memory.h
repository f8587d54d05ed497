// What a policy's pass takes of the leased arena, from shapes alone: the network's buffers (policy_network.inc), added up stage
// by stage as they live. The memory plan proves a job with it, and the pass itself sizes by it how many layer inputs stay on the
// device. Pure; thread-safe.
#pragma once

#include <cstdint>

#include "common/model/model_config.h"
#include "common/model/weight_layout.h"
#include "trainer_server/policy/fused_attention.h"

namespace tandem {

// Rows of one tile of everything but attention: its buffers do not grow with the context.
inline constexpr std::int64_t kCpuTileRows = 1024;
inline constexpr std::int64_t kCudaTileRows = 2048;

// Rows and columns of one tile of logits.
struct HeadTile {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::uint64_t scratch_bytes = 0;  // at most kMaxHeadScratchBytes unless one row takes more
};
inline constexpr std::uint64_t kMaxHeadScratchBytes = std::uint64_t{256} << 20;
// `logit_chunk`: rows at most, 0: chosen. Products and the gradient's sums are fp32, the tile's gradient is of `element_bytes`.
HeadTile ChooseHeadTile(const ModelConfig& config, std::int64_t element_bytes, std::int64_t logit_chunk,
                        std::int64_t num_head_rows);

// Fewest layer inputs on the device: one is computed with while the next is on its way.
inline constexpr std::int64_t kMinLayerInputSlots = 2;

struct PolicyMemory {
  std::uint64_t working_bytes = 0;          // peak of one Forward and Backward on the GPU, without layer inputs
  std::uint64_t layer_input_bytes = 0;      // of one layer
  std::uint64_t layer_attention_bytes = 0;  // of one layer on the GPU, where attention's output is kept too: if there is room
  std::uint64_t saved_bytes = 0;            // of working_bytes, where it is
};
// One micro-batch. Nothing here grows with the group: micro-batches are counted one at a time.
struct PolicyPass {
  int rank = 0;  // of adapters on all linear layers
  std::int64_t rows = 0;
  std::int64_t head_rows = 0;     // that are scored
  std::int64_t num_segments = 0;  // prompts and completions; counts on the CPU, whose attention packs their keys and values in
                                  // columns, each from a multiple of 16 on
  std::int64_t logit_chunk = 0;   // rows of one head tile; 0: chosen
  bool has_dropout = false;
};
PolicyMemory PlanPolicyMemory(const ModelConfig& config, StorageFormat format, const AttentionOptions& attention,
                              const PolicyPass& pass);
// The same of the CPU's backend, in fp32, whose layer inputs stay in the arena.
PolicyMemory PlanCpuPolicyMemory(const ModelConfig& config, const PolicyPass& pass);

// What stays of every layer between the passes on a GPU, and where.
struct KeptLayers {
  std::int64_t num_slots = 0;  // layers on the device, the last ones; the others go to page-locked host memory
  bool keeps_attention = false;
  std::uint64_t slot_bytes = 0;  // of one layer
  std::uint64_t host_bytes = 0;
};
// With attention's output where `spare_bytes` of the device, beside working_bytes, and the host have room for that; else inputs
// alone, and then host_bytes may be beyond the limit.
KeptLayers ChooseKeptLayers(const PolicyMemory& memory, std::int64_t num_layers, std::uint64_t spare_bytes,
                            std::uint64_t host_limit_bytes);

}  // namespace tandem
