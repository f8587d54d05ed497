#include "kernels/base/device.h"

namespace tandem {

absl::Status BuiltWithoutCuda(const char* kernel) {
  return absl::UnimplementedError(absl::StrCat(kernel, ": this build has no device code (TANDEM_CUDA=OFF)"));
}

}  // namespace tandem
