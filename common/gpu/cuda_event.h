// A point in a CUDA stream that the host waits for. Only device code and its launchers include this.
#pragma once

#include <memory>

#include "common/base/status.h"

namespace tandem {

class CudaEvent {
 public:
  // Errors: INTERNAL, RESOURCE_EXHAUSTED.
  static absl::StatusOr<std::unique_ptr<CudaEvent>> Create();
  ~CudaEvent();
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;
  // The point moves behind all work put into `stream`, a cudaStream_t, so far.
  absl::Status Record(void* stream);
  // Until the stream has come to the point; at once where none was recorded. Errors: INTERNAL: a kernel failed; see
  // ContextHealth.
  absl::Status Wait();

 private:
  explicit CudaEvent(void* event) : event_(event) {}
  void* const event_;  // cudaEvent_t
};

}  // namespace tandem
