// Stands in for stripe_writer_cuda.cc where the build has no device code.
#include "common/model/stripe_writer.h"

namespace tandem::internal {

absl::StatusOr<std::unique_ptr<StripeWriter>> CreateDeviceStripeWriter(std::span<std::byte>, std::uint64_t) {
  return BuiltWithoutCuda("loading into device memory");
}

}  // namespace tandem::internal
