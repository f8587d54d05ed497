#include "common/memory/pool_plan.h"

#include <algorithm>
#include <array>

#include "common/base/units.h"

namespace tandem {
namespace {

constexpr std::uint64_t kDefaultElasticBytes = 1536 * kMiB;
constexpr std::uint64_t kDefaultRolloutStandingBytes = 64 * kMiB;
constexpr std::uint64_t kDefaultTrainerStandingBytes = 256 * kMiB;
constexpr std::uint64_t kRegionAlignmentBytes = 2 * kMiB;  // a huge page; smaller when chunks are

constexpr std::array kOrder = {v1::REGION_KIND_WEIGHTS, v1::REGION_KIND_MODEL, v1::REGION_KIND_ROLLOUT_STANDING,
                               v1::REGION_KIND_TRAINER_STANDING, v1::REGION_KIND_ELASTIC};

}  // namespace

absl::StatusOr<PoolPlan> PoolPlan::Create(const PoolSizes& sizes, std::uint64_t granularity_bytes) {
  const auto or_default = [](std::uint64_t bytes, std::uint64_t fallback) { return bytes != 0 ? bytes : fallback; };
  const std::array<std::uint64_t, 4> wanted = {sizes.weights_bytes, sizes.model_bytes,
                                               or_default(sizes.rollout_standing_bytes, kDefaultRolloutStandingBytes),
                                               or_default(sizes.trainer_standing_bytes, kDefaultTrainerStandingBytes)};
  for (const std::uint64_t bytes : {wanted[0], wanted[1], wanted[2], wanted[3], sizes.pool_bytes, sizes.chunk_bytes}) {
    if (bytes > PoolPlan::kMaxPoolBytes)
      return absl::InvalidArgumentError(
          absl::StrCat("pool: a size of ", bytes, " bytes is beyond the limit of ", PoolPlan::kMaxPoolBytes));
  }
  if (sizes.chunk_bytes % granularity_bytes != 0)
    return absl::InvalidArgumentError(
        absl::StrCat("pool: chunk_bytes ", sizes.chunk_bytes, " is not a multiple of ", granularity_bytes));

  std::uint64_t alignment = sizes.chunk_bytes == 0 ? kRegionAlignmentBytes : std::min(sizes.chunk_bytes, kRegionAlignmentBytes);
  if (sizes.chunk_bytes % alignment != 0) alignment = granularity_bytes;  // so that the pool's end is aligned too
  std::uint64_t fixed_bytes = 0;
  for (const std::uint64_t bytes : wanted) fixed_bytes += RoundUp(bytes, alignment);
  const std::uint64_t least_bytes = or_default(sizes.pool_bytes, fixed_bytes + kDefaultElasticBytes);
  if (least_bytes < fixed_bytes + alignment)
    return absl::InvalidArgumentError(absl::StrCat(
        "pool: pool_bytes ", sizes.pool_bytes, " (", FormatBytes(sizes.pool_bytes), ") leaves no elastic range: weights ",
        FormatBytes(wanted[0]), ", model ", FormatBytes(wanted[1]), ", rollout standing ", FormatBytes(wanted[2]),
        ", trainer standing ", FormatBytes(wanted[3]), " take ", FormatBytes(fixed_bytes)));

  PoolPlan plan;
  plan.chunk_bytes = or_default(sizes.chunk_bytes, least_bytes < 8 * kGiB ? 64 * kMiB : 256 * kMiB);
  const std::uint64_t pool_bytes = RoundUp(least_bytes, plan.chunk_bytes);
  if (pool_bytes / plan.chunk_bytes > PoolPlan::kMaxChunks)
    return absl::InvalidArgumentError(absl::StrCat("pool: ", FormatBytes(pool_bytes), " in chunks of ",
                                                   FormatBytes(plan.chunk_bytes), " are ", pool_bytes / plan.chunk_bytes,
                                                   " chunks, more than ", PoolPlan::kMaxChunks, ": take larger chunks"));
  plan.num_chunks = static_cast<std::uint32_t>(pool_bytes / plan.chunk_bytes);
  std::uint64_t begin = 0;
  for (std::size_t i = 0; i < kOrder.size(); ++i) {
    std::uint64_t end = i < wanted.size() ? begin + RoundUp(wanted[i], alignment) : pool_bytes;
    if (sizes.elastic_on_chunk && i + 1 == wanted.size() && RoundUp(end, plan.chunk_bytes) < pool_bytes)
      end = RoundUp(end, plan.chunk_bytes);
    v1::Region region;
    region.set_kind(kOrder[i]);
    region.mutable_range()->set_begin_bytes(begin);
    region.mutable_range()->set_end_bytes(end);
    plan.regions.push_back(region);
    begin = end;
  }
  return plan;
}

absl::Status CheckRegions(const std::vector<v1::Region>& regions, std::uint64_t pool_bytes, std::uint64_t granularity_bytes) {
  if (regions.size() != kOrder.size())
    return absl::InvalidArgumentError(absl::StrCat("pool: ", regions.size(), " regions, not ", kOrder.size()));
  std::uint64_t begin = 0;
  for (std::size_t i = 0; i < kOrder.size(); ++i) {
    const v1::ByteRange& range = regions[i].range();
    const bool is_last = i + 1 == kOrder.size();
    if (regions[i].kind() != kOrder[i] || range.begin_bytes() != begin || range.end_bytes() < begin ||
        range.end_bytes() > pool_bytes || range.end_bytes() % granularity_bytes != 0 ||
        (is_last && range.end_bytes() != pool_bytes))
      return absl::InvalidArgumentError(absl::StrCat(
          "pool: region ", i, " is ", v1::RegionKind_Name(regions[i].kind()), " [", range.begin_bytes(), ", ", range.end_bytes(),
          "); wanted ", v1::RegionKind_Name(kOrder[i]), " from ", begin, ", inside a pool of ", pool_bytes));
    begin = range.end_bytes();
  }
  return absl::OkStatus();
}

}  // namespace tandem
