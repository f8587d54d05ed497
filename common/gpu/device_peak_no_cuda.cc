// Stands in for device_peak_cuda.cc where the build has no device code.
#include "common/gpu/device_peak.h"

namespace tandem {

absl::StatusOr<double> PeakFlopsPerSecond(Device device) {
  if (device == Device::kCpu) return absl::FailedPreconditionError("peak rate: the CPU's is not known");
  return BuiltWithoutCuda("peak rate");
}

}  // namespace tandem
