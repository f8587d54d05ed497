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

// What this host has left, or the least that a group of processes has left, of this one's and of those around it. `proc` and
// `groups`: where the system tells, /proc and /sys/fs/cgroup. 0 where it does not.
std::uint64_t AvailableHostBytes(const std::string& proc, const std::string& groups);
// What passes may page-lock of it for the inputs of layers.
std::uint64_t LayerInputHostLimit();

}  // namespace tandem
