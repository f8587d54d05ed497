#include <cuda_runtime_api.h>

#include <cstddef>
#include <utility>
#include <vector>

#include "common/gpu/cuda_status.h"
#include "common/gpu/stage_clock.h"

namespace tandem::internal {
namespace {

class CudaStageClock final : public StageClock {
 public:
  ~CudaStageClock() override {
    for (const Mark& mark : marks_) (void)cudaEventDestroy(mark.event);
  }
  void Enter(const char* stage, void* stream) override {
    if (num_marks_ == marks_.size()) {
      cudaEvent_t event = nullptr;
      status_.Update(CudaToStatus(cudaEventCreate(&event), "making an event of a stage"));
      if (!status_.ok()) return;
      marks_.push_back({.event = event});
    }
    Mark& mark = marks_[num_marks_++];
    mark.stage = stage;
    mark.stream = stream;
    status_.Update(CudaToStatus(cudaEventRecord(mark.event, static_cast<cudaStream_t>(stream)), "marking a stage"));
  }
  absl::StatusOr<std::vector<StageSpan>> Take() override {
    TANDEM_RETURN_IF_ERROR(std::exchange(status_, absl::OkStatus()));
    std::vector<StageSpan> marks;
    const std::size_t num_marks = std::exchange(num_marks_, 0);
    for (std::size_t i = 0; i < num_marks; ++i) {
      const Mark& mark = marks_[i];
      TANDEM_RETURN_IF_ERROR(CudaToStatus(cudaEventSynchronize(mark.event), "waiting for a stage"));
      float milliseconds = 0;
      TANDEM_RETURN_IF_ERROR(CudaToStatus(cudaEventElapsedTime(&milliseconds, marks_[0].event, mark.event), "timing a stage"));
      marks.push_back({.stage = mark.stage, .stream = mark.stream, .begin_seconds = static_cast<double>(milliseconds) / 1000});
    }
    return SpansOfMarks(marks);
  }

 private:
  struct Mark {
    const char* stage = nullptr;
    void* stream = nullptr;
    cudaEvent_t event = nullptr;
  };
  std::vector<Mark> marks_;  // the first num_marks_ are in use
  std::size_t num_marks_ = 0;
  absl::Status status_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<StageClock>> CreateCudaStageClock() { return std::make_unique<CudaStageClock>(); }

}  // namespace tandem::internal
