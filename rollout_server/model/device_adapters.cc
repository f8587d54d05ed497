#include "rollout_server/model/device_adapters.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>

#include "common/base/units.h"
#include "common/gpu/cuda_status.h"
#include "kernels/kv_cache/kv_cache.h"

namespace tandem {
namespace {

constexpr std::uint64_t kAlignment = 256;
constexpr std::int64_t kBf16Bytes = 2;
constexpr std::uint64_t kWidthStep = 8;  // columns of B in one 16-byte packet
constexpr std::uint64_t kMaxParts = 3;
// A version that was in use this many steps ago may still be, by a lane that waits for its turn.
constexpr std::uint64_t kStepsInUse = 2;

std::span<const LinearKind> PartsOf(LinearGroup group) {
  static constexpr std::array kQkv = {LinearKind::kQProj, LinearKind::kKProj, LinearKind::kVProj};
  static constexpr std::array kO = {LinearKind::kOProj}, kDown = {LinearKind::kDownProj};
  static constexpr std::array kGateUp = {LinearKind::kGateProj, LinearKind::kUpProj};
  switch (group) {
    case LinearGroup::kQkv:
      return kQkv;
    case LinearGroup::kO:
      return kO;
    case LinearGroup::kGateUp:
      return kGateUp;
    default:
      return kDown;
  }
}

struct GroupShape {
  std::int64_t inputs = 0;
  std::int64_t outputs = 0;
};
GroupShape ShapeOf(const ModelConfig& config, LinearGroup group) {
  GroupShape shape;
  for (const LinearKind kind : PartsOf(group)) {
    shape.inputs = ShapeOf(config, kind).inputs;
    shape.outputs += ShapeOf(config, kind).outputs;
  }
  return shape;
}

std::uint64_t MatrixBytes(std::int64_t rows, std::int64_t columns) {
  return RoundUp(static_cast<std::uint64_t>(rows * columns * kBf16Bytes), kAlignment);
}

// Bytes of one adapter with an equal rank on every linear layer.
std::uint64_t AdapterBytes(const ModelConfig& config, int rank) {
  std::uint64_t bytes = 0;
  for (int group = 0; group < kNumLinearGroups; ++group) {
    const auto which = static_cast<LinearGroup>(group);
    const GroupShape shape = ShapeOf(config, which);
    const auto width = static_cast<std::int64_t>(RoundUp(PartsOf(which).size() * static_cast<std::uint64_t>(rank), kWidthStep));
    bytes += MatrixBytes(width, shape.inputs) + MatrixBytes(shape.outputs, width);
  }
  return bytes * static_cast<std::uint64_t>(config.num_layers);
}

}  // namespace

std::uint64_t DeviceAdapters::MaxWidth(int max_rank) {
  return RoundUp(kMaxParts * static_cast<std::uint64_t>(max_rank), kWidthStep);
}

std::uint64_t DeviceAdapters::Bytes(const ModelConfig& config, int max_adapters, int max_rank) {
  return static_cast<std::uint64_t>(max_adapters) * AdapterBytes(config, max_rank);
}

DeviceAdapters::DeviceAdapters(const ModelConfig& config, int max_adapters, int max_rank, std::byte* memory)
    : config_(config), max_rank_(max_rank), memory_(memory), entries_(static_cast<std::size_t>(max_adapters)) {}

DeviceAdapters::Entry* DeviceAdapters::Find(const AdapterView& view) {
  if (view.activation_id == 0) return nullptr;
  const auto found = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& entry) {
    return entry.slot == view.slot && entry.activation_id == view.activation_id;
  });
  return found == entries_.end() ? nullptr : &*found;
}

// The first entry that nobody has used lately: few entries in turn, so that few steps are captured. Else the one used longest
// ago.
DeviceAdapters::Entry* DeviceAdapters::Replace() {
  for (Entry& entry : entries_) {
    if (entry.last_step == 0 || entry.last_step + kStepsInUse < step_) return &entry;
  }
  return &*std::min_element(entries_.begin(), entries_.end(),
                            [](const Entry& a, const Entry& b) { return a.last_step < b.last_step; });
}

