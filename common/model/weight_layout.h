// Where each weight lies in the pool's weights region: one layout for both daemons, fused qkv and fused gate/up, row-major
// [outputs, inputs], every tensor on a 64-byte boundary. It is a function of (ModelConfig, format) alone.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/model/model_config.h"

namespace tandem {

enum class StorageFormat { kFp32, kBf16 };

struct TensorPlace {
  std::string name;  // "layers.3.qkv"
  std::vector<std::int64_t> shape;
  std::uint64_t begin_bytes = 0;  // from the start of the weights region
  std::uint64_t size_bytes = 0;
};

struct LayerPlaces {
  TensorPlace input_norm;  // [d]
  TensorPlace qkv;         // [q + 2 kv, d]: rows of q, then k, then v; q and k rows in half-split rotary order
  TensorPlace o;           // [d, q]
  TensorPlace post_norm;   // [d]
  TensorPlace gate_up;     // [2 f, d]: rows of gate, then up
  TensorPlace down;        // [d, f]
};

struct WeightLayout {
  StorageFormat format = StorageFormat::kFp32;
  TensorPlace embedding;  // [V, d]
  std::vector<LayerPlaces> layers;
  TensorPlace final_norm;  // [d]
  TensorPlace head;        // [V, d]; the same place as `embedding` when tied
  std::uint64_t total_bytes = 0;
  std::string digest;  // SHA-256 over every place and the config: both daemons must agree

  static WeightLayout Create(const ModelConfig& config, StorageFormat format);
  std::vector<const TensorPlace*> Tensors() const;  // each once, in order of begin_bytes
};

// Where an adapter's matrices lie in its slot: per layer, per target in LinearKind order: A [rank, inputs], B [outputs, rank],
// fp32, each on a 64-byte boundary. The trainer writes slots, the rollout server reads them; see proto AdapterSlot.
struct AdapterPlace {
  int layer = 0;
  LinearKind kind = LinearKind::kQProj;
  std::uint64_t a_begin_bytes = 0;  // from the start of the slot
  std::uint64_t b_begin_bytes = 0;
  LinearShape shape;
};
struct AdapterLayout {
  int rank = 0;
  std::vector<LinearKind> targets;  // sorted, unique
  std::vector<AdapterPlace> places;
  std::uint64_t total_bytes = 0;
  std::uint64_t num_parameters = 0;
  static AdapterLayout Create(const ModelConfig& config, int rank, std::vector<LinearKind> targets);
};

}  // namespace tandem
