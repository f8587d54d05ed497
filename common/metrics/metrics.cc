#include "common/metrics/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/exposer.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <exception>
#include <utility>

#include "common/base/check.h"
#include "common/base/mutex.h"

namespace tandem {
namespace {

// The families of one type and their series; prometheus keeps no way back from labels to a series.
template <typename T>
struct Families {
  struct Entry {
    prometheus::Family<T>* family = nullptr;
    std::vector<double> buckets;
    std::map<Metrics::Labels, T*> series;
  };
  std::map<std::string, Entry> by_name;

  void RemoveLabel(const std::string& label, const std::string& value) {
    for (auto& [name, entry] : by_name) {
      for (auto it = entry.series.begin(); it != entry.series.end();) {
        const auto found = it->first.find(label);
        if (found != it->first.end() && found->second == value) {
          entry.family->Remove(it->second);
          it = entry.series.erase(it);
        } else {
          ++it;
        }
      }
    }
  }
};

class PrometheusMetrics final : public Metrics {
 public:
  absl::Status Expose(const std::string& address) {
    try {
      exposer_ = std::make_unique<prometheus::Exposer>(address, /*num_threads=*/2);
      exposer_->RegisterCollectable(registry_);
      const std::vector<int> ports = exposer_->GetListeningPorts();
      if (ports.empty()) return absl::UnavailableError(absl::StrCat("serving metrics at '", address, "': no listening port"));
      port_ = ports.front();
    } catch (const std::exception& e) {
      return absl::UnavailableError(
          absl::StrCat("serving metrics at '", address, "': ", e.what(), " (address in use or not local?)"));
    }
    return absl::OkStatus();
  }

  void SetGauge(const std::string& name, const std::string& help, const Labels& labels, double value) override {
    MutexLock lock(&mutex_);
    auto& entry = gauges_.by_name[name];
    if (entry.family == nullptr) {
      ClaimName(name, 'g');
      entry.family = &prometheus::BuildGauge().Name(name).Help(help).Register(*registry_);
    }
    auto [it, is_new] = entry.series.try_emplace(labels, nullptr);
    if (is_new) it->second = &entry.family->Add(labels);
    it->second->Set(value);
  }

  void AddCounter(const std::string& name, const std::string& help, const Labels& labels, double value) override {
    TANDEM_CHECK(value >= 0, "counter ", name, " lowered by ", value);
    MutexLock lock(&mutex_);
    auto& entry = counters_.by_name[name];
    if (entry.family == nullptr) {
      ClaimName(name, 'c');
      entry.family = &prometheus::BuildCounter().Name(name).Help(help).Register(*registry_);
    }
    auto [it, is_new] = entry.series.try_emplace(labels, nullptr);
    if (is_new) it->second = &entry.family->Add(labels);
    it->second->Increment(value);
  }

  void Observe(const std::string& name, const std::string& help, const Labels& labels, const std::vector<double>& buckets,
               double value) override {
    MutexLock lock(&mutex_);
    auto& entry = histograms_.by_name[name];
    if (entry.family == nullptr) {
      ClaimName(name, 'h');
      entry.family = &prometheus::BuildHistogram().Name(name).Help(help).Register(*registry_);
      entry.buckets = buckets;
    }
    auto [it, is_new] = entry.series.try_emplace(labels, nullptr);
    if (is_new) it->second = &entry.family->Add(labels, entry.buckets);
    it->second->Observe(value);
  }

  void RemoveLabel(const std::string& label, const std::string& value) override {
    MutexLock lock(&mutex_);
    gauges_.RemoveLabel(label, value);
    counters_.RemoveLabel(label, value);
    histograms_.RemoveLabel(label, value);
  }

  int port() const override { return port_; }
  std::string Text() const override { return prometheus::TextSerializer().Serialize(registry_->Collect()); }

 private:
  // Prometheus throws when a name comes back with another type: only a bug of ours can do that.
  void ClaimName(const std::string& name, char type) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const auto [it, is_new] = types_.try_emplace(name, type);
    TANDEM_CHECK(is_new, "metric ", name, " is used with two types");
  }

  const std::shared_ptr<prometheus::Registry> registry_ = std::make_shared<prometheus::Registry>();
  Mutex mutex_;
  std::map<std::string, char> types_ ABSL_GUARDED_BY(mutex_);
  Families<prometheus::Gauge> gauges_ ABSL_GUARDED_BY(mutex_);
  Families<prometheus::Counter> counters_ ABSL_GUARDED_BY(mutex_);
  Families<prometheus::Histogram> histograms_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<prometheus::Exposer> exposer_;  // last: stops serving before the registry goes
  int port_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Metrics>> Metrics::Create(const std::string& address) {
  auto metrics = std::make_unique<PrometheusMetrics>();
  if (!address.empty()) TANDEM_RETURN_IF_ERROR(metrics->Expose(address));
  return std::unique_ptr<Metrics>(std::move(metrics));
}

}  // namespace tandem
