#include "kernels/sampling/sampling.h"

namespace tandem {

absl::Status Sample(const SampleParams& params, Device device, void* stream) {
  constexpr std::int64_t kVocabLimit = 1 << 22;
  if (params.num_rows < 0 || params.vocab_size < 1 || params.vocab_size > kVocabLimit) {
    return absl::InvalidArgumentError(
        absl::StrCat("sampling: [", params.num_rows, ", ", params.vocab_size, "]; the vocabulary is 1 to ", kVocabLimit));
  }
  if (device != Device::kCuda) return absl::UnimplementedError("sampling: the kernel is the device's only");
  if (params.num_rows == 0) return absl::OkStatus();
  return internal::SampleCuda(params, stream);
}

}  // namespace tandem
