// The engine's metrics: vLLM's names where the meaning is the same, tandem_rollout_* for what is ours. Called on the engine
// thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/time/time.h"
#include "common/metrics/metrics.h"
#include "proto/types.pb.h"

namespace tandem {

class EngineMetrics {
 public:
  // `metrics` outlives this.
  explicit EngineMetrics(Metrics* metrics);

  struct Load {
    int running = 0;
    int waiting = 0;
    int kv_blocks_used = 0;
    int kv_blocks = 0;
    bool is_paused = false;
    std::size_t queued_commands = 0;
  };
  void SetLoad(const Load& load);
  void CountPrompt(std::uint32_t tokens);
  void CountTokens(std::uint32_t tokens);
  void CountPreemptions(std::uint32_t sequences);
  void CountPrefixCache(std::uint32_t queried_tokens, std::uint32_t hit_tokens);
  void CountFinished(v1::FinishReason reason);
  void CountBadLogits();
  void ObserveStep(const char* lane, absl::Duration duration, std::uint32_t tokens);
  void ObserveFirstToken(absl::Duration since_arrival);
  void ObserveNextToken(absl::Duration since_last);
  void SetVersion(const std::string& job, std::uint64_t weight_version);
  void ForgetJob(const std::string& job);

 private:
  Metrics* const metrics_;
};

}  // namespace tandem
