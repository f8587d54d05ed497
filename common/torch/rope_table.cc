#include "common/torch/rope_table.h"

#include <algorithm>
#include <cmath>

#include "common/model/rope_scaling.h"

namespace tandem {

std::vector<double> RopeFrequencies(const ModelConfig& config) {
  std::vector<double> frequencies;
  for (std::int64_t i = 0; i < config.head_dim / 2; ++i) {
    const double frequency = std::pow(config.rope_theta, -2.0 * static_cast<double>(i) / config.head_dim);
    frequencies.push_back(config.rope_scaling.has_value() ? ScaledRopeFrequency(frequency, *config.rope_scaling) : frequency);
  }
  return frequencies;
}

template <typename T>
RopeTable<T>::RopeTable(const ModelConfig& config) : half_(config.head_dim / 2), frequencies_(RopeFrequencies(config)) {}

template <typename T>
void RopeTable<T>::Ensure(std::int64_t num_positions) {
  const std::int64_t have = static_cast<std::int64_t>(cosines_.size()) / half_;
  if (num_positions <= have) return;
  const std::int64_t want = std::max<std::int64_t>({num_positions, 2 * have, 512});
  for (std::int64_t position = have; position < want; ++position) {
    for (const double frequency : frequencies_) {
      const double angle = static_cast<double>(position) * frequency;
      cosines_.push_back(static_cast<T>(std::cos(angle)));
      sines_.push_back(static_cast<T>(std::sin(angle)));
    }
  }
}

template class RopeTable<float>;
template class RopeTable<double>;

}  // namespace tandem
