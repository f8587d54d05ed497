// A LoRA adapter as Python `peft` keeps it: a directory with adapter_config.json and adapter_model.safetensors. Reads one into
// the bytes of a slot (AdapterLayout) and writes a slot as one. What would change the computation and is not supported (DoRA,
// biases, modules saved whole, ranks or alphas by pattern, some layers only) is refused, never left out.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "common/model/safetensors.h"
#include "common/model/weight_layout.h"

namespace tandem {

inline constexpr int kMaxAdapterRank = 1024;

struct PeftConfig {
  int rank = 0;
  double alpha = 0;
  bool use_rslora = false;          // rank-stabilised: Kalajdzievski 2023, arXiv 2312.03732
  std::vector<LinearKind> targets;  // sorted, unique
  std::string base_model;           // a name or path, for people; may be empty
  // y = W x + scale B (A x): alpha / rank, or alpha / sqrt(rank) when rank-stabilised.
  double scale() const;
};

// Immutable; thread-safe.
class PeftAdapter {
 public:
  // Reads and checks everything but the values. Errors: NOT_FOUND (a file), INVALID_ARGUMENT naming file, field or tensor, value
  // and limit; UNIMPLEMENTED naming what is not supported.
  static absl::StatusOr<PeftAdapter> Open(const std::string& directory, const ModelConfig& model);

  const PeftConfig& config() const { return config_; }
  const AdapterLayout& layout() const { return layout_; }
  // Writes every matrix, as fp32, to its place. Errors: INVALID_ARGUMENT (the slot is smaller than layout().total_bytes, the file
  // changed). The slot's content is unspecified after an error.
  absl::Status Load(std::span<std::byte> slot) const;

 private:
  PeftAdapter(PeftConfig config, AdapterLayout layout, SafetensorsFile tensors)
      : config_(std::move(config)), layout_(std::move(layout)), tensors_(std::move(tensors)) {}

  PeftConfig config_;
  AdapterLayout layout_;
  SafetensorsFile tensors_;
};

// Makes `directory` when it is missing. Each file appears whole or not at all, adapter_config.json last. Requires: `slot` holds
// an adapter as AdapterLayout::Create(model, config.rank, config.targets) lays it. Errors: INVALID_ARGUMENT (a field out of
// range, a slot too small), else the system's.
absl::Status WritePeftAdapter(const std::string& directory, const ModelConfig& model, const PeftConfig& config,
                              std::span<const std::byte> slot);

}  // namespace tandem
