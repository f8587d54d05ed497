#include "rollout_server/model/cuda_step_graphs.h"

#include <cuda_runtime_api.h>

#include "common/base/log.h"
#include "common/gpu/cuda_status.h"

namespace tandem {
namespace {

constexpr std::size_t kMaxGraphs = 512;

}  // namespace

absl::Status StepGraphs::Run(const StepGraphKey& key, const std::function<absl::Status()>& enqueue) {
  auto found = graphs_.find(key);
  if (found == graphs_.end()) {
    if (graphs_.size() >= kMaxGraphs) Clear();
    graphs_.emplace(key, nullptr);
    return enqueue();
  }
  if (found->second == nullptr) { TANDEM_ASSIGN_OR_RETURN(found->second, Capture(enqueue)); }
  return CudaToStatus(cudaGraphLaunch(static_cast<cudaGraphExec_t>(found->second), static_cast<cudaStream_t>(stream_)),
                      "launching a captured step");
}

absl::StatusOr<void*> StepGraphs::Capture(const std::function<absl::Status()>& enqueue) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  TANDEM_RETURN_IF_ERROR(
      CudaToStatus(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capturing a step: begin"));
  const absl::Status enqueued = enqueue();
  cudaGraph_t graph = nullptr;
  absl::Status status = CudaToStatus(cudaStreamEndCapture(stream, &graph), "capturing a step: end");
  if (!enqueued.ok()) status = enqueued;
  cudaGraphExec_t executable = nullptr;
  if (status.ok()) status = CudaToStatus(cudaGraphInstantiate(&executable, graph, 0), "capturing a step: instantiation");
  if (graph != nullptr) (void)cudaGraphDestroy(graph);
  if (!status.ok()) {
    (void)cudaGetLastError();  // what a failed capture leaves behind is told in the status
    return status;
  }
  return executable;
}

void StepGraphs::Clear() {
  for (const auto& [key, graph] : graphs_) {
    if (graph == nullptr) continue;
    const absl::Status status =
        CudaToStatus(cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)), "destroying a step graph");
    if (!status.ok()) TANDEM_LOG(kWarning, "model", status.ToString());
  }
  graphs_.clear();
}

}  // namespace tandem
