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
    status_.Update(CudaToStatus(cudaEventRecord(mark.event, static_cast<cudaStream_t>(stream)), "marking a stage"));
  }
  absl::StatusOr<std::map<std::string, double>> Take() override {
    TANDEM_RETURN_IF_ERROR(std::exchange(status_, absl::OkStatus()));
    std::map<std::string, double> seconds;
    const std::size_t num_marks = std::exchange(num_marks_, 0);
    if (num_marks == 0) return seconds;
    TANDEM_RETURN_IF_ERROR(CudaToStatus(cudaEventSynchronize(marks_[num_marks - 1].event), "waiting for a stage"));
    for (std::size_t i = 0; i + 1 < num_marks; ++i) {
      if (marks_[i].stage == nullptr) continue;
      float milliseconds = 0;
      TANDEM_RETURN_IF_ERROR(
          CudaToStatus(cudaEventElapsedTime(&milliseconds, marks_[i].event, marks_[i + 1].event), "timing a stage"));
      seconds[marks_[i].stage] += static_cast<double>(milliseconds) / 1000;
    }
    return seconds;
  }

 private:
  struct Mark {
    const char* stage = nullptr;
    cudaEvent_t event = nullptr;
  };
  std::vector<Mark> marks_;  // the first num_marks_ are in use
  std::size_t num_marks_ = 0;
  absl::Status status_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<StageClock>> CreateCudaStageClock() { return std::make_unique<CudaStageClock>(); }

}  // namespace tandem::internal
