#include "trainer_server/prompt/row_selection.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "common/base/random.h"
#include "trainer_server/prompt/prompt_source.h"

namespace tandem {
namespace {

// Part of split_seed that splits; beyond any step number, as all such parts.
constexpr std::uint64_t kSplitPart = 0x53706c6974'000001ULL;

// True for each row held out: the first `count` of a permutation.
std::vector<bool> DrawHeldOut(std::size_t num_rows, std::size_t count, std::uint64_t split_seed) {
  std::vector<bool> is_held_out(num_rows, false);
  if (count == 0) return is_held_out;
  const std::uint64_t seed = DeriveSeed(split_seed, kSplitPart);
  std::vector<std::uint32_t> order(num_rows);
  std::iota(order.begin(), order.end(), 0);
  for (std::size_t i = 0; i < count; ++i) {
    std::swap(order[i], order[i + RandomBelow(seed, i, num_rows - i)]);
    is_held_out[order[i]] = true;
  }
  return is_held_out;
}

}  // namespace

absl::StatusOr<RowSelection> SelectRows(const PromptEncoder& encoder, const v1::DataConfig& config, const DataSet& data) {
  const std::size_t num_rows = data.num_rows();
  RowSelection selection;
  v1::DataCounts& counts = selection.counts;
  counts.set_rows(num_rows);
  counts.set_trained(num_rows);
  const bool filters = config.min_prompt_tokens() > 0 || config.max_prompt_tokens() > 0;
  if (!filters && config.held_out_share() == 0) return selection;
  if (filters && num_rows > kMaxFilteredRows) {
    return absl::InvalidArgumentError(absl::StrCat(config.max_prompt_tokens() > 0 ? "max_prompt_tokens" : "min_prompt_tokens",
                                                   ": the data set has ", num_rows,
                                                   " rows; a filter encodes the prompts of at most ", kMaxFilteredRows));
  }
  const auto num_held_out = static_cast<std::size_t>(std::llround(config.held_out_share() * static_cast<double>(num_rows)));
  if (config.held_out_share() > 0 && (num_held_out == 0 || num_held_out == num_rows)) {
    return absl::InvalidArgumentError(absl::StrCat("held_out_share: ", config.held_out_share(), " of ", num_rows, " rows is ",
                                                   num_held_out, "; it must be 1 to ", num_rows - 1));
  }
  const std::vector<bool> is_held_out = DrawHeldOut(num_rows, num_held_out, config.split_seed());
  auto trained = std::make_shared<std::vector<std::uint32_t>>(), held_out = std::make_shared<std::vector<std::uint32_t>>();
  for (std::size_t row = 0; row < num_rows; ++row) {
    if (filters) {
      TANDEM_ASSIGN_OR_RETURN(const nlohmann::json json, data.ReadRow(row));
      TANDEM_ASSIGN_OR_RETURN(const EncodedPrompt prompt, EncodePrompt(encoder, config, json, data.line_of(row)));
      const std::size_t num_tokens = prompt.token_ids.size();
      if (num_tokens < config.min_prompt_tokens()) {
        counts.set_too_short(counts.too_short() + 1);
        continue;
      }
      if (config.max_prompt_tokens() > 0 && num_tokens > config.max_prompt_tokens()) {
        counts.set_too_long(counts.too_long() + 1);
        continue;
      }
    }
    (is_held_out[row] ? held_out : trained)->push_back(static_cast<std::uint32_t>(row));
  }
  counts.set_trained(trained->size());
  counts.set_held_out(held_out->size());
  if (trained->empty() || (held_out->empty() && num_held_out > 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("min_prompt_tokens: ", config.min_prompt_tokens(), ", max_prompt_tokens: ", config.max_prompt_tokens(),
                     " leave ", trained->size(), " rows to train on and ", held_out->size(), " held out, of ", num_rows, ": ",
                     counts.too_short(), " are shorter, ", counts.too_long(), " longer"));
  }
  selection.trained = std::move(trained);
  if (num_held_out > 0) selection.held_out = std::move(held_out);
  return selection;
}

}  // namespace tandem
