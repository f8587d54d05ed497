// How a daemon comes by its pool: it joins the one of its living peer, or makes one. Blocks; called once, before the daemon
// serves.
#pragma once

#include <memory>
#include <vector>

#include "common/base/status.h"
#include "common/base/unique_fd.h"
#include "common/memory/lease_book.h"
#include "common/memory/pool_chunks.h"
#include "common/sharing/pool_member.h"
#include "common/sharing/process_watch.h"
#include "common/sharing/run_dir.h"
#include "proto/pool.pb.h"

namespace tandem {

struct HeldPool {
  FileLock membership;           // says, for life, that this daemon has a pool; released last
  std::vector<UniqueFd> chunks;  // kept for life: whoever lives hands them on
  std::unique_ptr<PoolMapping> mapping;
  v1::PoolManifest manifest;  // without lease, socket, token and offerer
  LeaseBook lease;
  ProcessWatch peer;  // open: attached to that process
  bool is_made = false;
};

v1::Role PeerOf(v1::Role role);
// Bytes [begin, end) of a region. Requires: the manifest has the region.
v1::ByteRange RangeOf(const v1::PoolManifest& manifest, v1::RegionKind kind);
std::span<std::byte> SpanOf(const PoolMapping& mapping, const v1::ByteRange& range);

// See Note [Who makes the pool]. Errors: those of joining and of making; DEADLINE_EXCEEDED after `start_timeout`; ALREADY_EXISTS
// (another process of this role has a pool in run_dir).
absl::StatusOr<HeldPool> FindOrMakePool(const PoolMemberOptions& options, const RunDir& run_dir, PoolMemory* memory);

}  // namespace tandem
