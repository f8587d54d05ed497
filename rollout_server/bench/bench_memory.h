// Memory of a bench, on the CPU or the GPU: what the pool is to a server.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "common/gpu/device.h"

namespace tandem {

class BenchMemory {
 public:
  // Zeroed, on a 256-byte boundary. Errors: RESOURCE_EXHAUSTED.
  static absl::StatusOr<std::unique_ptr<BenchMemory>> Create(Device device, std::uint64_t size_bytes);
  ~BenchMemory();
  BenchMemory(const BenchMemory&) = delete;
  BenchMemory& operator=(const BenchMemory&) = delete;
  std::span<std::byte> span() const { return {data_, size_bytes_}; }
  // The pattern, over and over.
  absl::Status Fill(const void* pattern, std::uint64_t pattern_bytes) const;

 private:
  BenchMemory(Device device, std::byte* data, std::uint64_t size_bytes) : device_(device), data_(data), size_bytes_(size_bytes) {}
  const Device device_;
  std::byte* const data_;
  const std::uint64_t size_bytes_;
};

}  // namespace tandem
