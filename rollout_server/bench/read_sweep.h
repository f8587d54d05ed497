// How fast this GPU reads its memory: what decode steps are compared with.
#pragma once

#include <cstddef>
#include <span>

#include "common/base/status.h"

namespace tandem {

// Bytes a second, the median of some sweeps over `memory` (device, a multiple of 16 bytes), each read once. Errors: INTERNAL.
absl::StatusOr<double> MeasureReadSweep(std::span<const std::byte> memory);

}  // namespace tandem
