// The rate that the device could compute at: the denominator of a utilisation.
#pragma once

#include "common/gpu/device.h"

namespace tandem {

// FLOP a second of dense bf16 products with fp32 sums, at the highest clock. Errors: FAILED_PRECONDITION (the CPU, or no GPU),
// UNIMPLEMENTED (an architecture whose rate is not known here).
absl::StatusOr<double> PeakFlopsPerSecond(Device device);

}  // namespace tandem
