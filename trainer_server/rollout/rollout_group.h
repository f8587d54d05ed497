// Second arrow of the loop: prompts -> rollouts. Plain values, made once by RolloutClient.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "proto/rollout.pb.h"

namespace tandem {

// One completion; in a conversation, all of the model's turns and what was said to it between them. The arrays have one entry a
// token; training uses the ids, never text encoded again.
struct Rollout {
  std::vector<std::uint32_t> token_ids;
  std::vector<double> rollout_logprobs;   // of the distribution drawn from, nats
  std::vector<double> kept_mass;          // of top-k/top-p/min-p; empty: all 1
  std::vector<std::uint8_t> loss_mask;    // 0: a token that was said, not drawn; empty: all were drawn
  std::vector<std::uint32_t> prompt_ids;  // empty: the group's; else its own, of a conversation that was split
  v1::FinishReason finish_reason = v1::FINISH_REASON_UNSPECIFIED;  // of the last turn
  std::string text;  // of the last turn, decoded from the ids: no special tokens, cut before a stop string

  bool is_truncated() const { return finish_reason == v1::FINISH_REASON_LENGTH; }
  std::size_t num_drawn() const {
    return loss_mask.empty() ? token_ids.size()
                             : static_cast<std::size_t>(std::count(loss_mask.begin(), loss_mask.end(), std::uint8_t{1}));
  }
};

struct RolloutGroup {
  std::vector<Rollout> members;  // [group_size]
};

}  // namespace tandem
