// Where the engine puts what it makes of one batch. Called on the engine thread, which must never wait for a reader:
// implementations take, coalesce and return.
#pragma once

#include <cstdint>
#include <string>

#include "common/base/status.h"
#include "proto/types.pb.h"
#include "rollout_server/sample/sampler.h"

namespace tandem {

// One completion of a batch.
struct Member {
  std::uint32_t group_index = 0;
  std::uint32_t member_index = 0;
};

class BatchSink {
 public:
  virtual ~BatchSink() = default;
  // Once a group, before its tokens.
  virtual void OnPrompt(std::uint32_t group_index, std::uint32_t prompt_tokens, std::uint32_t cached_tokens) = 0;
  // `text` is what became certain with this token; empty unless the batch asked for text.
  virtual void OnToken(Member member, const DrawnToken& token, std::uint64_t weight_version, std::string text) = 0;
  // Last of a member. `text` was held back until now; `error` is set for FINISH_REASON_ERROR.
  virtual void OnFinished(Member member, v1::FinishReason reason, std::uint32_t completion_tokens, std::string text,
                          std::string error) = 0;
  // Last of all: OK when every member finished, else why the batch was refused or ended.
  virtual void OnEnd(absl::Status status) = 0;
  // Polled between steps: nobody wants the rest.
  virtual bool is_cancelled() const = 0;
};

}  // namespace tandem
