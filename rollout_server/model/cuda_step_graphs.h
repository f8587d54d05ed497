// Whole decode steps as CUDA graphs: a step of one launch instead of ten a layer. A step is run as it is the first time that its
// key is seen (which also lets the products choose their algorithms), captured the second time, replayed from then on. What the
// kernels read must lie at the same places every time. Confined to the engine thread.
//
// Graphs lie in device memory outside the pool. What each takes is measured as it is made, by the driver's free memory; beyond
// the limits those go that have not been run for longest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <tuple>
#include <vector>

#include "common/base/status.h"

namespace tandem {

struct StepGraphKey {
  std::int64_t num_rows = 0;
  std::uint64_t adapter = 0;            // DeviceAdapter::graph_id; 0: none
  std::vector<std::int64_t> plan = {};  // of the attention
  bool operator<(const StepGraphKey& other) const {
    return std::tie(num_rows, adapter, plan) < std::tie(other.num_rows, other.adapter, other.plan);
  }
};

struct StepGraphLimits {
  std::uint64_t max_bytes = 256 << 20;
  std::size_t max_keys = 512;  // at least 1
};

class StepGraphs {
 public:
  StepGraphs(void* stream, StepGraphLimits limits) : stream_(stream), limits_(limits) {}
  StepGraphs(const StepGraphs&) = delete;
  StepGraphs& operator=(const StepGraphs&) = delete;
  ~StepGraphs();
  // Puts the step into the stream. Errors: those of `enqueue`, INTERNAL (capture).
  absl::Status Run(const StepGraphKey& key, const std::function<absl::Status()>& enqueue);
  // Drops the graphs of an adapter that no step will name again.
  void Forget(std::uint64_t adapter);

  std::size_t num_graphs() const;  // captured
  // Measured. The driver gives memory out in larger pieces than a graph: one takes 0, another the piece.
  std::uint64_t bytes() const { return bytes_; }

 private:
  struct Graph {
    void* executable = nullptr;  // cudaGraphExec_t; null: run once, not captured yet
    std::uint64_t bytes = 0;
    std::uint64_t last_run = 0;
  };
  using Graphs = std::map<StepGraphKey, Graph>;

  absl::Status Capture(const std::function<absl::Status()>& enqueue, Graph* graph);
  Graphs::iterator Drop(Graphs::iterator graph);
  // Until there is room, but never `kept`.
  void DropOldest(Graphs::iterator kept);

  void* const stream_;
  const StepGraphLimits limits_;
  Graphs graphs_;
  std::uint64_t bytes_ = 0;
  std::uint64_t num_runs_ = 0;
};

}  // namespace tandem
