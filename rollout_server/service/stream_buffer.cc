#include "rollout_server/service/stream_buffer.h"

#include <algorithm>

#include "common/base/clock.h"

namespace tandem {
namespace {

constexpr int kMaxPieceTokens = 4096;
constexpr std::size_t kMaxPieceTextBytes = 256 * 1024;

bool IsFull(const v1::TokenPiece& piece) {
  return piece.ids_size() >= kMaxPieceTokens || piece.text().size() >= kMaxPieceTextBytes;
}

}  // namespace

void StreamBuffer::Enqueue(const Key& key, Pending* pending) {
  if (pending->is_queued) return;
  pending->is_queued = true;
  queue_.push_back(key);
  changed_.Signal();
}

void StreamBuffer::OnPrompt(std::uint32_t group_index, std::uint32_t prompt_tokens, std::uint32_t cached_tokens) {
  MutexLock lock(&mutex_);
  v1::PromptReport report;
  report.set_prompt_tokens(prompt_tokens);
  report.set_cached_tokens(cached_tokens);
  prompts_.emplace_back(group_index, std::move(report));
  changed_.Signal();
}

void StreamBuffer::OnToken(Member member, const DrawnToken& token, std::uint64_t weight_version, std::string text) {
  MutexLock lock(&mutex_);
  if (is_cancelled_) return;
  const Key key(member.group_index, member.member_index);
  Pending& pending = pending_[key];
  if (pending.pieces.empty() || IsFull(pending.pieces.back())) pending.pieces.emplace_back();
  v1::TokenPiece& piece = pending.pieces.back();
  piece.add_ids(token.id);
  piece.add_rollout_logprobs(token.rollout_logprob);
  piece.add_raw_logprobs(token.raw_logprob);
  piece.add_kept_mass(token.kept_mass);
  piece.mutable_text()->append(text);
  const bool is_same_version =
      piece.version_spans_size() > 0 && piece.version_spans(piece.version_spans_size() - 1).weight_version() == weight_version;
  v1::VersionSpan* span = nullptr;
  if (is_same_version) {
    span = piece.mutable_version_spans(piece.version_spans_size() - 1);
  } else {
    span = piece.add_version_spans();
    span->set_weight_version(weight_version);
    span->set_begin(pending.num_tokens);
  }
  span->set_end(++pending.num_tokens);
  if (++num_buffered_tokens_ > options_.max_buffered_tokens) {
    is_cancelled_ = true;
    end_ = absl::ResourceExhaustedError(absl::StrCat("the stream's reader is too slow: more than ", options_.max_buffered_tokens,
                                                     " tokens wait for it; the batch was cancelled"));
    changed_.Signal();
  }
  if (pending.pieces.size() > 1 || static_cast<std::size_t>(piece.ids_size()) >= options_.tokens_per_piece)
    Enqueue(key, &pending);
}

void StreamBuffer::OnFinished(Member member, v1::FinishReason reason, std::uint32_t completion_tokens, std::string text,
                              std::string error) {
  MutexLock lock(&mutex_);
  const Key key(member.group_index, member.member_index);
  Pending& pending = pending_[key];
  pending.finished.emplace();
  pending.finished->set_reason(reason);
  pending.finished->set_completion_tokens(completion_tokens);
  pending.finished->set_text(std::move(text));
  pending.finished->set_error(std::move(error));
  Enqueue(key, &pending);
}

void StreamBuffer::OnEnd(absl::Status status) {
  MutexLock lock(&mutex_);
  if (!end_.has_value()) end_ = std::move(status);
  changed_.Signal();
}

bool StreamBuffer::is_cancelled() const {
  MutexLock lock(&mutex_);
  return is_cancelled_;
}

void StreamBuffer::Cancel() {
  MutexLock lock(&mutex_);
  is_cancelled_ = true;
}

StreamBuffer::Next StreamBuffer::Pop(absl::Duration timeout, v1::GenerateResponse* message, absl::Status* end) {
  const MonotonicTime deadline = MonotonicTime::Now() + timeout;
  MutexLock lock(&mutex_);
  while (true) {
    if (!prompts_.empty() || !queue_.empty()) {
      TakeMessage(message);
      return Next::kMessage;
    }
    if (end_.has_value()) {
      *end = *end_;
      return Next::kEnd;
    }
    const absl::Duration left = deadline - MonotonicTime::Now();
    if (left <= absl::ZeroDuration()) return Next::kTimeout;
    changed_.WaitFor(&mutex_, left);
  }
}

void StreamBuffer::TakeMessage(v1::GenerateResponse* message) {
  message->Clear();
  if (!prompts_.empty()) {
    message->set_group_index(prompts_.front().first);
    *message->mutable_prompt() = std::move(prompts_.front().second);
    prompts_.pop_front();
    return;
  }
  const Key key = queue_.front();
  Pending& pending = pending_.at(key);
  message->set_group_index(key.first);
  message->set_member_index(key.second);
  if (!pending.pieces.empty()) {
    v1::TokenPiece& piece = pending.pieces.front();
    num_buffered_tokens_ -= piece.ids_size();
    if (std::all_of(piece.kept_mass().begin(), piece.kept_mass().end(), [](float mass) { return mass == 1; }))
      piece.clear_kept_mass();
    *message->mutable_tokens() = std::move(piece);
    pending.pieces.pop_front();
    if (!pending.pieces.empty() || pending.finished.has_value()) return;  // they come next
    pending.is_queued = false;
    queue_.pop_front();
    return;
  }
  *message->mutable_finished() = *std::move(pending.finished);
  queue_.pop_front();
  pending_.erase(key);
}

}  // namespace tandem
