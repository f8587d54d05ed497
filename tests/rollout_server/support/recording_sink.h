// A BatchSink that keeps everything, for the thread that waits. Thread-safe.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "common/base/mutex.h"
#include "rollout_server/engine/batch_sink.h"

namespace tandem::testing {

struct Completion {
  std::vector<std::uint32_t> ids;
  std::vector<float> rollout_logprobs;
  std::vector<std::uint64_t> versions;  // by token
  std::string text;
  std::optional<v1::FinishReason> reason;
  std::uint32_t reported_tokens = 0;
  std::string error;
  bool operator==(const Completion&) const = default;
};

class RecordingSink final : public BatchSink {
 public:
  using Key = std::pair<std::uint32_t, std::uint32_t>;

  void OnPrompt(std::uint32_t group_index, std::uint32_t prompt_tokens, std::uint32_t cached_tokens) override {
    MutexLock lock(&mutex_);
    prompts_[group_index] = {prompt_tokens, cached_tokens};
  }
  void OnToken(Member member, const DrawnToken& token, std::uint64_t weight_version, std::string text) override {
    MutexLock lock(&mutex_);
    Completion& completion = completions_[{member.group_index, member.member_index}];
    completion.ids.push_back(token.id);
    completion.rollout_logprobs.push_back(token.rollout_logprob);
    completion.versions.push_back(weight_version);
    completion.text += text;
  }
  void OnFinished(Member member, v1::FinishReason reason, std::uint32_t completion_tokens, std::string text,
                  std::string error) override {
    MutexLock lock(&mutex_);
    Completion& completion = completions_[{member.group_index, member.member_index}];
    completion.reason = reason;
    completion.reported_tokens = completion_tokens;
    completion.text += text;
    completion.error = std::move(error);
  }
  void OnEnd(absl::Status status) override {
    MutexLock lock(&mutex_);
    end_ = std::move(status);
    changed_.SignalAll();
  }
  bool is_cancelled() const override {
    MutexLock lock(&mutex_);
    return is_cancelled_;
  }
  void Cancel() {
    MutexLock lock(&mutex_);
    is_cancelled_ = true;
  }
  // The batch's end; DEADLINE_EXCEEDED after a minute.
  absl::Status Await() {
    MutexLock lock(&mutex_);
    for (int tries = 0; !end_.has_value() && tries < 600; ++tries) changed_.WaitFor(&mutex_, absl::Milliseconds(100));
    return end_.value_or(absl::DeadlineExceededError("the batch did not end"));
  }
  bool has_ended() const {
    MutexLock lock(&mutex_);
    return end_.has_value();
  }
  std::map<Key, Completion> completions() const {
    MutexLock lock(&mutex_);
    return completions_;
  }
  std::uint32_t cached_tokens(std::uint32_t group_index) const {
    MutexLock lock(&mutex_);
    return prompts_.at(group_index).second;
  }

 private:
  mutable Mutex mutex_;
  CondVar changed_;
  std::map<std::uint32_t, std::pair<std::uint32_t, std::uint32_t>> prompts_ ABSL_GUARDED_BY(mutex_);
  std::map<Key, Completion> completions_ ABSL_GUARDED_BY(mutex_);
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mutex_);
  bool is_cancelled_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace tandem::testing
