#include "trainer_server/optim/learning_rate.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "common/base/check.h"

namespace tandem {

double LearningRateAt(const LearningRateOptions& options, std::uint64_t step) {
  TANDEM_CHECK(step >= 1, "step counts from 1");
  if (step <= options.warmup_steps) return options.peak * static_cast<double>(step) / static_cast<double>(options.warmup_steps);
  if (options.decay == LearningRateDecay::kConstant) return options.peak;
  const std::uint64_t first = std::max<std::uint64_t>(options.warmup_steps, 1);
  const double span = options.num_steps > first ? static_cast<double>(options.num_steps - first) : 1;
  const double progress = std::min(1.0, static_cast<double>(step - first) / span);
  const double left =
      options.decay == LearningRateDecay::kLinear ? 1 - progress : 0.5 * (1 + std::cos(std::numbers::pi * progress));
  return options.peak * (options.final_ratio + (1 - options.final_ratio) * left);
}

}  // namespace tandem
