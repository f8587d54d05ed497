#include "trainer_server/prompt/prompt_source.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_join.h"
#include "common/base/random.h"

namespace tandem {
namespace {

// Part of the job's seed that shuffles; beyond any step number, so that no two streams share a seed.
constexpr std::uint64_t kShufflePart = 0x5368756666'000001ULL;

}  // namespace

absl::StatusOr<EncodedPrompt> EncodePrompt(const PromptEncoder& encoder, const v1::DataConfig& config, const nlohmann::json& row,
                                           std::size_t line) {
  const std::string field = config.prompt_field().empty() ? "prompt" : config.prompt_field();
  const std::string place = absl::StrCat("data set line ", line, " field '", field, "'");
  const auto found = row.find(field);
  if (found == row.end()) {
    std::vector<std::string> fields;
    for (const auto& [name, value] : row.items()) fields.push_back(name.substr(0, 80));
    return absl::InvalidArgumentError(
        absl::StrCat(place, " is absent; data.prompt_field names it. The row has: ", absl::StrJoin(fields, ", ")));
  }
  EncodedPrompt prompt;
  if (found->is_string() && !config.apply_chat_template()) {
    prompt.token_ids = encoder.EncodeText(found->get_ref<const std::string&>());
  } else {
    std::vector<ChatMessage> messages;
    if (!config.system_prompt().empty()) messages.push_back({"system", config.system_prompt()});
    if (found->is_string()) {
      messages.push_back({"user", found->get<std::string>()});
    } else if (found->is_array()) {
      auto turns = PromptEncoder::ParseMessages(found->dump());
      if (!turns.ok()) return Annotate(turns.status(), place);
      messages.insert(messages.end(), turns->begin(), turns->end());
    } else {
      return absl::InvalidArgumentError(
          absl::StrCat(place, " is a ", found->type_name(), "; it must be a string or an array of {role, content}"));
    }
    if (messages.back().is_open) messages.pop_back();  // the model's turn, in any case
    const auto first_open = std::ranges::find_if(messages, &ChatMessage::is_open);
    auto encoded = encoder.EncodeChat({messages.begin(), first_open},
                                      {.add_generation_prompt = true, .template_arguments = config.template_arguments()});
    if (!encoded.ok()) return Annotate(encoded.status(), place);
    prompt.token_ids = *std::move(encoded);
    if (first_open != messages.end()) prompt.messages = std::move(messages);
  }
  if (prompt.token_ids.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(place, " gives 0 tokens; a prompt must have at least 1"));
  }
  return prompt;
}

PromptSource::PromptSource(std::shared_ptr<const DataSet> data, RowIndices rows, std::shared_ptr<const PromptEncoder> encoder,
                           v1::DataConfig config, std::uint64_t seed)
    : data_(std::move(data)),
      rows_(std::move(rows)),
      encoder_(std::move(encoder)),
      config_(std::move(config)),
      seed_(DeriveSeed(seed, kShufflePart)) {}

std::size_t PromptSource::RowAt(std::uint64_t position) {
  const std::uint64_t epoch = position / num_rows();
  const std::uint64_t index = position % num_rows();
  if (config_.no_shuffle()) return index;
  if (permutation_.empty() || epoch != epoch_) {
    // Fisher and Yates; the draw of index i is a function of (seed, epoch, i).
    permutation_.resize(num_rows());
    std::iota(permutation_.begin(), permutation_.end(), 0);
    const std::uint64_t epoch_seed = DeriveSeed(seed_, epoch);
    for (std::size_t i = permutation_.size() - 1; i > 0; --i) {
      std::swap(permutation_[i], permutation_[RandomBelow(epoch_seed, i, i + 1)]);
    }
    epoch_ = epoch;
  }
  return permutation_[index];
}

absl::StatusOr<Prompt> PromptSource::Read(std::size_t place) const {
  Prompt prompt;
  prompt.row_index = rows_ == nullptr ? place : (*rows_)[place];
  TANDEM_ASSIGN_OR_RETURN(prompt.row, data_->ReadRow(prompt.row_index));
  TANDEM_ASSIGN_OR_RETURN(EncodedPrompt encoded, EncodePrompt(*encoder_, config_, prompt.row, data_->line_of(prompt.row_index)));
  prompt.token_ids = std::move(encoded.token_ids);
  prompt.messages = std::move(encoded.messages);
  return prompt;
}

absl::StatusOr<std::vector<Prompt>> PromptSource::Draw(std::uint64_t cursor, std::size_t count) {
  std::vector<Prompt> prompts;
  for (std::size_t i = 0; i < count; ++i) {
    TANDEM_ASSIGN_OR_RETURN(Prompt prompt, Read(RowAt(cursor + i)));
    prompts.push_back(std::move(prompt));
  }
  return prompts;
}

}  // namespace tandem
