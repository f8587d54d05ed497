#include "common/gpu/cuda_event.h"

#include <cuda_runtime_api.h>

#include "common/base/log.h"
#include "common/gpu/cuda_status.h"

namespace tandem {

absl::StatusOr<std::unique_ptr<CudaEvent>> CudaEvent::Create() {
  cudaEvent_t event = nullptr;
  TANDEM_RETURN_IF_ERROR(CudaToStatus(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event"));
  return std::unique_ptr<CudaEvent>(new CudaEvent(event));
}

CudaEvent::~CudaEvent() {
  const absl::Status status = CudaToStatus(cudaEventDestroy(static_cast<cudaEvent_t>(event_)), "destroying an event");
  if (!status.ok()) TANDEM_LOG(kWarning, "gpu", status.ToString());
}

absl::Status CudaEvent::Record(void* stream) {
  return CudaToStatus(cudaEventRecord(static_cast<cudaEvent_t>(event_), static_cast<cudaStream_t>(stream)), "recording an event");
}

absl::Status CudaEvent::Wait() {
  return CudaToStatus(cudaEventSynchronize(static_cast<cudaEvent_t>(event_)), "waiting for an event");
}

}  // namespace tandem
