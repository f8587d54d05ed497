// A model for benches: read from a file, or random in the shape of SmolLM2-135M, whose speed does not depend on its values.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "common/base/status.h"
#include "common/model/model_config.h"
#include "common/model/weight_layout.h"

namespace tandem {

// Zeroed bytes on a 64-byte boundary.
class BenchBytes {
 public:
  explicit BenchBytes(std::uint64_t size_bytes);
  std::span<std::byte> span() const { return {bytes_.get(), size_}; }
  void FillRandom() const;  // floats in [-0.05, 0.05)

 private:
  std::uint64_t size_;
  std::unique_ptr<std::byte[], void (*)(std::byte*)> bytes_;
};

struct BenchModel {
  ModelConfig config;
  WeightLayout layout;
  BenchBytes weights;

  // `path` empty: random.
  static absl::StatusOr<BenchModel> Open(const std::string& path);
};

}  // namespace tandem
