// docs/metrics.md, made from the declarations of both daemons' metrics.
//
//   tandem_metrics_page FILE           writes it
//   tandem_metrics_page --check FILE   fails where it is not what this would write
#include <cstdio>
#include <fstream>
#include <iterator>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "common/rpc/node_metrics.h"
#include "rollout_server/engine/engine_metrics.h"
#include "trainer_server/job/job_metrics.h"

namespace tandem {
namespace {

const char* TypeName(Metric::Type type) {
  switch (type) {
    case Metric::Type::kGauge:
      return "gauge";
    case Metric::Type::kCounter:
      return "counter";
    case Metric::Type::kHistogram:
      return "histogram";
  }
  return "";
}

std::string Signature(const Metric& metric) {
  std::string text = absl::StrCat("`", std::string(metric.name));
  for (std::size_t i = 0; i < metric.num_labels(); ++i)
    absl::StrAppend(&text, i == 0 ? "{" : ", ", std::string(metric.labels[i]));
  return absl::StrCat(text, metric.num_labels() > 0 ? "}`" : "`");
}

std::string Help(const Metric& metric) {
  return absl::StrReplaceAll(std::string(metric.help), {{"|", "\\|"}}) + (metric.needs_gpu ? " (with a GPU)" : "");
}

void AppendTable(const std::vector<const Metric*>& metrics, std::string* page) {
  absl::StrAppend(page, "| metric | type | meaning |\n|---|---|---|\n");
  for (const Metric* metric : metrics) {
    absl::StrAppend(page, "| ", Signature(*metric), " | ", TypeName(metric->type), " | ", Help(*metric), " |\n");
  }
}

void AppendHistory(std::span<const Metric> metrics, std::string* page) {
  absl::StrAppend(page, "| in the history | metric, a gauge | meaning |\n|---|---|---|\n");
  for (const Metric& metric : metrics) {
    absl::StrAppend(page, "| `", std::string(metric.history), "` | ", Signature(metric), " | ", Help(metric), " |\n");
  }
}

std::string Page() {
  std::string page = R"(# Metrics

Both daemons serve Prometheus text at `/metrics` (`--metrics`). Names begin with `tandem_`; units are base units. Serving values have vLLM's
names after the prefix, training values TRL's, where the meaning is the same. Labels come from small closed sets; the one id among them is `job`,
of active jobs only: 15 seconds after a job has ended, its series go. A family has at most 1024 series. `exposer_*` is what the HTTP server tells of itself. Where Prometheus adds a label `job` of its own, scrape with
`honor_labels: true`; [deploy/prometheus](../deploy/prometheus) has configuration, recording rules and alerts,
[deploy/grafana](../deploy/grafana) the dashboards; [operations.md](operations.md#monitoring) says how to run them.

This page is made by `tandem_metrics_page docs/metrics.md` from the declarations in the code.

## Both daemons

)";
  AppendTable({kNodeMetrics.begin(), kNodeMetrics.end()}, &page);
  absl::StrAppend(&page, R"(
`tandem_region_bytes` adds up to the pool; with `tandem_device_memory_bytes{kind="outside_pool"}` it is what the driver calls used. Owners of a
standing region, `free` among them, add up to it, and are told by the daemon that has it.

## rollout_server

)");
  AppendTable({kRolloutMetrics.begin(), kRolloutMetrics.end()}, &page);
  absl::StrAppend(&page, "\n## trainer_server\n\n");
  AppendTable({kTrainerMetrics.begin(), kTrainerMetrics.end()}, &page);
  absl::StrAppend(&page, R"(
`tandem_plan_*`: [memory.md](memory.md).

### A step's values

What a step has in the job's history is served until the next one's; `*` is the label's value. Values that a job does not have
(`kl` without `beta`) have no series.

)");
  AppendHistory(kStepMetrics, &page);
  absl::StrAppend(&page, "\n### An evaluation's values\n\n");
  AppendHistory(kEvaluationMetrics, &page);
  return page;
}

// Two declarations of one name would be one family.
bool AreNamesUnique() {
  std::set<std::string_view> names;
  bool is_unique = true;
  const auto add = [&](const Metric& metric) {
    if (names.insert(metric.name).second) return;
    std::fprintf(stderr, "%s is declared twice\n", std::string(metric.name).c_str());
    is_unique = false;
  };
  for (const auto metrics : {std::span<const Metric* const>(kNodeMetrics), std::span<const Metric* const>(kRolloutMetrics),
                             std::span<const Metric* const>(kTrainerMetrics)}) {
    for (const Metric* metric : metrics) add(*metric);
  }
  for (const auto metrics : {std::span<const Metric>(kStepMetrics), std::span<const Metric>(kEvaluationMetrics)}) {
    for (const Metric& metric : metrics) add(metric);
  }
  return is_unique;
}

int Run(const std::vector<std::string>& arguments) {
  const bool checks = arguments.size() == 2 && arguments[0] == "--check";
  if (!checks && arguments.size() != 1) {
    std::fprintf(stderr, "tandem_metrics_page [--check] FILE\n");
    return 2;
  }
  if (!AreNamesUnique()) return 1;
  const std::string& path = arguments.back();
  if (!checks) {
    std::ofstream file(path);
    file << Page();
    return file.flush() ? 0 : 1;
  }
  std::ifstream file(path);
  const std::string found{std::istreambuf_iterator<char>(file), {}};
  if (found == Page()) return 0;
  std::fprintf(stderr, "%s is not what the code declares: write it again with tandem_metrics_page %s\n", path.c_str(),
               path.c_str());
  return 1;
}

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) { return tandem::Run({argv + 1, argv + argc}); }
