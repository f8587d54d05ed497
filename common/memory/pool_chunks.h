// The pool's physical memory, behind what every kind of memory can do: chunks that are made once and travel as descriptors, and
// one mapping of all of them in a row. A descriptor travels (ExportedChunks); a mapping lives (PoolMapping). Here memfd; device
// memory (cuMemCreate) is another PoolMemory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/base/status.h"
#include "common/base/unique_fd.h"

namespace tandem {

enum class Access { kNone, kRead, kReadWrite };

// The whole pool at one contiguous range of addresses of this process, for its life. Unmapped when destroyed. Thread-safe.
class PoolMapping {
 public:
  virtual ~PoolMapping() = default;
  virtual std::byte* base() const = 0;
  virtual std::uint64_t size_bytes() const = 0;
  // What this process may do with [begin, end). Requires: multiples of PoolMemory::granularity_bytes(), inside the pool.
  virtual absl::Status Protect(std::uint64_t begin_bytes, std::uint64_t end_bytes, Access access) = 0;
};

class PoolMemory {
 public:
  static std::unique_ptr<PoolMemory> CreateMemfd();
  virtual ~PoolMemory() = default;

  virtual const char* transport() const = 0;            // PoolManifest.transport
  virtual std::string device_uuid() const = 0;          // "cpu"
  virtual std::uint64_t granularity_bytes() const = 0;  // chunks and protected ranges are multiples of it
  // Zeroed chunks that can never shrink, close-on-exec. Errors: RESOURCE_EXHAUSTED naming chunk, size and reason.
  virtual absl::StatusOr<std::vector<UniqueFd>> CreateChunks(std::uint32_t num_chunks, std::uint64_t chunk_bytes) = 0;
  // Maps all chunks in a row, for reading and writing. Errors: INVALID_ARGUMENT (a descriptor is no chunk of that size),
  // RESOURCE_EXHAUSTED (address space, map count).
  virtual absl::StatusOr<std::unique_ptr<PoolMapping>> Map(std::span<const UniqueFd> chunks, std::uint64_t chunk_bytes) = 0;
};

// Raises the soft limit of open descriptors to `num_chunks` + 256, if it is lower. Errors: RESOURCE_EXHAUSTED naming both limits.
absl::Status RaiseDescriptorLimit(std::uint32_t num_chunks);

}  // namespace tandem
