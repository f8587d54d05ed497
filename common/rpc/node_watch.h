// What a daemon tells of the node that it runs on, and of the pool that it shares.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "absl/time/time.h"
#include "common/base/clock.h"
#include "common/gpu/nvml.h"
#include "common/metrics/metrics.h"
#include "common/sharing/pool_member.h"

namespace tandem {

// tandem_memory_bytes: `standing` are the owners in the daemon's own standing region, the free part too. Thread-safe.
void ExportMemory(const PoolMember& pool, v1::Role role, std::span<const v1::OwnedBytes> standing, Metrics* metrics);

// Confined to one thread.
class NodeWatch {
 public:
  // `pool` may be null; it and `metrics` outlive the object. `data_dir`: whose disk is told of.
  NodeWatch(const PoolMember* pool, std::string data_dir, Metrics* metrics);

  // Cheap; does something twice a second: true then. On a GPU asks the driver.
  bool Look();

 private:
  void LookAtProcess();
  void LookAtHost();
  void LookAtPool();
  void LookAtDevice();

  const PoolMember* const pool_;
  const std::string data_dir_;
  Metrics* const metrics_;
  std::unique_ptr<Nvml> nvml_;  // null: no GPU, or no NVML
  double cpu_seconds_ = 0;
  std::uint64_t pool_bytes_ = 0;
  std::uint64_t logged_bytes_ = 0;  // of the device, outside the pool, when last told
  MonotonicTime looked_ = MonotonicTime::InfinitePast();
};

}  // namespace tandem
