#include "common/torch/rope_table.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace tandem {
namespace {

// Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between blended.
double Scaled(double frequency, const RopeScaling& scaling) {
  const double wavelength = 2 * std::numbers::pi / frequency, original = scaling.original_max_positions;
  if (wavelength < original / scaling.high_freq_factor) return frequency;
  if (wavelength > original / scaling.low_freq_factor) return frequency / scaling.factor;
  const double smooth = (original / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor);
  return (1 - smooth) * frequency / scaling.factor + smooth * frequency;
}

}  // namespace

std::vector<double> RopeFrequencies(const ModelConfig& config) {
  std::vector<double> frequencies;
  for (std::int64_t i = 0; i < config.head_dim / 2; ++i) {
    const double frequency = std::pow(config.rope_theta, -2.0 * static_cast<double>(i) / config.head_dim);
    frequencies.push_back(config.rope_scaling.has_value() ? Scaled(frequency, *config.rope_scaling) : frequency);
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
