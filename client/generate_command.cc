#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_join.h"
#include "client/commands.h"
#include "client/printing.h"
#include "common/base/clock.h"
#include "common/rpc/channel.h"
#include "nlohmann/json.hpp"

namespace tandem {
namespace {

constexpr std::size_t kPieceBytes = 256 * 1024;

// A piece never ends inside a UTF-8 character.
std::size_t PieceEnd(const std::string& text, std::size_t begin) {
  std::size_t end = std::min(text.size(), begin + kPieceBytes);
  while (end < text.size() && end > begin && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  return end;
}

}  // namespace

absl::Status Generate(const Connection& connection, const Words& words, const GenerateOptions& options) {
  const std::string prompt = absl::StrJoin(words, " ");
  if (prompt.empty() == options.messages.empty()) {
    return absl::InvalidArgumentError(
        "usage: tandem generate PROMPT, or tandem generate --messages='[{\"role\": ..., \"content\": ...}]'");
  }
  const std::string text = !options.messages.empty() ? options.messages
                           : options.is_raw          ? prompt
                                                     : nlohmann::json::array({{{"role", "user"}, {"content", prompt}}})
                                                  .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  auto rollout = connection.Rollout();
  grpc::ClientContext context;
  context.set_deadline(GrpcDeadline(MonotonicTime::Now() + absl::Hours(1)));
  auto stream = rollout->Generate(&context);
  v1::GenerateRequest request;
  request.mutable_header()->set_job(options.job);
  request.mutable_header()->set_mode(v1::SCHEDULE_MODE_SHARED);
  request.mutable_header()->set_num_groups(1);
  request.mutable_header()->set_return_text(true);
  bool is_open = stream->Write(request);
  request.mutable_group()->set_group_size(static_cast<std::uint32_t>(options.num_completions));
  *request.mutable_group()->mutable_sampling() = options.sampling;
  request.mutable_group()->set_template_arguments(options.template_arguments);
  is_open = is_open && stream->Write(request);
  for (std::size_t begin = 0; is_open && begin < text.size();) {
    const std::size_t end = PieceEnd(text, begin);
    v1::PromptPiece* piece = request.mutable_prompt();
    (options.is_raw ? *piece->mutable_text() : *piece->mutable_messages_json()) = text.substr(begin, end - begin);
    is_open = stream->Write(request);
    begin = end;
  }
  request.mutable_run();
  if (is_open) stream->Write(request);
  stream->WritesDone();

  // One completion streams as it comes; several are gathered so that they do not mix on the screen.
  const bool is_single = options.num_completions == 1 && !connection.json;
  std::vector<std::string> texts(static_cast<std::size_t>(std::max(options.num_completions, 1)));
  absl::Status failure;
  v1::GenerateResponse response;
  while (stream->Read(&response)) {
    if (connection.json) Print(ToJson(response));
    const std::string& piece = response.has_tokens() ? response.tokens().text() : response.finished().text();
    if (is_single) {
      PrintPiece(piece);
    } else if (response.member_index() < texts.size()) {
      texts[response.member_index()] += piece;
    }
    if (response.has_finished() && response.finished().reason() == v1::FINISH_REASON_ERROR) {
      failure = absl::InternalError(response.finished().error());
    }
  }
  const absl::Status status = CallStatus(stream->Finish(), "rollout_server", connection.rollout_address);
  if (absl::IsFailedPrecondition(status) && absl::StrContains(status.message(), "no chat template"))
    return absl::FailedPreconditionError(absl::StrCat(status.message(), " (--raw)"));
  TANDEM_RETURN_IF_ERROR(status);
  if (is_single) Print("");
  for (std::size_t i = 0; !is_single && !connection.json && i < texts.size(); ++i) Print(absl::StrCat("[", i, "] ", texts[i]));
  return failure;
}

}  // namespace tandem
