// Whole decode steps as CUDA graphs: a step of one launch instead of ten a layer. A step is run as it is the first time that its
// key is seen (which also lets the products choose their algorithms), captured the second time, replayed from then on. What the
// kernels read must lie at the same places every time. Confined to the engine thread.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <tuple>
#include <vector>

#include "common/base/status.h"

namespace tandem {

struct StepGraphKey {
  std::int64_t num_rows = 0;
  std::uint64_t adapter = 0;       // DeviceAdapter::graph_id; 0: none
  std::vector<std::int64_t> plan;  // of the attention
  bool operator<(const StepGraphKey& other) const {
    return std::tie(num_rows, adapter, plan) < std::tie(other.num_rows, other.adapter, other.plan);
  }
};

class StepGraphs {
 public:
  explicit StepGraphs(void* stream) : stream_(stream) {}
  StepGraphs(const StepGraphs&) = delete;
  StepGraphs& operator=(const StepGraphs&) = delete;
  ~StepGraphs() { Clear(); }
  // Puts the step into the stream. Errors: those of `enqueue`, INTERNAL (capture).
  absl::Status Run(const StepGraphKey& key, const std::function<absl::Status()>& enqueue);

 private:
  absl::StatusOr<void*> Capture(const std::function<absl::Status()>& enqueue);
  void Clear();

  void* const stream_;
  std::map<StepGraphKey, void*> graphs_;  // cudaGraphExec_t; null: run once, not captured yet
};

}  // namespace tandem