absl::Status DeviceAdapters::Load(std::span<const AdapterView> views, void* stream, std::vector<const DeviceAdapter*>* adapters) {
  if (views.size() > entries_.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("step batch: ", views.size(), " adapters, the model was made for ", entries_.size()));
  }
  ++step_;
  std::vector<Entry*> found;
  for (const AdapterView& view : views) {
    found.push_back(Find(view));
    if (found.back() != nullptr) found.back()->last_step = step_;
  }
  for (std::size_t i = 0; i < views.size(); ++i) {
    if (found[i] == nullptr) {
      found[i] = Replace();
      found[i]->last_step = step_;
      TANDEM_RETURN_IF_ERROR(Convert(views[i], stream, found[i]));
    }
    adapters->push_back(&found[i]->adapter);
  }
  return absl::OkStatus();
}

absl::Status DeviceAdapters::Convert(const AdapterView& view, void* stream, Entry* entry) {
  const AdapterLayout& layout = *view.layout;
  if (layout.rank > max_rank_) {
    return absl::InvalidArgumentError(absl::StrCat("adapter of rank ", layout.rank, ", the model was made for ", max_rank_));
  }
  const bool is_same_shape = entry->rank == layout.rank && entry->targets == layout.targets && entry->adapter.scale == view.scale;
  if (!is_same_shape) {
    if (entry->adapter.graph_id != 0) former_graph_ids_.push_back(entry->adapter.graph_id);
    entry->adapter.graph_id = next_graph_id_++;
  }
  entry->slot = nullptr;  // until it is whole
  entry->rank = layout.rank;
  entry->targets = layout.targets;
  entry->adapter.scale = view.scale;
  entry->adapter.pairs.assign(static_cast<std::size_t>(config_.num_layers * kNumLinearGroups), {});
  const std::uint64_t entry_bytes = AdapterBytes(config_, max_rank_);
  std::byte* next = memory_ + static_cast<std::uint64_t>(entry - entries_.data()) * entry_bytes;
  TANDEM_RETURN_IF_ERROR(
      CudaToStatus(cudaMemsetAsync(next, 0, entry_bytes, static_cast<cudaStream_t>(stream)), "clearing an adapter"));
  std::vector<RoundBlockParams> blocks;
  for (int layer = 0; layer < config_.num_layers; ++layer) {
    for (int g = 0; g < kNumLinearGroups; ++g) {
      const auto group = static_cast<LinearGroup>(g);
      const std::span<const LinearKind> parts = PartsOf(group);
      const auto num_parts = static_cast<std::uint64_t>(std::count_if(parts.begin(), parts.end(), [&](LinearKind kind) {
        return std::binary_search(layout.targets.begin(), layout.targets.end(), kind);
      }));
      if (num_parts == 0) continue;
      const GroupShape shape = ShapeOf(config_, group);
      DeviceAdapter::Pair& pair = entry->adapter.pairs[static_cast<std::size_t>(layer * kNumLinearGroups + g)];
      pair.width = static_cast<std::int64_t>(RoundUp(num_parts * static_cast<std::uint64_t>(layout.rank), kWidthStep));
      pair.a = next;
      pair.b = next + MatrixBytes(pair.width, shape.inputs);
      next = pair.b + MatrixBytes(shape.outputs, pair.width);
      std::int64_t column = 0, output = 0;
      for (const LinearKind kind : parts) {
        const std::int64_t outputs = ShapeOf(config_, kind).outputs;
        const auto target = std::lower_bound(layout.targets.begin(), layout.targets.end(), kind);
        if (target != layout.targets.end() && *target == kind) {
          const AdapterPlace& place = layout.places[static_cast<std::size_t>(layer) * layout.targets.size() +
                                                    static_cast<std::size_t>(target - layout.targets.begin())];
          blocks.push_back({.input = reinterpret_cast<const float*>(view.slot + place.a_begin_bytes),
                            .output = pair.a + column * shape.inputs * kBf16Bytes,
                            .num_rows = layout.rank,
                            .num_columns = shape.inputs,
                            .output_row_stride = shape.inputs});
          blocks.push_back({.input = reinterpret_cast<const float*>(view.slot + place.b_begin_bytes),
                            .output = pair.b + (output * pair.width + column) * kBf16Bytes,
                            .num_rows = outputs,
                            .num_columns = layout.rank,
                            .output_row_stride = pair.width});
          column += layout.rank;
        }
        output += outputs;
      }
    }
  }
  TANDEM_RETURN_IF_ERROR(RoundBlocks(blocks, Device::kCuda, stream));
  entry->slot = view.slot;
  entry->activation_id = view.activation_id;
  return absl::OkStatus();
}

}  // namespace tandem
