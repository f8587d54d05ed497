// Where a loading thread puts what it decoded: straight in its place in host memory, or in one of two pinned buffers that are
// copied to their place on the device while the other is filled. One thread each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "common/base/status.h"
#include "common/gpu/device.h"

namespace tandem {

class StripeWriter {
 public:
  // `region` lies on `device`. Errors: RESOURCE_EXHAUSTED (pinned memory), INTERNAL.
  static absl::StatusOr<std::unique_ptr<StripeWriter>> Create(Device device, std::span<std::byte> region,
                                                              std::uint64_t max_stripe_bytes);
  virtual ~StripeWriter() = default;  // waits for what was committed
  // Host memory for bytes [begin, begin + size) of the region, to fill before Commit. Requires: size <= max_stripe_bytes, the
  // range lies in the region.
  virtual absl::StatusOr<std::span<std::byte>> Begin(std::uint64_t begin_bytes, std::uint64_t size_bytes) = 0;
  virtual absl::Status Commit() = 0;
  // Everything committed lies in the region. Errors: INTERNAL.
  virtual absl::Status Finish() = 0;
};

namespace internal {
absl::StatusOr<std::unique_ptr<StripeWriter>> CreateDeviceStripeWriter(std::span<std::byte> region,
                                                                       std::uint64_t max_stripe_bytes);
}  // namespace internal

}  // namespace tandem
