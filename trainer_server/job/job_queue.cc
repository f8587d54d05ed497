#include "trainer_server/job/job_queue.h"

#include <algorithm>
#include <cmath>
#include <queue>
#include <string_view>
#include <tuple>
#include <unordered_map>

namespace tandem {
namespace {

// A submitter's jobs of one priority, oldest first.
struct Line {
  double* used_seconds = nullptr;
  std::vector<std::int64_t> ordinals;
  std::size_t next = 0;
};

// Appends the jobs of one priority, which come oldest first.
void AppendClass(std::span<const QueuedJob* const> jobs, double seconds_of_a_job, DeviceSeconds* used,
                 std::vector<std::int64_t>* order) {
  std::vector<Line> lines;
  std::unordered_map<std::string_view, std::size_t> line_of;
  for (const QueuedJob* job : jobs) {
    const auto [found, is_new] = line_of.try_emplace(job->submitter, lines.size());
    if (is_new) lines.push_back({.used_seconds = &(*used)[job->submitter], .ordinals = {}});
    lines[found->second].ordinals.push_back(job->ordinal);
  }
  using Head = std::tuple<double, std::int64_t, std::size_t>;  // seconds, ordinal, line
  std::priority_queue<Head, std::vector<Head>, std::greater<>> heads;
  const auto push = [&](std::size_t index) {
    const Line& line = lines[index];
    if (line.next < line.ordinals.size()) heads.emplace(*line.used_seconds, line.ordinals[line.next], index);
  };
  for (std::size_t i = 0; i < lines.size(); ++i) push(i);
  while (!heads.empty()) {
    const auto [seconds, ordinal, index] = heads.top();
    heads.pop();
    order->push_back(ordinal);
    *lines[index].used_seconds += seconds_of_a_job;
    ++lines[index].next;
    push(index);
  }
}

}  // namespace

double DecayedSeconds(double seconds, absl::Duration age) {
  return seconds * std::exp2(-std::max(absl::FDivDuration(age, kDeviceTimeHalfLife), 0.0));
}

std::vector<std::int64_t> OrderQueue(std::span<const QueuedJob> jobs, DeviceSeconds used, double seconds_of_a_job) {
  std::vector<const QueuedJob*> sorted;
  sorted.reserve(jobs.size());
  for (const QueuedJob& job : jobs) sorted.push_back(&job);
  std::ranges::sort(sorted, [](const QueuedJob* a, const QueuedJob* b) {
    return std::tuple(b->priority, a->ordinal) < std::tuple(a->priority, b->ordinal);
  });
  std::vector<std::int64_t> order;
  order.reserve(jobs.size());
  for (auto begin = sorted.begin(); begin != sorted.end();) {
    const auto end = std::find_if(begin, sorted.end(), [&](const QueuedJob* job) { return job->priority != (*begin)->priority; });
    AppendClass({begin, end}, seconds_of_a_job, &used, &order);
    begin = end;
  }
  return order;
}

}  // namespace tandem
