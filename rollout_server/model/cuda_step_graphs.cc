#include "rollout_server/model/cuda_step_graphs.h"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "common/base/log.h"
#include "common/gpu/cuda_status.h"
#include "common/gpu/device.h"

namespace tandem {
namespace {

// A kernel of a graph takes about 2 KiB, and the driver takes memory in pieces of some MiB. More than that is another process's,
// whose context may well come while this one captures its first steps.
constexpr std::uint64_t kMostKernelBytes = 8 << 10, kMostPieceBytes = 8 << 20;

std::uint64_t MostBytesOf(cudaGraph_t graph) {
  std::size_t num_kernels = 0;
  if (cudaGraphGetNodes(graph, nullptr, &num_kernels) != cudaSuccess) (void)cudaGetLastError();
  return num_kernels * kMostKernelBytes + kMostPieceBytes;
}

}  // namespace

StepGraphs::~StepGraphs() {
  while (!graphs_.empty()) Drop(graphs_.begin());
}

absl::Status StepGraphs::Run(const StepGraphKey& key, const std::function<absl::Status()>& enqueue) {
  const auto [graph, is_new] = graphs_.try_emplace(key);
  graph->second.last_run = ++num_runs_;
  if (is_new) {
    DropOldest(graph);
    return enqueue();
  }
  if (graph->second.executable == nullptr) {
    if (has_failed_) return enqueue();
    const std::uint64_t bytes_before = bytes_;
    if (const absl::Status status = Capture(enqueue, &graph->second); !status.ok()) {
      has_failed_ = true;
      TANDEM_LOG(kWarning, "model", "steps are captured no more, which costs launches: ", status.ToString());
      if (graph->second.executable != nullptr) Drop(graph);
      return enqueue();  // a capture runs nothing
    }
    if (bytes_ > limits_.max_bytes && bytes_ > bytes_before) max_graphs_ = std::max<std::size_t>(num_graphs_ - 1, 1);
    DropOldest(graph);
  }
  return CudaToStatus(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph->second.executable), static_cast<cudaStream_t>(stream_)),
                      "launching a captured step");
}

absl::Status StepGraphs::Capture(const std::function<absl::Status()>& enqueue, Graph* graph) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  TANDEM_RETURN_IF_ERROR(
      CudaToStatus(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capturing a step: begin"));
  const absl::Status enqueued = enqueue();
  cudaGraph_t captured = nullptr;
  absl::Status status = CudaToStatus(cudaStreamEndCapture(stream, &captured), "capturing a step: end");
  if (!enqueued.ok()) status = enqueued;
  const absl::StatusOr<DeviceMemoryUse> before = DriverMemory(Device::kCuda);
  cudaGraphExec_t executable = nullptr;
  if (status.ok()) status = CudaToStatus(cudaGraphInstantiate(&executable, captured, 0), "capturing a step: instantiation");
  const std::uint64_t most_bytes = captured == nullptr ? 0 : MostBytesOf(captured);
  if (captured != nullptr) (void)cudaGraphDestroy(captured);
  if (status.ok()) status = CudaToStatus(cudaGraphUpload(executable, stream), "capturing a step: upload");
  graph->executable = executable;
  if (executable != nullptr) ++num_graphs_;
  const absl::StatusOr<DeviceMemoryUse> after = DriverMemory(Device::kCuda);
  if (before.ok() && after.ok() && before->free_bytes > after->free_bytes) {
    bytes_ += std::min(before->free_bytes - after->free_bytes, most_bytes);
  }
  if (!status.ok()) (void)cudaGetLastError();  // what a failed capture leaves behind is told in the status
  return status;
}

// A graph that still runs is freed when it is done.
StepGraphs::Graphs::iterator StepGraphs::Drop(Graphs::iterator graph) {
  if (graph->second.executable != nullptr) {
    const absl::Status status =
        CudaToStatus(cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph->second.executable)), "destroying a step graph");
    if (!status.ok()) TANDEM_LOG(kWarning, "model", status.ToString());
    --num_graphs_;
  }
  return graphs_.erase(graph);
}

void StepGraphs::DropOldest(Graphs::iterator kept) {
  while (num_graphs_ > max_graphs_ || graphs_.size() > limits_.max_keys) {
    const bool any_will_do = graphs_.size() > limits_.max_keys;  // else a captured one
    auto oldest = graphs_.end();
    for (auto graph = graphs_.begin(); graph != graphs_.end(); ++graph) {
      if (graph == kept || (!any_will_do && graph->second.executable == nullptr)) continue;
      if (oldest == graphs_.end() || graph->second.last_run < oldest->second.last_run) oldest = graph;
    }
    if (oldest == graphs_.end()) return;
    Drop(oldest);
  }
}

void StepGraphs::Forget(std::uint64_t adapter) {
  for (auto graph = graphs_.begin(); graph != graphs_.end();) {
    graph = graph->first.adapter == adapter ? Drop(graph) : std::next(graph);
  }
}

}  // namespace tandem
