// Draws a batch of groups from the rollout server as one unit: either all of it arrives, checked, or it is drawn again from its
// start. Confined to the trainer thread; blocks.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/model/model_config.h"
#include "common/model/tokenizer.h"
#include "trainer_server/rollout/rollout_group.h"
#include "trainer_server/rollout/rollout_peer.h"

namespace tandem {

struct RolloutUnit {
  std::string job;
  std::uint64_t weight_version = 0;  // every token must carry it
  std::uint32_t group_size = 1;
  v1::SamplingParams sampling;                    // its seed is set per group
  std::vector<std::span<const TokenId>> prompts;  // one a group
  std::vector<std::uint64_t> seeds;               // one a group
  // Each group as soon as it is whole. A unit that is drawn again calls again, from its first group on. May be empty.
  std::function<void(std::size_t group_index, const RolloutGroup& group)> on_group = {};
};

class RolloutClient {
 public:
  struct Options {
    std::shared_ptr<const Tokenizer> tokenizer;
    std::vector<std::uint32_t> end_token_ids;
    std::size_t vocab_size = 0;
    absl::Duration unit_deadline = absl::Hours(2);  // of one attempt
    int max_busy_attempts = 600;                    // while the server's queue is full, a tenth of a second apart
    int max_lost_attempts = 20;                     // that end with the server gone, or without the adapter just activated
  };
  // `reactivate` makes the rollout server use the current adapter again after it came back.
  RolloutClient(RolloutPeer* peer, std::function<absl::Status()> reactivate, Options options);

  // A server that dies or forgot the adapter is waited for and the whole unit drawn again; draws depend on the seeds alone, so
  // the result does not tell. Errors: CANCELLED (interrupted), DEADLINE_EXCEEDED, what the server refuses for good, INTERNAL (an
  // answer that breaks the contract), ABORTED (a completion ended with an error, or a log-prob is not finite: group, member,
  // token).
  absl::StatusOr<std::vector<RolloutGroup>> Draw(const RolloutUnit& unit);

 private:
  absl::StatusOr<std::vector<RolloutGroup>> DrawOnce(const RolloutUnit& unit);

  RolloutPeer* const peer_;
  const std::function<absl::Status()> reactivate_;
  const Options options_;
};

}  // namespace tandem
