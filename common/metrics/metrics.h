// Metrics of a daemon, served at /metrics. Names begin with tandem_; base units; labels from small closed sets. Thread-safe.
//
// A family has at most kMaxSeries series: what would be one more is left out and counted in
// tandem_metrics_series_refused_total, so that no job can grow a daemon or its scraper without bound.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/base/status.h"
#include "common/metrics/metric.h"

namespace tandem {

inline constexpr std::size_t kMaxSeries = 1024;

inline constexpr Metric kSeriesRefusedTotal = {.name = "tandem_metrics_series_refused_total",
                                               .type = Metric::Type::kCounter,
                                               .help = "Values left out because their family has 1024 series already"};

// In each call `labels` are the values of Metric::labels, in their order, and `metric` outlives the object.
class Metrics {
 public:
  using LabelValues = std::vector<std::string>;
  // Serves on `address` ("127.0.0.1:9091"; port 0 picks one). Empty: collects without serving. Errors: UNAVAILABLE (address in
  // use).
  static absl::StatusOr<std::unique_ptr<Metrics>> Create(const std::string& address);
  virtual ~Metrics() = default;
  virtual void SetGauge(const Metric& metric, const LabelValues& labels, double value) = 0;
  // All series of the family: those that are not in `values` go.
  virtual void ReplaceGauges(const Metric& metric, const std::vector<std::pair<LabelValues, double>>& values) = 0;
  virtual void AddCounter(const Metric& metric, const LabelValues& labels, double value) = 0;
  virtual void Observe(const Metric& metric, const LabelValues& labels, double value) = 0;
  virtual void RemoveLabel(const std::string& label, const std::string& value) = 0;  // a job ended: its series go
  virtual int port() const = 0;
  virtual std::string Text() const = 0;  // the exposition format
};

}  // namespace tandem
