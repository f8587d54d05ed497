#include "rollout_server/bench/part_times.h"

#include <cuda_runtime_api.h>

#include "common/gpu/cuda_status.h"

namespace tandem {

PartTimes::~PartTimes() {
  for (const Mark& mark : marks_) (void)cudaEventDestroy(static_cast<cudaEvent_t>(mark.event));
}

void PartTimes::Begin(BenchPart part, void* stream) {
  if (num_marks_ == marks_.size()) {
    cudaEvent_t event = nullptr;
    status_.Update(CudaToStatus(cudaEventCreate(&event), "making an event of a bench"));
    if (!status_.ok()) return;
    marks_.push_back({.event = event});
  }
  Mark& mark = marks_[num_marks_++];
  mark.part = part;
  status_.Update(CudaToStatus(cudaEventRecord(static_cast<cudaEvent_t>(mark.event), static_cast<cudaStream_t>(stream)),
                              "recording an event of a bench"));
}

absl::StatusOr<std::array<double, kNumBenchParts>> PartTimes::Milliseconds() const {
  TANDEM_RETURN_IF_ERROR(status_);
  std::array<double, kNumBenchParts> sums = {};
  if (num_marks_ == 0) return sums;
  TANDEM_RETURN_IF_ERROR(
      CudaToStatus(cudaEventSynchronize(static_cast<cudaEvent_t>(marks_[num_marks_ - 1].event)), "part times"));
  for (std::size_t i = 0; i + 1 < num_marks_; ++i) {
    float elapsed = 0;
    TANDEM_RETURN_IF_ERROR(CudaToStatus(
        cudaEventElapsedTime(&elapsed, static_cast<cudaEvent_t>(marks_[i].event), static_cast<cudaEvent_t>(marks_[i + 1].event)),
        "part times"));
    sums[static_cast<std::size_t>(marks_[i].part)] += static_cast<double>(elapsed);
  }
  return sums;
}

}  // namespace tandem
