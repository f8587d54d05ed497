// How a new pool is cut: chunks, and five regions in a row. Plain data.
#pragma once

#include <cstdint>
#include <vector>

#include "common/base/status.h"
#include "proto/pool.pb.h"

namespace tandem {

struct PoolSizes {
  std::uint64_t pool_bytes = 0;   // 0: what the regions need, with 1.5 GiB of elastic range
  std::uint64_t chunk_bytes = 0;  // 0: 64 MiB for pools below 8 GiB, else 256 MiB
  std::uint64_t weights_bytes = 0;
  std::uint64_t model_bytes = 0;             // serialised description
  std::uint64_t rollout_standing_bytes = 0;  // 0: 64 MiB
  std::uint64_t trainer_standing_bytes = 0;  // 0: 256 MiB
  bool elastic_on_chunk = false;             // the trainer's region grows so that the elastic one begins with a chunk
};

struct PoolPlan {
  static constexpr std::uint64_t kMaxPoolBytes = std::uint64_t{1} << 46;
  static constexpr std::uint64_t kMaxChunks = 32768;  // half of Linux' default limit of maps a process

  std::uint64_t chunk_bytes = 0;
  std::uint32_t num_chunks = 0;
  std::vector<v1::Region> regions;  // in order, without gaps, over the whole pool; the elastic range takes what is left

  // Errors: INVALID_ARGUMENT naming what does not fit, by region.
  static absl::StatusOr<PoolPlan> Create(const PoolSizes& sizes, std::uint64_t granularity_bytes);
};

// One of each kind, in order, without gaps, over chunks x chunk_bytes, on multiples of `granularity_bytes`. For regions that a
// peer sent. Errors: INVALID_ARGUMENT naming the region and its bounds.
absl::Status CheckRegions(const std::vector<v1::Region>& regions, std::uint64_t pool_bytes, std::uint64_t granularity_bytes);

}  // namespace tandem
