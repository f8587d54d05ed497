// From a step plan to the arrays that the model reads. Pure; called on the engine thread.
#pragma once

#include <functional>
#include <optional>

#include "rollout_server/model/decoder_model.h"
#include "rollout_server/schedule/scheduler.h"

namespace tandem {

// Sequences lie in the plan's order, and so do logit rows: row i belongs to the i-th sequence that draws. Adapters are named once
// each. `adapter_of` gives a sequence's adapter, nullopt for the base model.
StepBatch BuildStepBatch(const StepPlan& plan, const Scheduler& scheduler, int block_tokens,
                         const std::function<std::optional<AdapterView>(const Sequence&)>& adapter_of);

}  // namespace tandem
