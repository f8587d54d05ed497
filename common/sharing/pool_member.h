// A daemon's membership in the pool: it found a pool to join or made one, mapped it once for life, and offers it to whoever
// comes. This is all that the two servers see of the handshake. Thread-safe.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "common/base/clock.h"
#include "common/base/status.h"
#include "common/gpu/device.h"
#include "common/model/model_source.h"
#include "proto/pool.grpc.pb.h"

namespace tandem {

struct PoolMemberOptions {
  v1::Role role = v1::ROLE_UNSPECIFIED;
  std::string peer_address;      // gRPC address of the other daemon
  std::string run_dir;           // lock file and Unix sockets; 0700
  std::string model_path;        // or "random:SHAPE"; read only by the pool's maker, may be empty for one that only joins
  Device device = Device::kCpu;  // where the pool lies: both daemons' must be the same
  std::optional<StorageFormat> weight_format;  // nullopt: what the peer has; for the maker see ChooseStorageFormat
  bool use_cuda_ipc = false;                   // the second transport of device memory, which dies with its maker
  std::uint64_t pool_bytes = 0;              // 0: on a GPU all free memory but `reserve_bytes`; else what the regions need and a
                                             // default elastic region
  std::uint64_t reserve_bytes = 0;           // device memory left to both daemons' contexts, modules and graphs
  std::uint64_t chunk_bytes = 0;             // 0: by pool size
  std::uint64_t rollout_standing_bytes = 0;  // 0: default
  std::uint64_t trainer_standing_bytes = 0;  // 0: default
  bool strict_leases = false;
  absl::Duration start_timeout = absl::Minutes(10);  // waiting for the peer to load weights
  absl::Duration holder_timeout = absl::Minutes(2);  // after which a peer that is stopped is reported
  bool kill_silent_holder = false;
};

// What the member tells its daemon, one at a time and in order. Called on the member's own thread and must not block long; what
// comes with a lease call (yield, returned) on that call's thread. None may acquire or release a lease.
struct PoolEvents {
  std::function<void(v1::Role peer, int pid)> on_peer_attached;
  std::function<void(v1::Role peer)> on_peer_lost;  // by pidfd: its memory use has ended
  // Asked of the rollout server only: finish or pause the streams, fence, then return. No kernel may touch the elastic range
  // after.
  std::function<absl::Status(v1::StreamMode mode, MonotonicTime deadline)> on_yield_elastic;
  std::function<void()> on_elastic_returned;  // the elastic range is this daemon's again
};

class PoolMember {
 public:
  // Joins the peer's pool, or makes one and loads the weights. Blocks until attached or `start_timeout`.
  // The gRPC services of this member must be served by the caller: see service().
  static absl::StatusOr<std::unique_ptr<PoolMember>> Start(const PoolMemberOptions& options);
  virtual ~PoolMember() = default;

  // The PoolService that this daemon serves. Register it before the server starts; alive as long as the member. Before
  // Offer() it answers UNAVAILABLE.
  virtual v1::PoolService::Service* service() = 0;
  // From now on peers may attach; events are delivered.
  virtual void Offer(PoolEvents events) = 0;
  virtual void Stop() = 0;

  // Where the pool lies. On Device::kCuda all addresses below are device addresses, which the host never dereferences.
  virtual Device device() const = 0;
  // OK, or why the pool can be used no longer and the daemon has to end: its memory died with the process that made it (transport
  // cuda_ipc). UNAVAILABLE.
  virtual absl::Status health() const = 0;
  virtual std::span<std::byte> region(v1::RegionKind kind) const = 0;  // this process's mapping
  virtual std::uint64_t offset_of(const void* address) const = 0;      // pool offset; Requires: inside the pool
  virtual std::byte* address_of(std::uint64_t offset_bytes) const = 0;
  virtual v1::PoolManifest manifest() const = 0;
  virtual bool made_pool() const = 0;  // false: attached to a living one
  virtual bool is_peer_attached() const = 0;
  // Of the pool by region; on a GPU also "outside_pool", not in the pool: what the driver calls used and the pool is not (both
  // contexts, modules, graphs, and other processes of the card).
  virtual std::vector<v1::OwnedBytes> RegionLedger() const = 0;

  // Lease, from this daemon's side. The trainer asks the rollout server over gRPC; the rollout server holds it otherwise.
  virtual absl::StatusOr<v1::LeaseState> AcquireElastic(v1::StreamMode mode, MonotonicTime deadline) = 0;  // trainer only
  virtual absl::Status ReleaseElastic(MonotonicTime deadline) = 0;                                         // trainer only
  virtual v1::LeaseState lease() const = 0;
  virtual bool holds_elastic() const = 0;
};

// What the pool says of its model. Errors: those of CopyToHost and of ParseModelDescription.
absl::StatusOr<ModelDescription> ReadModelDescription(const PoolMember& pool);

}  // namespace tandem
