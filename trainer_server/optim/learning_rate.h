// The learning rate of each optimizer step: warm-up, then constant, linear or cosine decay. A pure function of the step, so that
// a resumed job continues where it was.
#pragma once

#include <cstdint>

namespace tandem {

enum class LearningRateDecay { kConstant, kLinear, kCosine };

struct LearningRateOptions {
  double peak = 1e-6;
  LearningRateDecay decay = LearningRateDecay::kConstant;
  std::uint64_t warmup_steps = 0;
  std::uint64_t num_steps = 1;  // of the job; the last step has peak * final_ratio
  double final_ratio = 0;       // ignored by kConstant
};

// `step` counts from 1. Warm-up rises linearly: step 1 of 4 has a quarter of the peak, step 4 the peak. Example: peak 1, linear
// to 0, 2 of 6 steps warm up: 0.5, 1, 0.75, 0.5, 0.25, 0.
double LearningRateAt(const LearningRateOptions& options, std::uint64_t step);

}  // namespace tandem
