// The node as plans see it: the pool's regions, what the trainer keeps whatever the job, the host's memory, and what the rollout
// server says of itself. Thread-safe.
#pragma once

#include <optional>
#include <vector>

#include "common/base/mutex.h"
#include "common/sharing/pool_member.h"
#include "trainer_server/plan/memory_plan.h"
#include "trainer_server/rollout/rollout_peer.h"

namespace tandem {

class NodeMemoryReader {
 public:
  struct Options {
    ModelConfig model;
    StorageFormat weight_format = StorageFormat::kFp32;
    AttentionOptions attention;
    std::vector<v1::OwnedBytes> trainer_fixed;  // see NodeMemory
    std::uint64_t host_limit_bytes = 0;         // of passes on a GPU
  };
  // `member` and `peer` outlive this.
  NodeMemoryReader(Options options, const PoolMember* member, const RolloutPeer* peer);
  // Asks the rollout server; while it does not answer, what it said last holds. Blocks for at most 2 s.
  NodeMemory Read();

 private:
  const Options options_;
  const PoolMember* const member_;
  const RolloutPeer* const peer_;
  Mutex mutex_;
  std::optional<v1::RolloutMemory> heard_ ABSL_GUARDED_BY(mutex_);
};

// What passes may page-lock for the inputs of layers, of the memory that this host, or the group of processes that this one is
// confined to, has left. 0 where the system does not say.
std::uint64_t LayerInputHostLimit();

}  // namespace tandem
