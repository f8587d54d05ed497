// One training phase: the elastic region is the trainer's from Enter to Leave. Confined to the trainer thread; blocks.
#pragma once

#include <functional>
#include <memory>
#include <span>

#include "common/gpu/device.h"
#include "common/sharing/pool_member.h"
#include "trainer_server/rollout/rollout_peer.h"

namespace tandem {

class ElasticPhase {
 public:
  struct Options {
    PoolMember* member = nullptr;
    // Puts training memory into the region until the object dies; may be empty.
    std::function<std::shared_ptr<void>(std::span<std::byte> elastic)> enter_arena;
    Device device = Device::kCpu;  // the region lies on it
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

 private:
  RolloutPeer* const peer_;
  const Options options_;
  std::shared_ptr<void> arena_;
};

}  // namespace tandem
