#include "kernels/sampling/sampling.h"

namespace tandem {

absl::Status Sample(const SampleParams& params, Device device, void* stream) {
  if (params.num_rows < 0 || params.vocab_size < 1 || params.vocab_size > kMaxSampledVocab) {
    return absl::InvalidArgumentError(
        absl::StrCat("sampling: [", params.num_rows, ", ", params.vocab_size, "]; the vocabulary is 1 to ", kMaxSampledVocab));
  }
  if (device != Device::kCuda) return absl::UnimplementedError("sampling: the kernel is the device's only");
  if (params.num_rows == 0) return absl::OkStatus();
  return internal::SampleCuda(params, stream);
}

}  // namespace tandem
