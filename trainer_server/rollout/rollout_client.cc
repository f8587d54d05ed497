#include "trainer_server/rollout/rollout_client.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/rpc/channel.h"

namespace tandem {
namespace {

constexpr std::size_t kPieceTokens = 64 << 10;

// Collects and checks the answers of one unit. A log-prob that is missing or not finite is an error, never replaced.
class UnitCollector {
 public:
  using Text = std::function<std::string(const Rollout& rollout)>;
  UnitCollector(const RolloutUnit& unit, std::size_t vocab_size, Text text)
      : unit_(unit),
        vocab_size_(vocab_size),
        text_(std::move(text)),
        groups_(unit.prompts.size()),
        open_in_group_(unit.prompts.size(), unit.group_size),
        open_(unit.prompts.size() * unit.group_size) {
    for (RolloutGroup& group : groups_) group.members.resize(unit.group_size);
  }

  absl::Status Add(const v1::GenerateResponse& response) {
    if (response.group_index() >= groups_.size() || response.member_index() >= unit_.group_size) {
      return absl::InternalError(absl::StrCat("rollout_server answered for group ", response.group_index(), " member ",
                                              response.member_index(), " of a unit of ", groups_.size(), " x ",
                                              unit_.group_size));
    }
    Rollout& rollout = groups_[response.group_index()].members[response.member_index()];
    const std::string place = absl::StrCat("group ", response.group_index(), " member ", response.member_index());
    if (response.has_prompt()) return absl::OkStatus();
    if (rollout.finish_reason != v1::FINISH_REASON_UNSPECIFIED) {
      return absl::InternalError(absl::StrCat(place, " goes on after its end"));
    }
    if (response.has_tokens()) return AddTokens(response.tokens(), place, &rollout);
    TANDEM_RETURN_IF_ERROR(Finish(response.finished(), place, &rollout));
    if (--open_in_group_[response.group_index()] == 0 && unit_.on_group) {
      unit_.on_group(response.group_index(), groups_[response.group_index()]);
    }
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<RolloutGroup>> Take() {
    if (open_ != 0) return absl::UnavailableError(absl::StrCat("the stream ended with ", open_, " completions open"));
    return std::move(groups_);
  }

 private:
  absl::Status AddTokens(const v1::TokenPiece& piece, const std::string& place, Rollout* rollout) {
    if (piece.ids_size() != piece.rollout_logprobs_size() ||
        (piece.kept_mass_size() != 0 && piece.kept_mass_size() != piece.ids_size())) {
      return absl::InternalError(absl::StrCat(place, ": ", piece.ids_size(), " ids with ", piece.rollout_logprobs_size(),
                                              " log-probs and ", piece.kept_mass_size(), " kept masses"));
    }
    const std::size_t before = rollout->token_ids.size();
    for (int i = 0; i < piece.ids_size(); ++i) {
      if (piece.ids(i) >= vocab_size_) {
        return absl::InternalError(absl::StrCat(place, ": token id ", piece.ids(i), "; the vocabulary has ", vocab_size_));
      }
      if (!std::isfinite(piece.rollout_logprobs(i))) {
        return absl::AbortedError(absl::StrCat(place, ": rollout log-prob ", piece.rollout_logprobs(i), " at token ",
                                               before + static_cast<std::size_t>(i), " is not finite"));
      }
      rollout->token_ids.push_back(piece.ids(i));
      rollout->rollout_logprobs.push_back(static_cast<double>(piece.rollout_logprobs(i)));
    }
    if (piece.kept_mass_size() != 0 || !rollout->kept_mass.empty()) {
      rollout->kept_mass.resize(before, 1);
      for (const float mass : piece.kept_mass()) {
        if (!(mass > 0 && mass <= 1.0001f)) {
          return absl::InternalError(absl::StrCat(place, ": kept mass ", mass, " is not in (0, 1]"));
        }
        rollout->kept_mass.push_back(static_cast<double>(mass));
      }
      rollout->kept_mass.resize(rollout->token_ids.size(), 1);
    }
    for (const v1::VersionSpan& span : piece.version_spans()) {
      if (span.weight_version() != unit_.weight_version) {
        return absl::InternalError(absl::StrCat(place, ": tokens [", span.begin(), ", ", span.end(),
                                                ") were drawn under version ", span.weight_version(), "; the unit asked for ",
                                                unit_.weight_version));
      }
    }
    if (rollout->token_ids.size() > unit_.sampling.max_tokens()) {
      return absl::InternalError(
          absl::StrCat(place, ": ", rollout->token_ids.size(), " tokens; max_tokens is ", unit_.sampling.max_tokens()));
    }
    return absl::OkStatus();
  }

  absl::Status Finish(const v1::Finished& finished, const std::string& place, Rollout* rollout) {
    switch (finished.reason()) {
      case v1::FINISH_REASON_STOP:
      case v1::FINISH_REASON_LENGTH:
        break;
      case v1::FINISH_REASON_CANCELLED:
        return absl::UnavailableError(absl::StrCat(place, " was cancelled by rollout_server"));
      case v1::FINISH_REASON_ERROR:
        return absl::AbortedError(absl::StrCat(place, " failed: ", finished.error()));
      default:
        return absl::InternalError(absl::StrCat(place, ": finish reason ", static_cast<int>(finished.reason())));
    }
    if (finished.completion_tokens() != rollout->token_ids.size()) {
      return absl::InternalError(
          absl::StrCat(place, ": ", rollout->token_ids.size(), " tokens arrived of ", finished.completion_tokens()));
    }
    rollout->finish_reason = finished.reason();
    rollout->text = text_(*rollout);
    --open_;
    return absl::OkStatus();
  }

  const RolloutUnit& unit_;
  const std::size_t vocab_size_;
  const Text text_;
  std::vector<RolloutGroup> groups_;
  std::vector<std::uint32_t> open_in_group_;  // completions
  std::size_t open_;
};

// Sends the unit; false when the stream broke, whose status then says why.
bool SendUnit(const RolloutUnit& unit, grpc::ClientReaderWriter<v1::GenerateRequest, v1::GenerateResponse>* stream) {
  v1::GenerateRequest request;
  v1::BatchHeader* header = request.mutable_header();
  header->set_job(unit.job);
  header->set_weight_version(unit.weight_version);
  header->set_mode(v1::SCHEDULE_MODE_UNIT);
  header->set_num_groups(static_cast<std::uint32_t>(unit.prompts.size()));
  if (!stream->Write(request)) return false;
  for (std::size_t g = 0; g < unit.prompts.size(); ++g) {
    v1::GroupHeader* group = request.mutable_group();
    group->set_group_index(static_cast<std::uint32_t>(g));
    group->set_group_size(unit.group_size);
    *group->mutable_sampling() = unit.sampling;
    group->mutable_sampling()->set_seed(unit.seeds[g]);
    if (!stream->Write(request)) return false;
    for (std::size_t begin = 0; begin < unit.prompts[g].size(); begin += kPieceTokens) {
      const auto piece = unit.prompts[g].subspan(begin, std::min(kPieceTokens, unit.prompts[g].size() - begin));
      request.mutable_prompt()->mutable_token_ids()->mutable_ids()->Assign(piece.begin(), piece.end());
      if (!stream->Write(request)) return false;
    }
  }
  request.mutable_run();
  return stream->Write(request) && stream->WritesDone();
}

std::string CompletionText(const Tokenizer& tokenizer, const std::vector<std::uint32_t>& end_token_ids,
                           const v1::SamplingParams& sampling, const Rollout& rollout) {
  std::span<const TokenId> ids(rollout.token_ids);
  const auto is_end = [&](TokenId id) {
    return std::ranges::find(end_token_ids, id) != end_token_ids.end() ||
           std::ranges::find(sampling.stop_token_ids(), id) != sampling.stop_token_ids().end();
  };
  if (rollout.finish_reason == v1::FINISH_REASON_STOP && !ids.empty() && is_end(ids.back())) ids = ids.first(ids.size() - 1);
  std::string text = tokenizer.Decode(ids, /*skip_special=*/true);
  if (rollout.finish_reason == v1::FINISH_REASON_STOP) {
    std::size_t cut = text.size();
    for (const std::string& stop : sampling.stop_strings()) cut = std::min(cut, text.find(stop));
    text.resize(std::min(cut, text.size()));
  }
  return text;
}

}  // namespace

RolloutClient::RolloutClient(RolloutPeer* peer, std::function<absl::Status()> reactivate, Options options)
    : peer_(peer), reactivate_(std::move(reactivate)), options_(std::move(options)) {}

absl::StatusOr<std::vector<RolloutGroup>> RolloutClient::DrawOnce(const RolloutUnit& unit) {
  grpc::ClientContext context;
  context.set_deadline(GrpcDeadline(MonotonicTime::Now() + options_.unit_deadline));
  RolloutPeer::ScopedCall call(peer_, &context);
  auto stream = peer_->stub()->Generate(&context);
  UnitCollector collector(unit, options_.vocab_size, [&](const Rollout& rollout) {
    return CompletionText(*options_.tokenizer, options_.end_token_ids, unit.sampling, rollout);
  });
  absl::Status fault;
  if (SendUnit(unit, stream.get())) {
    v1::GenerateResponse response;
    while (fault.ok() && stream->Read(&response)) fault = collector.Add(response);
  }
  if (!fault.ok()) context.TryCancel();
  const absl::Status finished = FromGrpc(stream->Finish());
  if (peer_->is_interrupted()) return absl::CancelledError("interrupted");
  TANDEM_RETURN_IF_ERROR(fault);
  TANDEM_RETURN_IF_ERROR(finished);
  return collector.Take();
}

absl::StatusOr<std::vector<RolloutGroup>> RolloutClient::Draw(const RolloutUnit& unit) {
  int busy_attempts = 0, lost_attempts = 0;
  while (true) {
    absl::StatusOr<std::vector<RolloutGroup>> groups = DrawOnce(unit);
    if (groups.ok()) return groups;
    const absl::Status status = groups.status();
    if (absl::IsCancelled(status) && peer_->is_interrupted()) return status;
    const bool is_gone = absl::IsUnavailable(status) || absl::IsCancelled(status) || absl::IsUnknown(status);
    // The server came back so fast that only its memory is gone.
    const bool is_forgotten = absl::IsNotFound(status) || absl::IsFailedPrecondition(status);
    if (absl::IsResourceExhausted(status) && ++busy_attempts < options_.max_busy_attempts) {
      TANDEM_RETURN_IF_ERROR(peer_->Pause(absl::Milliseconds(100)));
      continue;
    }
    const bool is_last = ++lost_attempts >= options_.max_lost_attempts;
    if (is_last || !(is_gone || is_forgotten)) {
      return Annotate(
          is_gone ? absl::UnavailableError(status.message()) : status,
          absl::StrCat("drawing ", unit.prompts.size(), " groups of ", unit.group_size, " at version ", unit.weight_version));
    }
    TANDEM_LOG(kWarning, "rollout", "unit is drawn again version=", unit.weight_version,
               " because=", std::string(status.message()));
    TANDEM_RETURN_IF_ERROR(peer_->WaitUntilServing());
    const absl::Status activated = reactivate_();
    if (!activated.ok() && !absl::IsUnavailable(activated) && !absl::IsDeadlineExceeded(activated)) return activated;
    TANDEM_RETURN_IF_ERROR(peer_->Pause(absl::Milliseconds(20)));
  }
}

}  // namespace tandem
