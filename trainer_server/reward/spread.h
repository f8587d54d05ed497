// Mean and spread of rewards, exact where all are equal. Pure functions; thread-safe.
#pragma once

#include <cstddef>
#include <span>

namespace tandem {

// Mean and sample standard deviation (ddof 1). Equal values, decided by min == max, give that value and 0 exactly.
struct Spread {
  double mean = 0;
  double std = 0;
  std::size_t count = 0;  // below 2 the standard deviation is undefined, and 0 here
};
Spread ComputeSpread(std::span<const double> values);

}  // namespace tandem
