// One training phase: the elastic region is the trainer's from Enter to Leave. Confined to the trainer thread; blocks.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "common/gpu/device.h"
#include "common/sharing/pool_member.h"
#include "trainer_server/rollout/rollout_peer.h"

namespace tandem {

// Training memory lies in the elastic region as long as this lives.
class PhaseMemory {
 public:
  virtual ~PhaseMemory() = default;
  virtual std::uint64_t peak_bytes() const = 0;  // since it began
};

class ElasticPhase {
 public:
  struct Options {
    PoolMember* member = nullptr;
    std::function<std::unique_ptr<PhaseMemory>(std::span<std::byte> elastic)> enter_arena;  // may be empty
    absl::Duration call_deadline = absl::Seconds(60);
  };
  ElasticPhase(RolloutPeer* peer, Options options) : peer_(peer), options_(std::move(options)) {}

  // Streams are paused at the rollout server. It is waited for when it is away. Errors: CANCELLED, DEADLINE_EXCEEDED (patience),
  // what it refuses for good; the region is then not the trainer's.
  absl::Status Enter();
  // Gives the region back, once no kernel of this process can touch it any more: a failed step leaves some queued. A rollout
  // server that died meanwhile is waited for: it takes the region when it attaches. Idempotent. Errors: CANCELLED,
  // DEADLINE_EXCEEDED (patience); call again then.
  absl::Status Leave();
  bool is_entered() const { return options_.member->holds_elastic(); }
  // Of training memory in the last phase that was left; 0: it took none.
  std::uint64_t peak_bytes() const { return peak_bytes_; }

 private:
  RolloutPeer* const peer_;
  const Options options_;
  std::unique_ptr<PhaseMemory> arena_;
  std::uint64_t peak_bytes_ = 0;
};

}  // namespace tandem
