// Cosines and sines of rotary embeddings by position (Su et al. 2021, arXiv 2104.09864), with Llama 3's scaling of long
// wavelengths. Thread-compatible: Ensure before sharing.
#pragma once

#include <cstdint>
#include <vector>

#include "common/model/model_config.h"

namespace tandem {

// Radians a position, [head_dim / 2].
std::vector<double> RopeFrequencies(const ModelConfig& config);

template <typename T>
class RopeTable {
 public:
  explicit RopeTable(const ModelConfig& config);
  // Makes positions [0, num_positions) available.
  void Ensure(std::int64_t num_positions);
  const T* cosines(std::int64_t position) const { return cosines_.data() + position * half_; }  // [head_dim / 2]
  const T* sines(std::int64_t position) const { return sines_.data() + position * half_; }

 private:
  std::int64_t half_;
  std::vector<double> frequencies_;  // [head_dim / 2], radians a position
  std::vector<T> cosines_, sines_;   // [positions, head_dim / 2]
};

}  // namespace tandem
