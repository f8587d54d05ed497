#include "trainer_server/job/job_metrics.h"

#include <optional>
#include <span>

#include "common/base/log.h"

namespace tandem {
namespace {

// What stands for the '*' of `pattern` in `name`, empty where it has none; nullopt: no match.
std::optional<std::string> Match(std::string_view pattern, std::string_view name) {
  const std::size_t star = pattern.find('*');
  if (star == std::string_view::npos) return pattern == name ? std::optional<std::string>("") : std::nullopt;
  const std::string_view before = pattern.substr(0, star), after = pattern.substr(star + 1);
  if (name.size() <= before.size() + after.size() || !name.starts_with(before) || !name.ends_with(after)) return std::nullopt;
  return std::string(name.substr(before.size(), name.size() - before.size() - after.size()));
}

}  // namespace

void ExportHistory(const HistoryEvent& event, const std::string& job, Metrics* metrics) {
  const bool is_step = event.kind == HistoryEvent::Kind::kStep;
  const std::span<const Metric> declared =
      is_step ? std::span<const Metric>(kStepMetrics) : std::span<const Metric>(kEvaluationMetrics);
  for (const NamedValues* values : {&event.values, &event.times}) {
    for (const auto& [name, value] : *values) {
      bool is_served = false;
      for (const Metric& metric : declared) {
        const std::optional<std::string> label = Match(metric.history, name);
        if (!label.has_value()) continue;
        Metrics::LabelValues labels = {job};
        if (metric.num_labels() == 2) labels.push_back(*label);
        metrics->SetGauge(metric, labels, value);
        is_served = true;
        break;
      }
      if (!is_served) TANDEM_LOG(kWarning, "job", "no metric is declared for value=", name, " job=", job);
    }
  }
}

}  // namespace tandem
