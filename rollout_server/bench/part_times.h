// What the GPU spends on each part of a step: events between the parts, read when the stream has come past them.
#pragma once

#include <array>
#include <cstddef>
#include <vector>

#include "common/base/status.h"

namespace tandem {

// The model's parts, the draw, and from the end of a draw until the next step's first kernel: the copy of its indices, and what
// the host is late by.
enum class BenchPart { kLinear, kAttention, kElementwise, kHead, kSampling, kHostGap };
inline constexpr std::array kBenchPartNames = {"linear", "attention", "elementwise", "head", "sampling", "host_gap"};
inline constexpr std::size_t kNumBenchParts = kBenchPartNames.size();

class PartTimes {
 public:
  PartTimes() = default;
  PartTimes(const PartTimes&) = delete;
  PartTimes& operator=(const PartTimes&) = delete;
  ~PartTimes();
  // What comes next in `stream`, a cudaStream_t, belongs to `part`.
  void Begin(BenchPart part, void* stream);
  // Forgets what was begun so far.
  void Restart() { num_marks_ = 0; }
  // Milliseconds from the first Begin since Restart until the last one, by part; waits for the last. Errors: INTERNAL, an event
  // could not be made or recorded.
  absl::StatusOr<std::array<double, kNumBenchParts>> Milliseconds() const;

 private:
  struct Mark {
    BenchPart part = BenchPart::kHostGap;
    void* event = nullptr;  // cudaEvent_t
  };
  std::vector<Mark> marks_;  // the first num_marks_ are in use
  std::size_t num_marks_ = 0;
  absl::Status status_;
};

}  // namespace tandem
