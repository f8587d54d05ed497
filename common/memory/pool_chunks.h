// The pool's physical memory, behind what every kind of memory can do: chunks that are made once and travel as descriptors, and
// one mapping of all of them in a row. Three kinds: memfd (the CPU's), device memory whose descriptors the driver makes
// (cuMemCreate), and device memory of the driver's older sharing (cudaIpc), for drivers that cannot export descriptors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/base/status.h"
#include "common/base/unique_fd.h"
#include "common/gpu/device.h"

namespace tandem {

enum class Access { kNone, kRead, kReadWrite };

// The whole pool at one contiguous range of addresses of this process, for its life; on a GPU device addresses, which the host
// never dereferences. Unmapped when destroyed. Thread-safe.
class PoolMapping {
 public:
  virtual ~PoolMapping() = default;
  virtual std::byte* base() const = 0;
  virtual std::uint64_t size_bytes() const = 0;
  // What this process may do with [begin, end). Requires: multiples of PoolMemory::granularity_bytes(), inside the pool; nothing
  // runs that touches the range. Device memory: only chunks wholly inside the range change, kRead leaves them writable (devices
  // have no read-only mapping), and cuda_ipc, which has one chunk that is mapped as it is, answers UNIMPLEMENTED to kNone.
  virtual absl::Status Protect(std::uint64_t begin_bytes, std::uint64_t end_bytes, Access access) = 0;
};

class PoolMemory {
 public:
  static std::unique_ptr<PoolMemory> CreateMemfd();
  // Errors: FAILED_PRECONDITION (no GPU, or it cannot export descriptors), UNIMPLEMENTED (a build without device code).
  static absl::StatusOr<std::unique_ptr<PoolMemory>> CreateCuda();
  static absl::StatusOr<std::unique_ptr<PoolMemory>> CreateCudaIpc();
  virtual ~PoolMemory() = default;

  virtual const char* transport() const = 0;  // PoolManifest.transport
  virtual Device device() const = 0;
  virtual std::string device_uuid() const = 0;          // "cpu"
  virtual std::uint64_t granularity_bytes() const = 0;  // chunks and protected ranges are multiples of it
  // The whole pool is one chunk, and is gone when the process that made it ends, whoever has it mapped.
  virtual bool dies_with_maker() const { return false; }
  // Chunks that can never shrink, close-on-exec; zeroed in host memory, of any content on a device. Errors: RESOURCE_EXHAUSTED
  // naming chunk, size and reason.
  virtual absl::StatusOr<std::vector<UniqueFd>> CreateChunks(std::uint32_t num_chunks, std::uint64_t chunk_bytes) = 0;
  // Maps all chunks in a row, for reading and writing. Errors: INVALID_ARGUMENT (a descriptor is no chunk of that size),
  // RESOURCE_EXHAUSTED (address space, map count).
  virtual absl::StatusOr<std::unique_ptr<PoolMapping>> Map(std::span<const UniqueFd> chunks, std::uint64_t chunk_bytes) = 0;
};

// Raises the soft limit of open descriptors to `num_chunks` + 256, if it is lower. Errors: RESOURCE_EXHAUSTED naming both limits.
absl::Status RaiseDescriptorLimit(std::uint32_t num_chunks);

}  // namespace tandem
