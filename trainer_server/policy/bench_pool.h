// A bench's memory on one device, as the pool takes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "common/base/units.h"
#include "common/memory/pool_chunks.h"

namespace tandem {

class BenchPool {
 public:
  // At least `size_bytes`. Errors: RESOURCE_EXHAUSTED, UNIMPLEMENTED (no device code).
  static absl::StatusOr<BenchPool> Create(Device device, std::uint64_t size_bytes) {
    std::unique_ptr<PoolMemory> memory = PoolMemory::CreateMemfd();
    if (device == Device::kCuda) { TANDEM_ASSIGN_OR_RETURN(memory, PoolMemory::CreateCuda()); }
    const std::uint64_t chunk_bytes = RoundUp(std::uint64_t{64} << 20, memory->granularity_bytes());
    const auto num_chunks = static_cast<std::uint32_t>((size_bytes + chunk_bytes - 1) / chunk_bytes);
    TANDEM_RETURN_IF_ERROR(RaiseDescriptorLimit(num_chunks));
    BenchPool pool;
    TANDEM_ASSIGN_OR_RETURN(const std::vector<UniqueFd> chunks, memory->CreateChunks(num_chunks, chunk_bytes));
    TANDEM_ASSIGN_OR_RETURN(pool.mapping_, memory->Map(chunks, chunk_bytes));
    pool.free_ = {pool.mapping_->base(), pool.mapping_->size_bytes()};
    pool.memory_ = std::move(memory);
    return pool;
  }
  // Errors: RESOURCE_EXHAUSTED naming the sizes.
  absl::StatusOr<std::span<std::byte>> Take(std::uint64_t size_bytes) {
    const std::uint64_t rounded = RoundUp(size_bytes, 4096);
    if (rounded > free_.size()) {
      return absl::ResourceExhaustedError(absl::StrCat("--memory_gib: ", size_bytes, " bytes wanted, ", free_.size(), " left"));
    }
    const std::span<std::byte> piece = free_.first(size_bytes);
    free_ = free_.subspan(rounded);
    return piece;
  }
  std::span<std::byte> rest() const { return free_; }
  std::uint64_t size_bytes() const { return mapping_->size_bytes(); }

 private:
  std::unique_ptr<PoolMemory> memory_;
  std::unique_ptr<PoolMapping> mapping_;
  std::span<std::byte> free_;
};

}  // namespace tandem
