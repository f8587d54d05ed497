#include "trainer_server/prompt/prompt_source.h"

#include <numeric>
#include <utility>

#include "common/base/random.h"

namespace tandem {
namespace {

// Part of the job's seed that shuffles; beyond any step number, so that no two streams share a seed.
constexpr std::uint64_t kShufflePart = 0x5368756666'000001ULL;

}  // namespace

absl::StatusOr<std::vector<TokenId>> EncodePrompt(const PromptEncoder& encoder, const v1::DataConfig& config,
                                                  const nlohmann::json& row, std::size_t line) {
  const std::string field = config.prompt_field().empty() ? "prompt" : config.prompt_field();
  const std::string place = absl::StrCat("data set line ", line, " field '", field, "'");
  const auto found = row.find(field);
  if (found == row.end()) return absl::InvalidArgumentError(absl::StrCat(place, " is absent"));
  std::vector<ChatMessage> messages;
  if (!config.system_prompt().empty()) messages.push_back({"system", config.system_prompt()});
  std::vector<TokenId> ids;
  if (found->is_string() && !config.apply_chat_template()) {
    ids = encoder.EncodeText(found->get_ref<const std::string&>());
  } else {
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
    auto encoded = encoder.EncodeChat(messages, /*add_generation_prompt=*/true);
    if (!encoded.ok()) return Annotate(encoded.status(), place);
    ids = *std::move(encoded);
  }
  if (ids.empty()) return absl::InvalidArgumentError(absl::StrCat(place, " gives 0 tokens; a prompt must have at least 1"));
  return ids;
}

PromptSource::PromptSource(std::shared_ptr<const DataSet> data, std::shared_ptr<const PromptEncoder> encoder,
                           v1::DataConfig config, std::uint64_t seed)
    : data_(std::move(data)), encoder_(std::move(encoder)), config_(std::move(config)), seed_(DeriveSeed(seed, kShufflePart)) {}

std::size_t PromptSource::RowAt(std::uint64_t position) {
  const std::uint64_t epoch = position / data_->num_rows();
  const std::uint64_t index = position % data_->num_rows();
  if (config_.no_shuffle()) return index;
  if (permutation_.empty() || epoch != epoch_) {
    // Fisher and Yates; the draw of index i is a function of (seed, epoch, i).
    permutation_.resize(data_->num_rows());
    std::iota(permutation_.begin(), permutation_.end(), 0);
    const std::uint64_t epoch_seed = DeriveSeed(seed_, epoch);
    for (std::size_t i = permutation_.size() - 1; i > 0; --i) {
      std::swap(permutation_[i], permutation_[RandomBelow(epoch_seed, i, i + 1)]);
    }
    epoch_ = epoch;
  }
  return permutation_[index];
}

absl::StatusOr<Prompt> PromptSource::Read(std::size_t row_index) const {
  Prompt prompt;
  prompt.row_index = row_index;
  TANDEM_ASSIGN_OR_RETURN(prompt.row, data_->ReadRow(row_index));
  TANDEM_ASSIGN_OR_RETURN(prompt.token_ids, EncodePrompt(*encoder_, config_, prompt.row, data_->line_of(row_index)));
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
