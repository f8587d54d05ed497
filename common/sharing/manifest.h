// What a joiner checks before it trusts a pool. Pure functions.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "common/base/status.h"
#include "common/gpu/device.h"
#include "common/memory/pool_chunks.h"
#include "common/model/model_source.h"
#include "common/model/weight_layout.h"
#include "proto/pool.pb.h"

namespace tandem {

constexpr std::uint32_t kProtocolVersion = 1;

v1::WeightFormat ToProto(StorageFormat format);

// SHA-256 over the fixed part of the manifest (its fields 1 to 8) and over where each tensor lies.
std::string LayoutHash(const v1::PoolManifest& manifest, const WeightLayout& layout);

// SHA-256 over the first 4 KiB of every 1 MiB of what lies on `device`. Errors: those of CopyToHost.
absl::StatusOr<std::string> SampleChecksum(Device device, std::span<const std::byte> weights);

// Version, transport, device, sizes and regions: what is known before a byte is mapped. Errors: FAILED_PRECONDITION naming both
// values, INVALID_ARGUMENT.
absl::Status CheckManifest(const v1::PoolManifest& manifest, const PoolMemory& memory);

// The description in the first `size_bytes` of the model region, which lies on `device`. Errors: INVALID_ARGUMENT (the size),
// those of CopyToHost and of ParseModelDescription.
absl::StatusOr<ModelDescription> ReadModelDescription(Device device, std::span<const std::byte> model, std::uint64_t size_bytes);

// What lies in the regions, mapped on `device`, is what the manifest says: description, layout hash, sample of the weights.
// Errors: FAILED_PRECONDITION naming both values, and those of ReadModelDescription.
absl::Status CheckContent(const v1::PoolManifest& manifest, Device device, std::span<const std::byte> weights,
                          std::span<const std::byte> model);

}  // namespace tandem
