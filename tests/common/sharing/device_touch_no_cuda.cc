// Stands in for device_touch.cu where the build has no device code.
#include "tests/common/sharing/device_touch.h"

namespace tandem::testing {

absl::Status TouchByte(Device device, void* address) {
  if (device == Device::kCuda) return BuiltWithoutCuda("touch");
  *static_cast<volatile unsigned char*>(address) = 1;
  return absl::OkStatus();
}

}  // namespace tandem::testing
