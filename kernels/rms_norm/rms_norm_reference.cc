#include <cmath>

#include "kernels/rms_norm/rms_norm.h"

namespace tandem {

void RmsNormReference(const RmsNormParams& params) {
  const auto* input = static_cast<const float*>(params.input);
  const auto* weight = static_cast<const float*>(params.weight);
  auto* output = static_cast<float*>(params.output);
  for (std::int64_t row = 0; row < params.num_rows; ++row) {
    const float* x = input + row * params.width;
    float* y = output + row * params.width;
    double sum = 0;
    for (std::int64_t i = 0; i < params.width; ++i) sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
    const double scale = 1.0 / std::sqrt(sum / static_cast<double>(params.width) + static_cast<double>(params.epsilon));
    for (std::int64_t i = 0; i < params.width; ++i) {
      y[i] = static_cast<float>(static_cast<double>(x[i]) * scale * static_cast<double>(weight[i]));
    }
  }
}

}  // namespace tandem
