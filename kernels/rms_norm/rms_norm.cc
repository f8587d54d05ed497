#include "kernels/rms_norm/rms_norm.h"

namespace tandem {

absl::Status RmsNorm(const RmsNormParams& params, Device device, void* stream) {
  constexpr std::int64_t kWidthLimit = 65536;
  if (params.width < 1 || params.width > kWidthLimit || params.num_rows < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("rms_norm: [", params.num_rows, ", ", params.width, "]; width is 1 to ", kWidthLimit));
  }
  if (params.num_rows == 0) return absl::OkStatus();
  if (device == Device::kCuda) return internal::RmsNormCuda(params, stream);
  RmsNormReference(params);
  return absl::OkStatus();
}

}  // namespace tandem
