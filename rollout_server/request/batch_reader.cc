#include "rollout_server/request/batch_reader.h"

#include <algorithm>
#include <utility>

namespace tandem {
namespace {

constexpr std::uint32_t kMaxGroups = 65536;
constexpr std::uint32_t kMaxGroupSize = 1024;
constexpr std::size_t kMaxJobBytes = 256;
constexpr int kMaxPieceTokens = 64 * 1024;
constexpr std::size_t kMaxPieceBytes = 256 * 1024;
constexpr std::size_t kMaxPromptBytes = 16 << 20;
constexpr std::uint64_t kMaxBatchPromptTokens = 16 << 20;  // 64 MiB of ids

const std::string& KindName(v1::PromptPiece::KindCase kind) {
  return v1::PromptPiece::descriptor()->FindFieldByNumber(kind)->name();
}

}  // namespace

absl::Status BatchReader::Push(const v1::GenerateRequest& piece) {
  if (is_complete_) return absl::InvalidArgumentError("a piece after `run`: nothing may follow it");
  if (!has_header_ && piece.part_case() != v1::GenerateRequest::kHeader) {
    return absl::InvalidArgumentError("the first piece of a batch must be `header`");
  }
  switch (piece.part_case()) {
    case v1::GenerateRequest::kHeader:
      return ReadHeader(piece.header());
    case v1::GenerateRequest::kGroup:
      return ReadGroup(piece.group());
    case v1::GenerateRequest::kPrompt:
      return ReadPrompt(piece.prompt());
    case v1::GenerateRequest::kRun:
      TANDEM_RETURN_IF_ERROR(CloseGroup());
      if (batch_.groups.size() != num_groups_) {
        return absl::InvalidArgumentError(
            absl::StrCat("`run` after ", batch_.groups.size(), " groups; header.num_groups is ", num_groups_));
      }
      is_complete_ = true;
      return absl::OkStatus();
    case v1::GenerateRequest::PART_NOT_SET:
      break;
  }
  return absl::InvalidArgumentError("a piece with no part set");
}

absl::Status BatchReader::ReadHeader(const v1::BatchHeader& header) {
  if (has_header_) return absl::InvalidArgumentError("a second `header` in one batch");
  if (header.job().size() > kMaxJobBytes) {
    return absl::InvalidArgumentError(absl::StrCat("header.job: ", header.job().size(), " bytes, above ", kMaxJobBytes));
  }
  if (header.mode() != v1::SCHEDULE_MODE_SHARED && header.mode() != v1::SCHEDULE_MODE_UNIT) {
    return absl::InvalidArgumentError(
        absl::StrCat("header.mode: ", static_cast<int>(header.mode()), " is not SHARED (1) or UNIT (2)"));
  }
  if (header.num_groups() < 1 || header.num_groups() > kMaxGroups) {
    return absl::InvalidArgumentError(absl::StrCat("header.num_groups: ", header.num_groups(), " is not in 1 to ", kMaxGroups));
  }
  batch_.job = header.job();
  batch_.weight_version = header.weight_version();
  batch_.mode = header.mode();
  batch_.return_text = header.return_text();
  num_groups_ = header.num_groups();
  has_header_ = true;
  return absl::OkStatus();
}

absl::Status BatchReader::ReadGroup(const v1::GroupHeader& group) {
  TANDEM_RETURN_IF_ERROR(CloseGroup());
  const std::size_t expected = batch_.groups.size();
  if (expected >= num_groups_) {
    return absl::InvalidArgumentError(absl::StrCat("a group beyond header.num_groups ", num_groups_));
  }
  if (group.group_index() != expected) {
    return absl::InvalidArgumentError(absl::StrCat("group.group_index: ", group.group_index(), " where ", expected, " is next"));
  }
  if (group.group_size() < 1 || group.group_size() > kMaxGroupSize) {
    return absl::InvalidArgumentError(
        absl::StrCat("group ", expected, ": group_size: ", group.group_size(), " is not in 1 to ", kMaxGroupSize));
  }
  num_sequences_ += group.group_size();
  if (num_sequences_ > limits_.max_sequences) {
    return absl::ResourceExhaustedError(absl::StrCat("group ", expected, ": ", num_sequences_,
                                                     " completions in one batch, above the waiting queue's ",
                                                     limits_.max_sequences));
  }
  absl::StatusOr<SamplingParams> sampling = ParseSamplingParams(group.sampling(), limits_.vocab_size);
  if (!sampling.ok()) return Annotate(sampling.status(), absl::StrCat("group ", expected));
  GroupRequest request;
  request.group_index = group.group_index();
  request.group_size = group.group_size();
  request.sampling = *std::move(sampling);
  batch_.groups.push_back(std::move(request));
  template_arguments_ = group.template_arguments();
  return absl::OkStatus();
}

absl::Status BatchReader::ReadPrompt(const v1::PromptPiece& piece) {
  if (batch_.groups.empty()) return absl::InvalidArgumentError("a `prompt` before any `group`");
  const std::size_t index = batch_.groups.size() - 1;
  if (piece.kind_case() == v1::PromptPiece::KIND_NOT_SET) {
    return absl::InvalidArgumentError(absl::StrCat("group ", index, ": a prompt piece with no kind set"));
  }
  if (kind_ != v1::PromptPiece::KIND_NOT_SET && kind_ != piece.kind_case()) {
    return absl::InvalidArgumentError(
        absl::StrCat("group ", index, ": prompt pieces of two kinds, ", KindName(kind_), " and ", KindName(piece.kind_case())));
  }
  kind_ = piece.kind_case();
  if (kind_ == v1::PromptPiece::kTokenIds) {
    const auto& ids = piece.token_ids().ids();
    if (ids.size() > kMaxPieceTokens) {
      return absl::InvalidArgumentError(
          absl::StrCat("group ", index, ": a prompt piece of ", ids.size(), " tokens, above ", kMaxPieceTokens));
    }
    for (std::uint32_t id : ids) {
      if (id >= static_cast<std::uint32_t>(limits_.vocab_size)) {
        return absl::InvalidArgumentError(absl::StrCat("group ", index, ": prompt token ", ids_.size(), ": id ", id,
                                                       " is not below the vocabulary's ", limits_.vocab_size));
      }
      ids_.push_back(id);
    }
    return Annotate(CheckLength(ids_.size(), batch_.groups.back().sampling.max_tokens, limits_), absl::StrCat("group ", index));
  }
  const std::string& text = kind_ == v1::PromptPiece::kText ? piece.text() : piece.messages_json();
  if (text.size() > kMaxPieceBytes || text_.size() + text.size() > kMaxPromptBytes) {
    return absl::InvalidArgumentError(absl::StrCat("group ", index, ": a prompt piece of ", text.size(), " bytes after ",
                                                   text_.size(), "; a piece has at most ", kMaxPieceBytes, ", a prompt ",
                                                   kMaxPromptBytes));
  }
  text_ += text;
  return absl::OkStatus();
}

absl::Status BatchReader::CloseGroup() {
  if (batch_.groups.empty() || batch_.groups.back().prompt != nullptr) return absl::OkStatus();
  GroupRequest& group = batch_.groups.back();
  const std::string context = absl::StrCat("group ", group.group_index);
  if (!template_arguments_.empty() && kind_ != v1::PromptPiece::kMessagesJson) {
    return absl::InvalidArgumentError(absl::StrCat(context, ": template_arguments without messages_json"));
  }
  switch (kind_) {
    case v1::PromptPiece::kTokenIds:
      group.prompt_kind = "ids";
      break;
    case v1::PromptPiece::kText:
      ids_ = encoder_->EncodeText(text_);
      group.prompt_kind = "text";
      break;
    case v1::PromptPiece::kMessagesJson: {
      absl::StatusOr<std::vector<ChatMessage>> messages = PromptEncoder::ParseMessages(text_);
      if (!messages.ok()) return Annotate(messages.status(), context);
      absl::StatusOr<std::vector<TokenId>> ids =
          encoder_->EncodeChat(*messages, {.add_generation_prompt = true, .template_arguments = template_arguments_});
      if (!ids.ok()) return Annotate(ids.status(), context);
      ids_ = *std::move(ids);
      group.prompt_kind = "messages";
      break;
    }
    case v1::PromptPiece::KIND_NOT_SET:
      return absl::InvalidArgumentError(absl::StrCat(context, ": no prompt was sent"));
  }
  if (ids_.empty()) return absl::InvalidArgumentError(absl::StrCat(context, ": the prompt has no tokens; at least 1 is needed"));
  // A tokenizer may know more tokens than the model has rows for; ids that were sent are checked piece by piece.
  if (const std::uint32_t largest = kind_ == v1::PromptPiece::kTokenIds ? 0 : *std::ranges::max_element(ids_);
      largest >= static_cast<std::uint32_t>(limits_.vocab_size)) {
    return absl::InvalidArgumentError(absl::StrCat(context, ": the tokenizer makes token ", largest, " of the prompt's ",
                                                   group.prompt_kind, ", which is not below the vocabulary's ",
                                                   limits_.vocab_size));
  }
  TANDEM_RETURN_IF_ERROR(Annotate(CheckLength(ids_.size(), group.sampling.max_tokens, limits_), context));
  num_prompt_tokens_ += ids_.size();
  if (num_prompt_tokens_ > kMaxBatchPromptTokens) {
    return absl::ResourceExhaustedError(
        absl::StrCat(context, ": ", num_prompt_tokens_, " prompt tokens in one batch, above ", kMaxBatchPromptTokens));
  }
  group.prompt = std::make_shared<const std::vector<std::uint32_t>>(std::move(ids_));
  ids_.clear();
  text_.clear();
  kind_ = v1::PromptPiece::KIND_NOT_SET;
  return absl::OkStatus();
}

}  // namespace tandem
