// Last arrow of the loop: adapters -> weight version. Two slots in the trainer's standing region: the version in use and the one
// being written. A slot is rewritten only when the rollout server no longer reads it. Confined to the trainer thread; blocks.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "common/gpu/device.h"
#include "common/model/weight_layout.h"
#include "trainer_server/rollout/rollout_peer.h"

namespace tandem {

class AdapterPublisher {
 public:
  struct Options {
    std::string job;
    std::array<std::span<std::byte>, 2> slots;                    // AdapterLayout.total_bytes each
    std::function<std::uint64_t(const void* address)> offset_of;  // in the pool
    AdapterLayout layout;
    float scale = 0;
    Device device = Device::kCpu;  // where slots and adapters lie
    absl::Duration activate_deadline = absl::Seconds(30);
  };
  AdapterPublisher(RolloutPeer* peer, Options options);

  // Writes `adapter` into the idle slot and makes it `version`, once no sequence runs under the one before. After an error the
  // version in use is what it was, here; call again with the same arguments. Errors: those of the call.
  absl::Status Publish(std::uint64_t version, std::span<const std::byte> adapter);
  // Publish until it holds: a rollout server that is away or does not answer in time is waited for. Errors: CANCELLED,
  // DEADLINE_EXCEEDED (patience), what the server refuses for good.
  absl::Status PublishWhenServing(std::uint64_t version, std::span<const std::byte> adapter);
  // Makes the version in use known again to a rollout server that came back or whose answer was lost. Requires: a version in use.
  absl::Status Reactivate();

  std::uint64_t version() const { return version_; }  // 0: none yet

 private:
  absl::Status Activate(std::uint64_t version, std::size_t slot, const std::string& checksum);

  RolloutPeer* const peer_;
  const Options options_;
  std::uint64_t version_ = 0;
  std::size_t active_slot_ = 1;
  std::string active_checksum_;
  bool is_outcome_known_ = false;  // of the last call; before the first, a life of this trainer before may have left something
};

// Forgets a job's adapter at the rollout server. Errors: UNAVAILABLE, DEADLINE_EXCEEDED, CANCELLED.
absl::Status RetireAdapter(RolloutPeer* peer, const std::string& job, absl::Duration deadline);

}  // namespace tandem
