#include "rollout_server/batch/step_batch_builder.h"

#include <algorithm>

namespace tandem {
namespace {

std::int32_t AdapterIndex(const std::optional<AdapterView>& adapter, std::vector<AdapterView>* adapters) {
  if (!adapter.has_value()) return -1;
  const auto found = std::find_if(adapters->begin(), adapters->end(), [&](const AdapterView& other) {
    return other.slot == adapter->slot && other.layout == adapter->layout && other.scale == adapter->scale &&
           other.activation_id == adapter->activation_id;
  });
  if (found != adapters->end()) return static_cast<std::int32_t>(found - adapters->begin());
  adapters->push_back(*adapter);
  return static_cast<std::int32_t>(adapters->size() - 1);
}

}  // namespace

StepBatch BuildStepBatch(const StepPlan& plan, const Scheduler& scheduler, int block_tokens,
                         const std::function<SequenceInputs(const Sequence&)>& inputs_of) {
  StepBatch batch;
  batch.token_ids.reserve(plan.num_tokens);
  batch.positions.reserve(plan.num_tokens);
  batch.slot_mapping.reserve(plan.num_tokens);
  batch.cu_query_lens.push_back(0);
  for (const PlannedSequence& planned : plan.sequences) {
    const Sequence& sequence = scheduler.sequence(planned.id);
    const SequenceInputs inputs = inputs_of(sequence);
    const std::uint32_t end = planned.begin + planned.num_tokens;
    for (std::uint32_t position = planned.begin; position < end; ++position) {
      batch.token_ids.push_back(sequence.TokenAt(position));
      batch.positions.push_back(static_cast<std::int32_t>(position));
      batch.slot_mapping.push_back(std::int64_t{sequence.block_table[position / block_tokens]} * block_tokens +
                                   position % block_tokens);
    }
    const auto num_tokens = static_cast<std::int32_t>(batch.token_ids.size());
    if (inputs.last_token_place != nullptr && end == sequence.num_tokens()) {
      batch.token_places.resize(plan.num_tokens);
      batch.token_places[static_cast<std::size_t>(num_tokens - 1)] = inputs.last_token_place;
    }
    batch.cu_query_lens.push_back(num_tokens);
    batch.context_lens.push_back(static_cast<std::int32_t>(end));
    const std::size_t num_blocks = (end + block_tokens - 1) / block_tokens;
    batch.block_tables.emplace_back(sequence.block_table.begin(), sequence.block_table.begin() + num_blocks);
    if (planned.draws) batch.logit_rows.push_back(num_tokens - 1);
    batch.adapter_of.push_back(AdapterIndex(inputs.adapter, &batch.adapters));
  }
  return batch;
}

}  // namespace tandem
