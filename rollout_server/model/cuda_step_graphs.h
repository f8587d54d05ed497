// Whole decode steps as CUDA graphs: a step of one launch instead of ten a layer. A step is run as it is the first time that its
// key is seen (which also lets the products choose their algorithms), captured the second time, replayed from then on. What the
// kernels read must lie at the same places every time. Confined to the engine thread.
//
// Graphs lie in device memory outside the pool, which the driver takes in pieces and keeps for later graphs when one is dropped.
// What it takes is measured as graphs are made, as far as a graph of so many kernels can have taken it. When that passes the
// limit, no more graphs than there were before are kept from then on, those that ran last: new ones are made in the memory of
// the others.
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
  std::uint64_t max_bytes = 256 << 20;  // passed by what the driver takes at a time, some MiB
  std::size_t max_keys = 512;           // at least 1
};

class StepGraphs {
 public:
  StepGraphs(void* stream, StepGraphLimits limits) : stream_(stream), limits_(limits), max_graphs_(limits.max_keys) {}
  StepGraphs(const StepGraphs&) = delete;
  StepGraphs& operator=(const StepGraphs&) = delete;
  ~StepGraphs();
  // Puts the step into the stream. Errors: those of `enqueue`, INTERNAL (capture).
  absl::Status Run(const StepGraphKey& key, const std::function<absl::Status()>& enqueue);
  // Drops the graphs of an adapter that no step will name again.
  void Forget(std::uint64_t adapter);

  // Whether one more may be made before a step asks for it: half of the room is left to those that come by themselves.
  bool has_room_ahead() const { return !has_failed_ && 2 * bytes_ < limits_.max_bytes && 2 * num_graphs_ < max_graphs_; }
  std::size_t num_graphs() const { return num_graphs_; }  // captured
  std::uint64_t bytes() const { return bytes_; }          // that the driver took while graphs were made

 private:
  struct Graph {
    void* executable = nullptr;  // cudaGraphExec_t; null: run once, not captured yet
    std::uint64_t last_run = 0;
  };
  using Graphs = std::map<StepGraphKey, Graph>;

  absl::Status Capture(const std::function<absl::Status()>& enqueue, Graph* graph);
  Graphs::iterator Drop(Graphs::iterator graph);
  // Down to the limits, the oldest first; never `kept`.
  void DropOldest(Graphs::iterator kept);

  void* const stream_;
  const StepGraphLimits limits_;
  Graphs graphs_;
  std::size_t num_graphs_ = 0;
  std::size_t max_graphs_;
  std::uint64_t bytes_ = 0;
  std::uint64_t num_runs_ = 0;
  bool has_failed_ = false;  // a capture: none is tried any more, and steps run without
};

}  // namespace tandem
