// Between the engine, which never waits, and one Generate stream, whose reader may be slow: coalesces what comes into few
// messages, and ends the batch when the reader falls too far behind. Thread-safe: the engine puts, the stream's thread pops.
#pragma once

#include <cstddef>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "absl/time/time.h"
#include "common/base/mutex.h"
#include "proto/rollout.pb.h"
#include "rollout_server/engine/batch_sink.h"

namespace tandem {

struct StreamBufferOptions {
  std::size_t tokens_per_piece = 1;           // a member's tokens wait for so many, or for its end
  std::size_t max_buffered_tokens = 1 << 20;  // then the batch is cancelled, with RESOURCE_EXHAUSTED
};

class StreamBuffer final : public BatchSink {
 public:
  explicit StreamBuffer(StreamBufferOptions options) : options_(options) {}

  void OnPrompt(std::uint32_t group_index, std::uint32_t prompt_tokens, std::uint32_t cached_tokens) override;
  void OnToken(Member member, const DrawnToken& token, std::uint64_t weight_version, std::string text) override;
  void OnFinished(Member member, v1::FinishReason reason, std::uint32_t completion_tokens, std::string text,
                  std::string error) override;
  void OnEnd(absl::Status status) override;
  bool is_cancelled() const override;

  void Cancel();
  enum class Next { kMessage, kEnd, kTimeout };
  // Waits for the next message, or for the end and its status.
  Next Pop(absl::Duration timeout, v1::GenerateResponse* message, absl::Status* end);

 private:
  using Key = std::pair<std::uint32_t, std::uint32_t>;  // group, member
  struct Pending {
    std::deque<v1::TokenPiece> pieces;  // all but the last are full
    std::uint32_t num_tokens = 0;       // of the completion so far
    std::optional<v1::Finished> finished;
    bool is_queued = false;
  };
  void Enqueue(const Key& key, Pending* pending) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void TakeMessage(v1::GenerateResponse* message) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const StreamBufferOptions options_;
  mutable Mutex mutex_;
  CondVar changed_;
  std::deque<std::pair<std::uint32_t, v1::PromptReport>> prompts_ ABSL_GUARDED_BY(mutex_);
  std::map<Key, Pending> pending_ ABSL_GUARDED_BY(mutex_);
  std::deque<Key> queue_ ABSL_GUARDED_BY(mutex_);
  std::size_t num_buffered_tokens_ ABSL_GUARDED_BY(mutex_) = 0;
  bool is_cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tandem
