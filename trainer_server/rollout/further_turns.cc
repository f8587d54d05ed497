#include "trainer_server/rollout/further_turns.h"

#include <algorithm>
#include <utility>

#include "common/base/random.h"
#include "trainer_server/prompt/conversation.h"

namespace tandem {
namespace {

// Part of a group's seed that draws turn n is kTurnPart + n; beyond any member's index.
constexpr std::uint64_t kTurnPart = 0x5475726e'000000ULL;

// One member of a group as it talks.
struct Talk {
  Rollout* rollout = nullptr;
  const Prompt* prompt = nullptr;
  std::uint64_t seed = 0;
  Conversation conversation;
  std::vector<TokenId> context = {};  // all ids before the next turn
};

// Tokens that nobody drew: they are read, not learned.
void AppendSaid(const std::vector<TokenId>& ids, Rollout* rollout) {
  rollout->loss_mask.resize(rollout->token_ids.size(), 1);
  rollout->token_ids.insert(rollout->token_ids.end(), ids.begin(), ids.end());
  rollout->rollout_logprobs.resize(rollout->token_ids.size(), 0);
  rollout->loss_mask.resize(rollout->token_ids.size(), 0);
  if (!rollout->kept_mass.empty()) rollout->kept_mass.resize(rollout->token_ids.size(), 1);
}

void AppendDrawn(const Rollout& turn, Rollout* rollout) {
  const std::size_t before = rollout->token_ids.size();
  rollout->loss_mask.resize(before, 1);
  rollout->token_ids.insert(rollout->token_ids.end(), turn.token_ids.begin(), turn.token_ids.end());
  rollout->rollout_logprobs.insert(rollout->rollout_logprobs.end(), turn.rollout_logprobs.begin(), turn.rollout_logprobs.end());
  rollout->loss_mask.resize(rollout->token_ids.size(), 1);
  if (!turn.kept_mass.empty() || !rollout->kept_mass.empty()) {
    rollout->kept_mass.resize(before, 1);
    rollout->kept_mass.insert(rollout->kept_mass.end(), turn.kept_mass.begin(), turn.kept_mass.end());
    rollout->kept_mass.resize(rollout->token_ids.size(), 1);
  }
  rollout->finish_reason = turn.finish_reason;
  rollout->text = turn.text;
}

// Says what follows the member's last answer.
absl::Status Say(const FurtherTurns& turns, std::uint64_t max_tokens, Talk* talk) {
  Rollout* const rollout = talk->rollout;
  const std::optional<TokenId> last_id =
      rollout->token_ids.empty() ? std::nullopt : std::optional<TokenId>(rollout->token_ids.back());
  TANDEM_ASSIGN_OR_RETURN(Conversation::Extension extension, talk->conversation.Answer(rollout->text, last_id));
  if (extension.is_rewritten) {
    *rollout = {};
    rollout->prompt_ids = std::move(extension.token_ids);
  } else {
    AppendSaid(extension.token_ids, rollout);
  }
  const std::vector<TokenId>& prompt_ids = rollout->prompt_ids.empty() ? talk->prompt->token_ids : rollout->prompt_ids;
  talk->context = prompt_ids;
  talk->context.insert(talk->context.end(), rollout->token_ids.begin(), rollout->token_ids.end());
  if (talk->context.size() + max_tokens <= turns.largest_context_tokens) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("the conversation has ", talk->context.size(), " tokens; with rollout.sampling.max_tokens ", max_tokens,
                   " the largest context that fits is ", turns.largest_context_tokens, " tokens"));
}

}  // namespace

absl::Status DrawFurtherTurns(const FurtherTurns& turns, const RolloutUnit& first, std::span<const Prompt> prompts,
                              RolloutClient* client, std::vector<RolloutGroup>* groups) {
  std::vector<Talk> talks;
  for (std::size_t g = 0; g < prompts.size(); ++g) {
    if (prompts[g].messages.empty()) continue;
    std::vector<Rollout>& members = (*groups)[g].members;
    for (std::size_t m = 0; m < members.size(); ++m) {
      talks.push_back({.rollout = &members[m],
                       .prompt = &prompts[g],
                       .seed = DeriveSeed(first.seeds[g], m),
                       .conversation = Conversation(turns.encoder, turns.template_arguments, prompts[g].messages)});
    }
  }
  for (std::uint64_t turn = 1;; ++turn) {
    std::erase_if(talks, [](const Talk& talk) { return talk.rollout->is_truncated() || !talk.conversation.is_open(); });
    if (talks.empty()) return absl::OkStatus();
    RolloutUnit unit{.job = first.job,
                     .weight_version = first.weight_version,
                     .group_size = 1,
                     .sampling = first.sampling,
                     .prompts = {},
                     .seeds = {}};
    for (Talk& talk : talks) {
      const absl::Status said = Say(turns, first.sampling.max_tokens(), &talk);
      if (!said.ok()) return Annotate(said, absl::StrCat("data set row ", talk.prompt->row_index));
      unit.prompts.emplace_back(talk.context);
      unit.seeds.push_back(DeriveSeed(talk.seed, kTurnPart + turn));
    }
    TANDEM_ASSIGN_OR_RETURN(const std::vector<RolloutGroup> drawn, client->Draw(unit));
    for (std::size_t i = 0; i < talks.size(); ++i) AppendDrawn(drawn[i].members[0], talks[i].rollout);
  }
}

}  // namespace tandem
