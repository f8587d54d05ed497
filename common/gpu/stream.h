// A CUDA stream and page-locked host memory, as owners. On the CPU both are there and do nothing special.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "common/gpu/device.h"

namespace tandem {

class Stream {
 public:
  // Does not wait for the legacy default stream. Errors: INTERNAL, RESOURCE_EXHAUSTED.
  static absl::StatusOr<std::unique_ptr<Stream>> Create(Device device);
  virtual ~Stream() = default;
  virtual void* handle() const = 0;  // cudaStream_t; nullptr on the CPU
  // Until all work put into the stream so far is done. Errors: INTERNAL: a kernel failed; see ContextHealth.
  virtual absl::Status Synchronize() = 0;
};

// Zeroed host memory; page-locked for Device::kCuda, so that copies run beside the host.
class HostBuffer {
 public:
  static absl::StatusOr<std::unique_ptr<HostBuffer>> Create(Device device, std::size_t size_bytes);
  virtual ~HostBuffer() = default;
  virtual std::span<std::byte> bytes() const = 0;
};

}  // namespace tandem
