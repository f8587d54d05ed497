// A kernel's write to one byte of memory, as a stray one would be.
#pragma once

#include "common/base/status.h"
#include "common/gpu/device.h"

namespace tandem::testing {

// Writes a byte and waits. On a GPU a kernel does; an address that is not mapped poisons the context. Errors: INTERNAL.
absl::Status TouchByte(Device device, void* address);

}  // namespace tandem::testing
