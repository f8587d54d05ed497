// From a step plan to the arrays that the model reads. Pure; called on the engine thread.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "rollout_server/model/decoder_model.h"
#include "rollout_server/schedule/scheduler.h"

namespace tandem {

// What a step needs of a sequence that the scheduler does not know.
struct SequenceInputs {
  std::optional<AdapterView> adapter = std::nullopt;  // nullopt: the base model
  const std::uint32_t* last_token_place = nullptr;    // where its last token will lie, while that is being drawn
};

// Sequences lie in the plan's order, and so do logit rows: row i belongs to the i-th sequence that draws. Adapters are named once
// each.
StepBatch BuildStepBatch(const StepPlan& plan, const Scheduler& scheduler, int block_tokens,
                         const std::function<SequenceInputs(const Sequence&)>& inputs_of);

}  // namespace tandem
