#include "common/sharing/manifest.h"

#include <algorithm>
#include <array>

#include "common/base/hash.h"
#include "common/base/units.h"
#include "common/memory/pool_plan.h"

namespace tandem {
namespace {

absl::Status Differs(const char* what, const std::string& offered, const std::string& here) {
  return absl::FailedPreconditionError(absl::StrCat("pool: ", what, " is '", offered, "', here '", here, "'"));
}

}  // namespace

v1::WeightFormat ToProto(StorageFormat format) {
  switch (format) {
    case StorageFormat::kFp32:
      return v1::WEIGHT_FORMAT_FP32;
    case StorageFormat::kBf16:
      return v1::WEIGHT_FORMAT_BF16;
    case StorageFormat::kFp8Row:
      return v1::WEIGHT_FORMAT_FP8;
    case StorageFormat::kNf4:
      return v1::WEIGHT_FORMAT_NF4;
    case StorageFormat::kFp8Block:
      return v1::WEIGHT_FORMAT_FP8_BLOCK;
  }
  return v1::WEIGHT_FORMAT_UNSPECIFIED;
}

std::string LayoutHash(const v1::PoolManifest& manifest, const WeightLayout& layout) {
  v1::PoolManifest fixed;
  fixed.set_protocol_version(manifest.protocol_version());
  fixed.set_pool_id(manifest.pool_id());
  fixed.set_device_uuid(manifest.device_uuid());
  fixed.set_transport(manifest.transport());
  fixed.set_chunk_bytes(manifest.chunk_bytes());
  fixed.set_num_chunks(manifest.num_chunks());
  *fixed.mutable_regions() = manifest.regions();
  *fixed.mutable_weights() = manifest.weights();
  Sha256 hash;
  hash.Update(fixed.SerializeAsString());  // no maps in it: the same bytes everywhere
  hash.Update(layout.digest);
  return hash.Finish();
}

absl::StatusOr<std::string> SampleChecksum(Device device, std::span<const std::byte> weights) {
  std::array<std::byte, 4 * kKiB> piece;
  Sha256 hash;
  for (std::size_t begin = 0; begin < weights.size(); begin += kMiB) {
    const std::size_t size = std::min(weights.size() - begin, piece.size());
    TANDEM_RETURN_IF_ERROR(CopyToHost(device, piece.data(), weights.data() + begin, size));
    hash.Update(piece.data(), size);
  }
  return hash.Finish();
}

absl::StatusOr<ModelDescription> ReadModelDescription(Device device, std::span<const std::byte> model, std::uint64_t size_bytes) {
  if (size_bytes > model.size())
    return absl::InvalidArgumentError(absl::StrCat("a description of ", size_bytes, " bytes in a region of ", model.size()));
  std::string bytes(size_bytes, '\0');
  TANDEM_RETURN_IF_ERROR(CopyToHost(device, bytes.data(), model.data(), size_bytes));
  absl::StatusOr<ModelDescription> description = ParseModelDescription(bytes);
  if (!description.ok()) return Annotate(description.status(), "the pool's model description");
  return description;
}

absl::Status CheckManifest(const v1::PoolManifest& manifest, const PoolMemory& memory) {
  if (manifest.protocol_version() != kProtocolVersion)
    return Differs("protocol version", absl::StrCat(manifest.protocol_version()), absl::StrCat(kProtocolVersion));
  if (manifest.device_uuid() != memory.device_uuid()) return Differs("device", manifest.device_uuid(), memory.device_uuid());
  if (manifest.transport() != memory.transport()) return Differs("transport", manifest.transport(), memory.transport());
  if (manifest.dies_with_maker() != memory.dies_with_maker())
    return Differs("life", manifest.dies_with_maker() ? "its maker's" : "its holders'",
                   memory.dies_with_maker() ? "its maker's" : "its holders'");
  std::uint64_t pool_bytes = 0;
  if (manifest.num_chunks() == 0 || manifest.num_chunks() > PoolPlan::kMaxChunks || manifest.chunk_bytes() == 0 ||
      manifest.chunk_bytes() % memory.granularity_bytes() != 0 ||
      !MultiplyFits(manifest.num_chunks(), manifest.chunk_bytes(), &pool_bytes) || pool_bytes > PoolPlan::kMaxPoolBytes)
    return absl::InvalidArgumentError(absl::StrCat("pool: ", manifest.num_chunks(), " chunks of ", manifest.chunk_bytes(),
                                                   " bytes; limits are ", PoolPlan::kMaxChunks, " chunks and ",
                                                   PoolPlan::kMaxPoolBytes, " bytes in all"));
  TANDEM_RETURN_IF_ERROR(
      CheckRegions({manifest.regions().begin(), manifest.regions().end()}, pool_bytes, memory.granularity_bytes()));
  const auto size_of = [&](int region) {
    return manifest.regions(region).range().end_bytes() - manifest.regions(region).range().begin_bytes();
  };
  if (manifest.weights().bytes() > size_of(0) || manifest.weights().description_bytes() > size_of(1))
    return absl::InvalidArgumentError(absl::StrCat("pool: weights of ", manifest.weights().bytes(), " and description of ",
                                                   manifest.weights().description_bytes(), " bytes do not fit their regions of ",
                                                   size_of(0), " and ", size_of(1)));
  return absl::OkStatus();
}

absl::Status CheckContent(const v1::PoolManifest& manifest, Device device, std::span<const std::byte> weights,
                          std::span<const std::byte> model) {
  TANDEM_ASSIGN_OR_RETURN(const ModelDescription description,
                          ReadModelDescription(device, model, manifest.weights().description_bytes()));
  const WeightLayout layout = WeightLayout::Create(description.config, description.format);
  if (layout.total_bytes != manifest.weights().bytes())
    return Differs("size of the weights", absl::StrCat(manifest.weights().bytes()), absl::StrCat(layout.total_bytes));
  if (const std::string hash = LayoutHash(manifest, layout); hash != manifest.layout_hash())
    return Differs("layout hash", manifest.layout_hash(), hash);
  TANDEM_ASSIGN_OR_RETURN(const std::string sample, SampleChecksum(device, weights.first(layout.total_bytes)));
  if (sample != manifest.weights().sample_checksum())
    return Differs("checksum of the weights' sample", manifest.weights().sample_checksum(), sample);
  return absl::OkStatus();
}

}  // namespace tandem
