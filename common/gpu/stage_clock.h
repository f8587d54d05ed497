// Time spent in named stages of a pass: on the GPU by events in its streams, which cost the pass nothing; on the CPU by the
// clock. Confined to one thread.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/gpu/device.h"

namespace tandem {

// A stage's stay in one stream. Seconds since the first Enter after the last Take.
struct StageSpan {
  const char* stage = nullptr;
  void* stream = nullptr;
  double begin_seconds = 0;
  double end_seconds = 0;
};

class StageClock {
 public:
  // Errors: UNIMPLEMENTED (no device code).
  static absl::StatusOr<std::unique_ptr<StageClock>> Create(Device device);
  virtual ~StageClock() = default;
  // What is put into `stream`, a cudaStream_t, from here on belongs to `stage`, a literal; null: to none.
  virtual void Enter(const char* stage, void* stream) = 0;
  // What was entered since the last call, in its order, each stage up to the next Enter of its stream. Waits for the device.
  // Errors: INTERNAL.
  virtual absl::StatusOr<std::vector<StageSpan>> Take() = 0;
};

std::map<std::string, double> SecondsByStage(const std::vector<StageSpan>& spans);
// The share of `inner`'s time in which `outer`'s stages were under way too; 0 where `inner` is empty.
double OverlappedShare(const std::vector<StageSpan>& inner, const std::vector<StageSpan>& outer);
// Chrome's trace format (JSON), which Perfetto and chrome://tracing draw: a row for each stream, in the order of their coming.
std::string ChromeTrace(const std::vector<StageSpan>& spans);

namespace internal {
absl::StatusOr<std::unique_ptr<StageClock>> CreateCudaStageClock();
// Marks know their begin alone.
std::vector<StageSpan> SpansOfMarks(const std::vector<StageSpan>& marks);
}  // namespace internal

}  // namespace tandem
