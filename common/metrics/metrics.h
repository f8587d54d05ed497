// Metrics of a daemon, served at /metrics. Names begin with tandem_; base units; labels from small closed sets. Thread-safe.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/base/status.h"

namespace tandem {

class Metrics {
 public:
  using Labels = std::map<std::string, std::string>;
  // Serves on `address` ("127.0.0.1:9091"; port 0 picks one). Empty: collects without serving. Errors: UNAVAILABLE (address in
  // use).
  static absl::StatusOr<std::unique_ptr<Metrics>> Create(const std::string& address);
  virtual ~Metrics() = default;
  virtual void SetGauge(const std::string& name, const std::string& help, const Labels& labels, double value) = 0;
  virtual void AddCounter(const std::string& name, const std::string& help, const Labels& labels, double value) = 0;
  // The first call for a name fixes the buckets.
  virtual void Observe(const std::string& name, const std::string& help, const Labels& labels, const std::vector<double>& buckets,
                       double value) = 0;
  virtual void RemoveLabel(const std::string& label, const std::string& value) = 0;  // a job ended: its series go
  virtual int port() const = 0;
  virtual std::string Text() const = 0;  // the exposition format
};

}  // namespace tandem
