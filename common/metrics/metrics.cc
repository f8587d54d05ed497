#include "common/metrics/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/exposer.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <algorithm>
#include <exception>
#include <map>
#include <set>
#include <type_traits>
#include <utility>

#include "common/base/check.h"
#include "common/base/mutex.h"

namespace tandem {
namespace {

constexpr char kSilenceMs[] = "1000";

// The families of one type and their series; prometheus keeps no way back from labels to a series.
template <typename T>
struct Families {
  struct Entry {
    prometheus::Family<T>* family = nullptr;
    std::map<Metrics::LabelValues, T*> series;
  };
  std::map<const Metric*, Entry> by_metric;

  void RemoveLabel(const std::string& label, const std::string& value) {
    for (auto& [metric, entry] : by_metric) {
      const auto found = std::ranges::find(metric->labels, label);
      if (found == metric->labels.end()) continue;
      const auto index = static_cast<std::size_t>(found - metric->labels.begin());
      prometheus::Family<T>* const family = entry.family;
      std::erase_if(entry.series, [&value, index, family](const auto& item) {
        if (item.first[index] != value) return false;
        family->Remove(item.second);
        return true;
      });
    }
  }
};

prometheus::Labels NamedLabels(const Metric& metric, const Metrics::LabelValues& values) {
  prometheus::Labels labels;
  for (std::size_t i = 0; i < values.size(); ++i) labels.emplace(metric.labels[i], values[i]);
  return labels;
}

class PrometheusMetrics final : public Metrics {
 public:
  absl::Status Expose(const std::string& address) {
    try {
      // Whoever is silent holds a thread no longer than kSilenceMs.
      exposer_ = std::make_unique<prometheus::Exposer>(
          std::vector<std::string>{"listening_ports", address, "num_threads", "2", "request_timeout_ms", kSilenceMs});
      exposer_->RegisterCollectable(registry_);
      const std::vector<int> ports = exposer_->GetListeningPorts();
      if (ports.empty()) return absl::UnavailableError(absl::StrCat("serving metrics at '", address, "': no listening port"));
      port_ = ports.front();
    } catch (const std::exception&) {  // its words are of a null context
      return absl::UnavailableError(absl::StrCat("cannot listen at --metrics=", address, ": is the address local, and free?"));
    }
    return absl::OkStatus();
  }

  void SetGauge(const Metric& metric, const LabelValues& labels, double value) override {
    MutexLock lock(&mutex_);
    if (prometheus::Gauge* const gauge = Series(&gauges_, metric, labels)) gauge->Set(value);
  }

  void ReplaceGauges(const Metric& metric, const std::vector<std::pair<LabelValues, double>>& values) override {
    MutexLock lock(&mutex_);
    std::set<prometheus::Gauge*> kept;
    for (const auto& [labels, value] : values) {
      prometheus::Gauge* const gauge = Series(&gauges_, metric, labels);
      if (gauge == nullptr) continue;
      gauge->Set(value);
      kept.insert(gauge);
    }
    auto& entry = gauges_.by_metric[&metric];
    std::erase_if(entry.series, [&](const auto& item) {
      if (kept.contains(item.second)) return false;
      entry.family->Remove(item.second);
      return true;
    });
  }

  void AddCounter(const Metric& metric, const LabelValues& labels, double value) override {
    TANDEM_CHECK(value >= 0, "counter ", std::string(metric.name), " lowered by ", value);
    MutexLock lock(&mutex_);
    if (prometheus::Counter* const counter = Series(&counters_, metric, labels)) counter->Increment(value);
  }

  void Observe(const Metric& metric, const LabelValues& labels, double value) override {
    MutexLock lock(&mutex_);
    if (prometheus::Histogram* const histogram = Series(&histograms_, metric, labels)) histogram->Observe(value);
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
  // Prometheus throws when a name comes back with another type, and a family with other labels: only a bug of ours can do that.
  // Null: the family has kMaxSeries.
  template <typename T>
  T* Series(Families<T>* families, const Metric& metric, const LabelValues& labels) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    constexpr Metric::Type kType = std::is_same_v<T, prometheus::Gauge>     ? Metric::Type::kGauge
                                   : std::is_same_v<T, prometheus::Counter> ? Metric::Type::kCounter
                                                                            : Metric::Type::kHistogram;
    const std::string name(metric.name);
    TANDEM_CHECK(metric.type == kType, "metric ", name, " is used with two types");
    TANDEM_CHECK(metric.num_labels() == labels.size(), "metric ", name, " has ", metric.num_labels(), " labels, was given ",
                 labels.size());
    auto& entry = families->by_metric[&metric];
    if (entry.family == nullptr) {
      TANDEM_CHECK(names_.insert(metric.name).second, "metric ", name, " is declared twice");
      entry.family = &Builder<T>().Name(name).Help(std::string(metric.help)).Register(*registry_);
    }
    if (const auto found = entry.series.find(labels); found != entry.series.end()) return found->second;
    if (entry.series.size() == kMaxSeries) {
      Series(&counters_, kSeriesRefusedTotal, {})->Increment();
      return nullptr;
    }
    T* series = nullptr;
    if constexpr (std::is_same_v<T, prometheus::Histogram>) {
      series = &entry.family->Add(NamedLabels(metric, labels),
                                  prometheus::Histogram::BucketBoundaries(metric.buckets.begin(), metric.buckets.end()));
    } else {
      series = &entry.family->Add(NamedLabels(metric, labels));
    }
    return entry.series[labels] = series;
  }
  template <typename T>
  static auto Builder() {
    if constexpr (std::is_same_v<T, prometheus::Gauge>) return prometheus::BuildGauge();
    if constexpr (std::is_same_v<T, prometheus::Counter>) return prometheus::BuildCounter();
    if constexpr (std::is_same_v<T, prometheus::Histogram>) return prometheus::BuildHistogram();
  }

  const std::shared_ptr<prometheus::Registry> registry_ = std::make_shared<prometheus::Registry>();
  Mutex mutex_;
  std::set<std::string_view> names_ ABSL_GUARDED_BY(mutex_);
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
