// The engine's metrics: vLLM's names where the meaning is the same, tandem_rollout_* for what is ours. Called on the engine
// thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/time/time.h"
#include "common/base/clock.h"
#include "common/metrics/metrics.h"
#include "proto/types.pb.h"
#include "rollout_server/model/decoder_model.h"

namespace tandem {

inline constexpr Metric kNumRequestsRunning = {.name = "tandem_num_requests_running", .help = "Sequences in the running batch"};
inline constexpr Metric kNumRequestsWaiting = {.name = "tandem_num_requests_waiting",
                                               .help = "Sequences in the bounded queue, waiting for room"};
inline constexpr Metric kMaxRequestsWaiting = {.name = "tandem_max_requests_waiting",
                                               .help = "Sequences that the queue holds at most: --max_waiting_sequences"};
inline constexpr Metric kKvCacheUsage = {.name = "tandem_kv_cache_usage_perc", .help = "Share of KV blocks in use, 0 to 1"};
inline constexpr Metric kKvCacheBytes = {.name = "tandem_kv_cache_bytes",
                                         .help = "KV blocks in the elastic region: used, total; 0 used while it is paused",
                                         .labels = {"kind"}};
inline constexpr Metric kRolloutCapturedSteps = {.name = "tandem_rollout_captured_steps",
                                                 .help = "Decode steps that are kept as CUDA graphs"};
inline constexpr Metric kRolloutCapturedStepsBytes = {
    .name = "tandem_rollout_captured_steps_bytes",
    .help = "Device memory outside the pool that the driver took for captured steps; it keeps it for later ones"};
inline constexpr Metric kRolloutPaused = {.name = "tandem_rollout_paused",
                                          .help = "1 while the trainer holds the elastic memory"};
inline constexpr Metric kRolloutQueuedCommands = {
    .name = "tandem_rollout_queued_commands",
    .help = "Batches, publications and turns of the elastic region that the engine has yet to see"};
inline constexpr Metric kPromptTokensTotal = {
    .name = "tandem_prompt_tokens_total", .type = Metric::Type::kCounter, .help = "Prompt tokens of admitted groups"};
inline constexpr Metric kGenerationTokensTotal = {
    .name = "tandem_generation_tokens_total", .type = Metric::Type::kCounter, .help = "Tokens drawn"};
inline constexpr Metric kNumPreemptionsTotal = {
    .name = "tandem_num_preemptions_total",
    .type = Metric::Type::kCounter,
    .help = "Sequences that gave up their KV blocks for want of room, to be computed again"};
inline constexpr Metric kPrefixCacheQueriesTotal = {
    .name = "tandem_prefix_cache_queries_total",
    .type = Metric::Type::kCounter,
    .help = "Tokens looked up in the prefix cache, those of completions that are taken up again among them"};
inline constexpr Metric kPrefixCacheHitsTotal = {
    .name = "tandem_prefix_cache_hits_total", .type = Metric::Type::kCounter, .help = "Tokens found in the prefix cache"};
inline constexpr Metric kRequestSuccessTotal = {.name = "tandem_request_success_total",
                                                .type = Metric::Type::kCounter,
                                                .help = "Completions by how they ended: stop, length, abort, error",
                                                .labels = {"finished_reason"}};
inline constexpr Metric kRolloutBadLogitsTotal = {.name = "tandem_rollout_bad_logits_total",
                                                  .type = Metric::Type::kCounter,
                                                  .help = "Sequences ended because their logits were NaN or infinite"};
inline constexpr Metric kRolloutStepDurationSeconds = {
    .name = "tandem_rollout_step_duration_seconds",
    .type = Metric::Type::kHistogram,
    .help = "One engine step, by lane: unit (a training step's rollouts), shared (everything else)",
    .labels = {"lane"},
    .buckets = kSecondsBuckets};
inline constexpr Metric kRolloutStageSecondsTotal = {
    .name = "tandem_rollout_stage_seconds_total",
    .type = Metric::Type::kCounter,
    .help =
        "The engine thread's time by stage of a step: schedule, model, sample, finish; on a GPU model is handing the step "
        "over, and sample waits for it",
    .labels = {"stage"}};
inline constexpr Metric kRolloutStepTokensTotal = {.name = "tandem_rollout_step_tokens_total",
                                                   .type = Metric::Type::kCounter,
                                                   .help = "Tokens computed, prompts and recomputation included",
                                                   .labels = {"lane"}};
inline constexpr Metric kTimeToFirstTokenSeconds = {.name = "tandem_time_to_first_token_seconds",
                                                    .type = Metric::Type::kHistogram,
                                                    .help = "From a request's arrival to its first token",
                                                    .buckets = kSecondsBuckets};
inline constexpr Metric kInterTokenLatencySeconds = {.name = "tandem_inter_token_latency_seconds",
                                                     .type = Metric::Type::kHistogram,
                                                     .help = "Between two tokens of a sequence",
                                                     .buckets = kSecondsBuckets};
inline constexpr Metric kRolloutWeightVersion = {
    .name = "tandem_rollout_weight_version", .help = "Version that a job's requests use", .labels = {"job"}};

inline constexpr std::array kRolloutMetrics = {&kNumRequestsRunning,
                                               &kNumRequestsWaiting,
                                               &kMaxRequestsWaiting,
                                               &kKvCacheUsage,
                                               &kKvCacheBytes,
                                               &kRolloutCapturedSteps,
                                               &kRolloutCapturedStepsBytes,
                                               &kRolloutPaused,
                                               &kRolloutQueuedCommands,
                                               &kPromptTokensTotal,
                                               &kGenerationTokensTotal,
                                               &kNumPreemptionsTotal,
                                               &kPrefixCacheQueriesTotal,
                                               &kPrefixCacheHitsTotal,
                                               &kRequestSuccessTotal,
                                               &kRolloutBadLogitsTotal,
                                               &kRolloutStepDurationSeconds,
                                               &kRolloutStageSecondsTotal,
                                               &kRolloutStepTokensTotal,
                                               &kTimeToFirstTokenSeconds,
                                               &kInterTokenLatencySeconds,
                                               &kRolloutWeightVersion};

class EngineMetrics {
 public:
  // `metrics` outlives this.
  explicit EngineMetrics(Metrics* metrics);

  struct Load {
    int running = 0;
    int waiting = 0;
    int max_waiting = 0;
    int kv_blocks_used = 0;
    int kv_blocks = 0;
    std::uint64_t kv_block_bytes = 0;  // 0: not known
    CapturedSteps captured_steps;
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
  // Counts the time since the last call to `stage`; null: to none.
  void EndStage(const char* stage);
  void ObserveFirstToken(absl::Duration since_arrival);
  void ObserveNextToken(absl::Duration since_last);
  void SetVersion(const std::string& job, std::uint64_t weight_version);
  void ForgetJob(const std::string& job);

 private:
  Metrics* const metrics_;
  MonotonicTime stage_begin_;
};

}  // namespace tandem
