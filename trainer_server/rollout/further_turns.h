// The model's further turns of conversations: drawn one turn after the other, each a unit of its own, behind the tokens that the
// member drew before.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "trainer_server/prompt/prompt_source.h"
#include "trainer_server/rollout/rollout_client.h"

namespace tandem {

struct FurtherTurns {
  const PromptEncoder* encoder = nullptr;
  std::string template_arguments;
  std::uint64_t largest_context_tokens = 0;
};

// `groups`: the first turns, as `first` drew them of `prompts`. A member whose turn was cut by its length has no further one.
// Errors: RESOURCE_EXHAUSTED naming the row (the conversation outgrows the largest context), the encoder's,
// RolloutClient::Draw's.
absl::Status DrawFurtherTurns(const FurtherTurns& turns, const RolloutUnit& first, std::span<const Prompt> prompts,
                              RolloutClient* client, std::vector<RolloutGroup>* groups);

}  // namespace tandem
