// Second arrow of the loop: prompts -> rollouts. Plain values, made once by RolloutClient.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "proto/rollout.pb.h"

namespace tandem {

// One completion. The three arrays have one entry a token; training uses the ids, never text encoded again.
struct Rollout {
  std::vector<std::uint32_t> token_ids;
  std::vector<double> rollout_logprobs;  // of the distribution drawn from, nats
  std::vector<double> kept_mass;         // of top-k/top-p/min-p; empty: all 1
  v1::FinishReason finish_reason = v1::FINISH_REASON_UNSPECIFIED;
  std::string text;  // decoded from the ids: no special tokens, cut before a stop string

  bool is_truncated() const { return finish_reason == v1::FINISH_REASON_LENGTH; }
};

struct RolloutGroup {
  std::vector<Rollout> members;  // [group_size]
};

}  // namespace tandem
