#include "common/gpu/stage_clock.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "common/base/clock.h"

namespace tandem {
namespace {

class CpuStageClock final : public StageClock {
 public:
  void Enter(const char* stage, void* stream) override {
    const MonotonicTime now = MonotonicTime::Now();
    if (marks_.empty()) begin_ = now;
    marks_.push_back({.stage = stage, .stream = stream, .begin_seconds = absl::ToDoubleSeconds(now - begin_)});
  }
  absl::StatusOr<std::vector<StageSpan>> Take() override { return internal::SpansOfMarks(std::exchange(marks_, {})); }

 private:
  MonotonicTime begin_;
  std::vector<StageSpan> marks_;
};

}  // namespace

std::vector<StageSpan> internal::SpansOfMarks(const std::vector<StageSpan>& marks) {
  std::vector<StageSpan> spans;
  for (std::size_t i = 0; i < marks.size(); ++i) {
    if (marks[i].stage == nullptr) continue;
    const auto is_next = [&](const StageSpan& mark) { return mark.stream == marks[i].stream; };
    const auto next = std::find_if(marks.begin() + static_cast<std::ptrdiff_t>(i) + 1, marks.end(), is_next);
    if (next == marks.end()) continue;
    spans.push_back(marks[i]);
    spans.back().end_seconds = next->begin_seconds;
  }
  return spans;
}

std::map<std::string, double> SecondsByStage(const std::vector<StageSpan>& spans) {
  std::map<std::string, double> seconds;
  for (const StageSpan& span : spans) seconds[span.stage] += span.end_seconds - span.begin_seconds;
  return seconds;
}

double OverlappedShare(const std::vector<StageSpan>& inner, const std::vector<StageSpan>& outer) {
  double all = 0, overlapped = 0;
  for (const StageSpan& span : inner) {
    all += span.end_seconds - span.begin_seconds;
    for (const StageSpan& other : outer) {
      const double common = std::min(span.end_seconds, other.end_seconds) - std::max(span.begin_seconds, other.begin_seconds);
      overlapped += std::max(0.0, common);
    }
  }
  return all > 0 ? overlapped / all : 0;
}

std::string ChromeTrace(const std::vector<StageSpan>& spans) {
  std::vector<void*> streams;
  std::string events;
  for (const StageSpan& span : spans) {
    auto row = std::find(streams.begin(), streams.end(), span.stream);
    if (row == streams.end()) row = streams.insert(row, span.stream);
    absl::StrAppendFormat(&events, "%s\n{\"name\":\"%s\",\"ph\":\"X\",\"pid\":1,\"tid\":%d,\"ts\":%.3f,\"dur\":%.3f}",
                          events.empty() ? "" : ",", span.stage, row - streams.begin() + 1, 1e6 * span.begin_seconds,
                          1e6 * (span.end_seconds - span.begin_seconds));
  }
  return absl::StrCat("{\"traceEvents\":[", events, "\n]}\n");
}

absl::StatusOr<std::unique_ptr<StageClock>> StageClock::Create(Device device) {
  if (device == Device::kCuda) return internal::CreateCudaStageClock();
  return std::make_unique<CpuStageClock>();
}

}  // namespace tandem
