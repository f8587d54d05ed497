// What a joiner checks before it trusts a pool. Pure functions.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "common/base/status.h"
#include "common/memory/pool_chunks.h"
#include "common/model/model_source.h"
#include "common/model/weight_layout.h"
#include "proto/pool.pb.h"

namespace tandem {

constexpr std::uint32_t kProtocolVersion = 1;

v1::WeightFormat ToProto(StorageFormat format);

// SHA-256 over the fixed part of the manifest (its fields 1 to 8) and over where each tensor lies.
std::string LayoutHash(const v1::PoolManifest& manifest, const WeightLayout& layout);

// SHA-256 over the first 4 KiB of every 1 MiB.
std::string SampleChecksum(std::span<const std::byte> weights);

// Version, transport, device, sizes and regions: what is known before a byte is mapped. Errors: FAILED_PRECONDITION naming both
// values, INVALID_ARGUMENT.
absl::Status CheckManifest(const v1::PoolManifest& manifest, const PoolMemory& memory);

// What lies in the mapped regions is what the manifest says: description, layout hash, sample of the weights.
// Errors: FAILED_PRECONDITION naming both values, and those of ParseModelDescription.
absl::Status CheckContent(const v1::PoolManifest& manifest, std::span<const std::byte> weights, std::span<const std::byte> model);

}  // namespace tandem
