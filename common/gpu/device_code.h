// Whether the device code of this build runs on the GPU that is there.
#pragma once

#include <string>
#include <string_view>

#include "common/gpu/device.h"

namespace tandem {

struct ComputeCapability {
  int major = 0, minor = 0;
};
// Of the GPU: 9.0 of an H200. Errors: FAILED_PRECONDITION (no GPU), INTERNAL.
absl::StatusOr<ComputeCapability> DeviceCapability();
// Whether this build has code for the GPU. Errors: FAILED_PRECONDITION naming the GPU and what the build has code for.
absl::Status CheckDeviceCode();
// Whether code for `architectures`, CMake's names with commas ("80-real,90a-real,120"), runs on such a GPU. Machine code runs on
// the same major number with the same or a later minor one, what a driver compiles from PTX on everything later, and neither goes
// beyond its own GPU where a letter (90a) follows.
bool DeviceCodeRuns(std::string_view architectures, ComputeCapability capability);
// For a log: "cpu", or "NVIDIA H200 capability=9.0 code=90a-real".
std::string DescribeDevice(Device device);

}  // namespace tandem
