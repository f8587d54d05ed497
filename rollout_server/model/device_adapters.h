// Adapters as the GPU's products want them: bf16, and for each fused linear layer one A and one B for all its parts. A slot of
// the pool is converted when a step first names its activation, in stream order. Confined to the engine thread.
//
// Example, rank 2 on q and v of a qkv layer of outputs 4 + 2 + 2: A is [8, d], q's two rows, then v's, then zeros up to a
// multiple of 8; B is [8, 8] with q's [4, 2] in rows 0 to 3 of columns 0, 1 and v's [2, 2] in rows 6, 7 of columns 2, 3, zero
// elsewhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "rollout_server/model/decoder_model.h"

namespace tandem {

enum class LinearGroup { kQkv, kO, kGateUp, kDown };
inline constexpr int kNumLinearGroups = 4;

struct DeviceAdapter {
  struct Pair {
    std::byte* a = nullptr;  // [width, inputs] bf16
    std::byte* b = nullptr;  // [outputs, width] bf16
    std::int64_t width = 0;  // 0: no adapter on this layer
  };
  std::vector<Pair> pairs;  // [num_layers, kNumLinearGroups]
  float scale = 0;
  std::uint64_t graph_id = 0;  // from 1; equal while the addresses, widths and scale are

  const Pair& pair(int layer, LinearGroup group) const {
    return pairs[static_cast<std::size_t>(layer * kNumLinearGroups + static_cast<int>(group))];
  }
};

class DeviceAdapters {
 public:
  // The widest A of any layer.
  static std::uint64_t MaxWidth(int max_rank);
  static std::uint64_t Bytes(const ModelConfig& config, int max_adapters, int max_rank);
  // `memory`: Bytes of device memory on a 256-byte boundary; outlives this.
  DeviceAdapters(const ModelConfig& config, int max_adapters, int max_rank, std::byte* memory);
  // What each view is on the device, valid until the next call. Enqueues what is missing. Errors: INVALID_ARGUMENT (rank,
  // number).
  absl::Status Load(std::span<const AdapterView> views, void* stream, std::vector<const DeviceAdapter*>* adapters);
  // The graph_ids that have been given up since the last call: no step will come under them again.
  std::vector<std::uint64_t> TakeFormerGraphIds() { return std::exchange(former_graph_ids_, {}); }

 private:
  struct Entry {
    DeviceAdapter adapter;
    const std::byte* slot = nullptr;
    std::uint64_t activation_id = 0;
    int rank = 0;
    std::vector<LinearKind> targets;
    std::uint64_t last_step = 0;  // 0: never used
  };
  Entry* Find(const AdapterView& view);
  Entry* Replace();
  absl::Status Convert(const AdapterView& view, void* stream, Entry* entry);

  const ModelConfig config_;
  const int max_rank_;
  std::byte* const memory_;
  std::vector<Entry> entries_;
  std::uint64_t step_ = 0;
  std::uint64_t next_graph_id_ = 1;
  std::vector<std::uint64_t> former_graph_ids_;
};

}  // namespace tandem
