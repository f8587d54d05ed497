// Llama 3's long-context rope scaling (Llama 3.1 report, "rope_type": "llama3").
#pragma once

#include <numbers>

#include "common/model/model_config.h"

namespace tandem {

// Of a rotary pair, radians a position: long wavelengths are stretched by `factor`, short ones kept, those between blended.
inline double ScaledRopeFrequency(double frequency, const RopeScaling& scaling) {
  const double wavelength = 2 * std::numbers::pi / frequency, original = scaling.original_max_positions;
  if (wavelength < original / scaling.high_freq_factor) return frequency;
  if (wavelength > original / scaling.low_freq_factor) return frequency / scaling.factor;
  const double smooth = (original / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor);
  return (1 - smooth) * frequency / scaling.factor + smooth * frequency;
}

}  // namespace tandem
