// A family of metrics as its room declares it, once: what is served, and what docs/metrics.md says of it.
#pragma once

#include <array>
#include <span>
#include <string_view>

namespace tandem {

struct Metric {
  enum class Type { kGauge, kCounter, kHistogram };

  std::string_view name;  // begins with tandem_, ends with the base unit; counters with _total
  Type type = Type::kGauge;
  std::string_view help;                        // one line
  std::array<std::string_view, 3> labels = {};  // names; empty: no further ones
  std::span<const double> buckets = {};         // upper bounds, of histograms
  std::string_view history = {};                // of the trainer: the value of a job's history; '*' stands for the last label
  bool needs_gpu = false;

  constexpr std::size_t num_labels() const {
    std::size_t count = 0;
    while (count < labels.size() && !labels[count].empty()) ++count;
    return count;
  }
};

// Upper bounds of histograms of durations, in seconds.
inline constexpr double kSecondsBuckets[] = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60};

}  // namespace tandem
