#include "trainer_server/reward/spread.h"

#include <algorithm>
#include <cmath>

namespace tandem {

Spread ComputeSpread(std::span<const double> values) {
  Spread spread;
  spread.count = values.size();
  if (values.empty()) return spread;
  const auto [low, high] = std::ranges::minmax(values);
  if (low == high) {
    spread.mean = low;
    return spread;
  }
  const auto count = static_cast<double>(values.size());
  for (const double value : values) spread.mean += value;
  spread.mean /= count;
  double squares = 0;
  for (const double value : values) squares += (value - spread.mean) * (value - spread.mean);
  spread.std = std::sqrt(squares / (count - 1));
  return spread;
}

}  // namespace tandem
