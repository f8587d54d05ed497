// AdamW with decoupled weight decay (Loshchilov and Hutter, 2019, arXiv 1711.05101, algorithm 2) after clipping the global norm.
#pragma once

#include <cstdint>
#include <span>

#include "common/base/status.h"

namespace tandem {

struct AdamWOptions {
  double beta1 = 0.9;
  double beta2 = 0.99;
  double epsilon = 1e-8;
  double weight_decay = 0;
  double max_grad_norm = 1;  // 0: off
};

struct AdamWReport {
  double grad_norm = 0;  // before clipping
  bool is_clipped = false;
};

// One step over flat fp32 arrays of equal length. `step` counts from 1. Errors: FAILED_PRECONDITION when the norm is not finite;
// nothing is then changed.
absl::StatusOr<AdamWReport> AdamWStep(const AdamWOptions& options, double learning_rate, std::uint64_t step,
                                      std::span<float> parameters, std::span<const float> gradients,
                                      std::span<float> first_moments, std::span<float> second_moments);

}  // namespace tandem
