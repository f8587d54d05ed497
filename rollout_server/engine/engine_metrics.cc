#include "rollout_server/engine/engine_metrics.h"

#include <algorithm>

#include "common/base/clock.h"

namespace tandem {
namespace {

const char* ReasonLabel(v1::FinishReason reason) {
  switch (reason) {
    case v1::FINISH_REASON_STOP:
      return "stop";
    case v1::FINISH_REASON_LENGTH:
      return "length";
    case v1::FINISH_REASON_CANCELLED:
      return "abort";
    default:
      return "error";
  }
}

}  // namespace

EngineMetrics::EngineMetrics(Metrics* metrics) : metrics_(metrics), stage_begin_(MonotonicTime::Now()) {
  // Counters exist from the start, so that a rate over them is known before the first event.
  CountPrompt(0);
  CountTokens(0);
  CountPreemptions(0);
  CountPrefixCache(0, 0);
  metrics_->AddCounter(kRolloutBadLogitsTotal, {}, 0);
}

void EngineMetrics::SetLoad(const Load& load) {
  metrics_->SetGauge(kNumRequestsRunning, {}, load.running);
  metrics_->SetGauge(kNumRequestsWaiting, {}, load.waiting);
  metrics_->SetGauge(kMaxRequestsWaiting, {}, load.max_waiting);
  metrics_->SetGauge(kKvCacheUsage, {}, load.kv_blocks == 0 ? 0 : static_cast<double>(load.kv_blocks_used) / load.kv_blocks);
  if (load.kv_block_bytes > 0) {
    const auto block_bytes = static_cast<double>(load.kv_block_bytes);
    metrics_->SetGauge(kKvCacheBytes, {"used"}, load.is_paused ? 0 : load.kv_blocks_used * block_bytes);
    metrics_->SetGauge(kKvCacheBytes, {"total"}, load.kv_blocks * block_bytes);
  }
  metrics_->SetGauge(kRolloutCapturedSteps, {}, static_cast<double>(load.captured_steps.count));
  metrics_->SetGauge(kRolloutCapturedStepsBytes, {}, static_cast<double>(load.captured_steps.size_bytes));
  metrics_->SetGauge(kRolloutPaused, {}, load.is_paused ? 1 : 0);
  metrics_->SetGauge(kRolloutQueuedCommands, {}, static_cast<double>(load.queued_commands));
}

void EngineMetrics::CountPrompt(std::uint32_t tokens) { metrics_->AddCounter(kPromptTokensTotal, {}, tokens); }
void EngineMetrics::CountTokens(std::uint32_t tokens) { metrics_->AddCounter(kGenerationTokensTotal, {}, tokens); }
void EngineMetrics::CountPreemptions(std::uint32_t sequences) { metrics_->AddCounter(kNumPreemptionsTotal, {}, sequences); }
void EngineMetrics::CountPrefixCache(std::uint32_t queried_tokens, std::uint32_t hit_tokens) {
  metrics_->AddCounter(kPrefixCacheQueriesTotal, {}, queried_tokens);
  metrics_->AddCounter(kPrefixCacheHitsTotal, {}, hit_tokens);
}
void EngineMetrics::CountFinished(v1::FinishReason reason) {
  metrics_->AddCounter(kRequestSuccessTotal, {ReasonLabel(reason)}, 1);
}
void EngineMetrics::CountBadLogits() { metrics_->AddCounter(kRolloutBadLogitsTotal, {}, 1); }
void EngineMetrics::ObserveStep(const char* lane, absl::Duration duration, std::uint32_t tokens) {
  metrics_->Observe(kRolloutStepDurationSeconds, {lane}, absl::ToDoubleSeconds(duration));
  metrics_->AddCounter(kRolloutStepTokensTotal, {lane}, tokens);
}
void EngineMetrics::EndStage(const char* stage) {
  const MonotonicTime now = MonotonicTime::Now();
  // The clock may have been set back.
  const absl::Duration spent = std::max(now - stage_begin_, absl::ZeroDuration());
  if (stage != nullptr) metrics_->AddCounter(kRolloutStageSecondsTotal, {stage}, absl::ToDoubleSeconds(spent));
  stage_begin_ = now;
}
void EngineMetrics::ObserveFirstToken(absl::Duration since_arrival) {
  metrics_->Observe(kTimeToFirstTokenSeconds, {}, absl::ToDoubleSeconds(since_arrival));
}
void EngineMetrics::ObserveNextToken(absl::Duration since_last) {
  metrics_->Observe(kInterTokenLatencySeconds, {}, absl::ToDoubleSeconds(since_last));
}
void EngineMetrics::SetVersion(const std::string& job, std::uint64_t weight_version) {
  metrics_->SetGauge(kRolloutWeightVersion, {job}, static_cast<double>(weight_version));
}
void EngineMetrics::ForgetJob(const std::string& job) { metrics_->RemoveLabel("job", job); }

}  // namespace tandem
