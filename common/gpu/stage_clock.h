// Time spent in named stages of a pass: on the GPU by events in its stream, which cost the pass nothing; on the CPU by the clock.
// Confined to one thread and stream at a time.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "common/gpu/device.h"

namespace tandem {

class StageClock {
 public:
  // Errors: UNIMPLEMENTED (no device code).
  static absl::StatusOr<std::unique_ptr<StageClock>> Create(Device device);
  virtual ~StageClock() = default;
  // What is put into `stream`, a cudaStream_t, from here on belongs to `stage`, a literal; null: to none.
  virtual void Enter(const char* stage, void* stream) = 0;
  // Seconds by stage of what was entered since the last call, up to the last Enter. Waits for the device. Errors: INTERNAL.
  virtual absl::StatusOr<std::map<std::string, double>> Take() = 0;
};

namespace internal {
absl::StatusOr<std::unique_ptr<StageClock>> CreateCudaStageClock();
}  // namespace internal

}  // namespace tandem
