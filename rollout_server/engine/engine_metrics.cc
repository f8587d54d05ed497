#include "rollout_server/engine/engine_metrics.h"

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

const std::vector<double>& SecondsBuckets() {
  static const std::vector<double> buckets = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60};
  return buckets;
}

}  // namespace

EngineMetrics::EngineMetrics(Metrics* metrics) : metrics_(metrics) {
  // Counters exist from the start, so that a rate over them is known before the first event.
  CountPrompt(0);
  CountTokens(0);
  CountPreemptions(0);
  CountPrefixCache(0, 0);
  metrics_->AddCounter("tandem_rollout_bad_logits_total", "Sequences ended because their logits were not numbers", {}, 0);
}

void EngineMetrics::SetLoad(const Load& load) {
  metrics_->SetGauge("tandem_num_requests_running", "Sequences in the running batch", {}, load.running);
  metrics_->SetGauge("tandem_num_requests_waiting", "Sequences waiting for room", {}, load.waiting);
  metrics_->SetGauge("tandem_kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", {},
                     load.kv_blocks == 0 ? 0 : static_cast<double>(load.kv_blocks_used) / load.kv_blocks);
  metrics_->SetGauge("tandem_rollout_paused", "1 while the trainer holds the elastic memory", {}, load.is_paused ? 1 : 0);
  metrics_->SetGauge("tandem_rollout_queued_commands", "Batches, cancellations and publications that the engine has yet to see",
                     {}, static_cast<double>(load.queued_commands));
}

void EngineMetrics::CountPrompt(std::uint32_t tokens) {
  metrics_->AddCounter("tandem_prompt_tokens_total", "Prompt tokens of admitted groups", {}, tokens);
}
void EngineMetrics::CountTokens(std::uint32_t tokens) {
  metrics_->AddCounter("tandem_generation_tokens_total", "Tokens drawn", {}, tokens);
}
void EngineMetrics::CountPreemptions(std::uint32_t sequences) {
  metrics_->AddCounter("tandem_num_preemptions_total", "Sequences preempted for want of KV blocks", {}, sequences);
}
void EngineMetrics::CountPrefixCache(std::uint32_t queried_tokens, std::uint32_t hit_tokens) {
  metrics_->AddCounter("tandem_prefix_cache_queries_total", "Tokens looked up in the prefix cache", {}, queried_tokens);
  metrics_->AddCounter("tandem_prefix_cache_hits_total", "Tokens found in the prefix cache", {}, hit_tokens);
}
void EngineMetrics::CountFinished(v1::FinishReason reason) {
  metrics_->AddCounter("tandem_request_success_total", "Completions by how they ended",
                       {{"finished_reason", ReasonLabel(reason)}}, 1);
}
void EngineMetrics::CountBadLogits() {
  metrics_->AddCounter("tandem_rollout_bad_logits_total", "Sequences ended because their logits were not numbers", {}, 1);
}
void EngineMetrics::ObserveStep(const char* lane, absl::Duration duration, std::uint32_t tokens) {
  metrics_->Observe("tandem_rollout_step_duration_seconds", "One engine step", {{"lane", lane}}, SecondsBuckets(),
                    absl::ToDoubleSeconds(duration));
  metrics_->AddCounter("tandem_rollout_step_tokens_total", "Tokens computed, prompts and recomputation included",
                       {{"lane", lane}}, tokens);
}
void EngineMetrics::ObserveFirstToken(absl::Duration since_arrival) {
  metrics_->Observe("tandem_time_to_first_token_seconds", "From arrival to the first token", {}, SecondsBuckets(),
                    absl::ToDoubleSeconds(since_arrival));
}
void EngineMetrics::ObserveNextToken(absl::Duration since_last) {
  metrics_->Observe("tandem_inter_token_latency_seconds", "Between two tokens of a sequence", {}, SecondsBuckets(),
                    absl::ToDoubleSeconds(since_last));
}
void EngineMetrics::SetVersion(const std::string& job, std::uint64_t weight_version) {
  metrics_->SetGauge("tandem_rollout_weight_version", "Active weight version of a job", {{"job", job}},
                     static_cast<double>(weight_version));
}
void EngineMetrics::ForgetJob(const std::string& job) { metrics_->RemoveLabel("job", job); }

}  // namespace tandem
