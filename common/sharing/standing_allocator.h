// Splits one standing region among its owners (adapter slots, masters, moments): best fit, 256-byte aligned, by owner name.
// Confined to the owning daemon; thread-safe.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/base/status.h"
#include "common/gpu/device.h"
#include "proto/types.pb.h"

namespace tandem {

class StandingAllocator {
 public:
  // `region` lies on `device`.
  static std::unique_ptr<StandingAllocator> Create(std::span<std::byte> region, v1::Role role, Device device);
  virtual ~StandingAllocator() = default;
  // Zeroed. Errors: RESOURCE_EXHAUSTED naming owner, size, free and largest free piece; INTERNAL (the device).
  virtual absl::StatusOr<std::span<std::byte>> Allocate(std::uint64_t size_bytes, const std::string& owner) = 0;
  virtual void Free(std::span<std::byte> piece) = 0;
  virtual std::vector<v1::OwnedBytes> Ledger() const = 0;  // by owner, and "free"
};

}  // namespace tandem
