#include "trainer_server/batch/pack_micro_batches.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace tandem {
namespace {

constexpr std::int64_t kDefaultMicroBatchTokens = 2048;

std::int64_t Rows(std::span<const std::uint32_t> ids) { return static_cast<std::int64_t>(ids.size()); }
std::int64_t Rows(const MicroBatch& batch) { return static_cast<std::int64_t>(batch.token_ids.size()); }

void AppendRows(std::span<const std::uint32_t> ids, std::int64_t first_position, MicroBatch* batch) {
  for (std::size_t i = 0; i < ids.size(); ++i) {
    batch->token_ids.push_back(ids[i]);
    batch->positions.push_back(first_position + static_cast<std::int64_t>(i));
  }
}

void AppendCompletion(const GroupToPack& group, const CompletionToPack& completion, std::int64_t prompt_begin,
                      MicroBatch* batch) {
  const std::int64_t prompt_end = prompt_begin + Rows(group.prompt_ids), begin = Rows(*batch);
  AppendRows(completion.token_ids, Rows(group.prompt_ids), batch);
  batch->completions.push_back({.sequence_index = completion.sequence_index,
                                .prompt_begin = static_cast<std::int32_t>(prompt_begin),
                                .prompt_end = static_cast<std::int32_t>(prompt_end),
                                .begin = static_cast<std::int32_t>(begin),
                                .end = static_cast<std::int32_t>(Rows(*batch))});
  for (std::size_t i = 0; i < completion.token_ids.size(); ++i) {
    if (completion.loss_mask[i] == 0) continue;
    batch->head_rows.push_back(i == 0 ? prompt_end - 1 : begin + static_cast<std::int64_t>(i) - 1);
    batch->head_targets.push_back(completion.token_ids[i]);
  }
}

absl::Status CheckGroup(const GroupToPack& group, std::int64_t max_tokens) {
  for (const CompletionToPack& completion : group.completions) {
    const auto fault = [&](const auto&... parts) {
      return absl::InvalidArgumentError(absl::StrCat("packing sequence ", completion.sequence_index, ": ", parts...));
    };
    if (group.prompt_ids.empty()) return fault("its prompt is empty");
    if (completion.loss_mask.size() != completion.token_ids.size()) {
      return fault(completion.token_ids.size(), " tokens but ", completion.loss_mask.size(), " loss mask entries");
    }
    const std::int64_t needed = Rows(group.prompt_ids) + Rows(completion.token_ids);
    if (needed > max_tokens) {
      return fault("prompt ", group.prompt_ids.size(), " + completion ", completion.token_ids.size(), " = ", needed,
                   " tokens exceed the micro-batch limit of ", max_tokens);
    }
  }
  return absl::OkStatus();
}

}  // namespace

std::int64_t MicroBatchLimit(std::int64_t given, std::int64_t longest) {
  return given > 0 ? given : std::max(kDefaultMicroBatchTokens, longest);
}

absl::StatusOr<std::vector<MicroBatch>> PackMicroBatches(std::span<const GroupToPack> groups, std::int64_t max_tokens) {
  std::vector<MicroBatch> packed;
  MicroBatch open;
  const auto close = [&] {
    if (!open.completions.empty()) packed.push_back(std::exchange(open, {}));
  };
  for (const GroupToPack& group : groups) {
    if (group.completions.empty()) continue;
    TANDEM_RETURN_IF_ERROR(CheckGroup(group, max_tokens));
    std::int64_t group_rows = Rows(group.prompt_ids);
    for (const CompletionToPack& completion : group.completions) group_rows += Rows(completion.token_ids);
    if (Rows(open) + group_rows > max_tokens) close();

    std::int64_t prompt_begin = Rows(open);
    AppendRows(group.prompt_ids, 0, &open);
    for (const CompletionToPack& completion : group.completions) {
      if (Rows(open) + Rows(completion.token_ids) > max_tokens) {
        close();
        prompt_begin = 0;
        AppendRows(group.prompt_ids, 0, &open);
      }
      AppendCompletion(group, completion, prompt_begin, &open);
    }
  }
  close();
  return packed;
}

void AddPromptHeadRows(MicroBatch* batch) {
  std::int32_t added_until = 0;  // prompts come in ascending order of rows
  for (const PackedCompletion& completion : batch->completions) {
    if (completion.prompt_end <= added_until) continue;
    added_until = completion.prompt_end;
    for (std::int64_t row = completion.prompt_begin; row + 1 < completion.prompt_end; ++row) {
      batch->head_rows.push_back(row);
      batch->head_targets.push_back(batch->token_ids[static_cast<std::size_t>(row + 1)]);
      ++batch->num_prompt_head_rows;
    }
  }
}

}  // namespace tandem
