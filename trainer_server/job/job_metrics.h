// The trainer's metrics. A value of a job's history is served as the gauge that is declared for it here, under TRL's name where
// the meaning is the same.
#pragma once

#include <array>
#include <string>

#include "common/metrics/metrics.h"
#include "trainer_server/job/history.h"

namespace tandem {

inline constexpr Metric kPhase = {
    .name = "tandem_phase", .help = "1 for what the trainer is at: rollout, training or idle", .labels = {"phase"}};
inline constexpr Metric kQueueJobs = {
    .name = "tandem_queue_jobs",
    .help = "Jobs by state: ready (queued), blocked (queued behind jobs that have not succeeded yet), running, paused",
    .labels = {"state"}};
inline constexpr double kQueueWaitBuckets[] = {1, 10, 60, 300, 900, 3600, 3 * 3600, 8 * 3600, 24 * 3600, 72 * 3600, 168 * 3600};
inline constexpr Metric kQueueWaitSeconds = {.name = "tandem_queue_wait_seconds",
                                             .type = Metric::Type::kHistogram,
                                             .help = "From when a job could have started to when it did",
                                             .buckets = kQueueWaitBuckets};
inline constexpr Metric kJobRunning = {.name = "tandem_train_running", .help = "1 while the job runs", .labels = {"job"}};
inline constexpr Metric kStep = {.name = "tandem_train_step", .help = "Steps finished", .labels = {"job"}};
inline constexpr Metric kNumSteps = {.name = "tandem_train_num_steps", .help = "Steps that the job has", .labels = {"job"}};
inline constexpr Metric kStepsTotal = {.name = "tandem_train_steps_total",
                                       .type = Metric::Type::kCounter,
                                       .help = "Steps finished in this process",
                                       .labels = {"job"}};
inline constexpr Metric kStepTimestampSeconds = {.name = "tandem_train_step_timestamp_seconds",
                                                 .help = "When the last step ended, or the job began here, Unix time",
                                                 .labels = {"job"}};
inline constexpr Metric kCheckpointTimestampSeconds = {.name = "tandem_train_checkpoint_timestamp_seconds",
                                                       .help = "When the newest checkpoint was written, Unix time",
                                                       .labels = {"job"}};
inline constexpr Metric kFlopsUtilizationRatio = {
    .name = "tandem_train_flops_utilization_ratio",
    .help =
        "Useful FLOP of the update over what the GPU could compute in the time of its forward and backward passes, by its data "
        "sheet (bf16, dense, highest clock)",
    .labels = {"job"},
    .needs_gpu = true};
inline constexpr Metric kGroupsDroppedTotal = {.name = "tandem_train_groups_dropped_total",
                                               .type = Metric::Type::kCounter,
                                               .help = "Groups without any reward",
                                               .labels = {"job"}};
inline constexpr Metric kGroupsReplacedTotal = {
    .name = "tandem_train_groups_replaced_total",
    .type = Metric::Type::kCounter,
    .help = "Groups of equal rewards whose place a further prompt's group took (dynamic sampling)",
    .labels = {"job"}};
inline constexpr Metric kRewardFailuresTotal = {.name = "tandem_train_reward_failures_total",
                                                .type = Metric::Type::kCounter,
                                                .help = "Failures of reward functions that their policy counts as None",
                                                .labels = {"job", "function"}};
inline constexpr Metric kMemoryRetriesTotal = {.name = "tandem_train_memory_retries_total",
                                               .type = Metric::Type::kCounter,
                                               .help = "Steps tried again in smaller pieces because memory was short",
                                               .labels = {"job"}};
inline constexpr Metric kRolloutRatioTokensTotal = {
    .name = "tandem_train_rollout_ratio_tokens_total",
    .type = Metric::Type::kCounter,
    .help = "Tokens by the ratio of the two sides' probabilities before clipping: its bucket's upper bound",
    .labels = {"job", "bound"}};
inline constexpr Metric kPlanBytes = {
    .name = "tandem_plan_bytes", .help = "Memory of the pool by owner as the job's plan has it", .labels = {"job", "owner"}};
inline constexpr Metric kPlanPeakBytes = {.name = "tandem_plan_peak_bytes",
                                          .help = "The most of it in use since the job began in this process",
                                          .labels = {"job", "owner"}};
inline constexpr Metric kPlanUseRatio = {
    .name = "tandem_plan_use_ratio", .help = "Peak use over plan", .labels = {"job", "owner"}};

inline constexpr std::array kTrainerMetrics = {&kPhase,
                                               &kQueueJobs,
                                               &kQueueWaitSeconds,
                                               &kJobRunning,
                                               &kStep,
                                               &kNumSteps,
                                               &kStepsTotal,
                                               &kStepTimestampSeconds,
                                               &kCheckpointTimestampSeconds,
                                               &kFlopsUtilizationRatio,
                                               &kGroupsDroppedTotal,
                                               &kGroupsReplacedTotal,
                                               &kRewardFailuresTotal,
                                               &kMemoryRetriesTotal,
                                               &kRolloutRatioTokensTotal,
                                               &kPlanBytes,
                                               &kPlanPeakBytes,
                                               &kPlanUseRatio};

namespace internal {
constexpr Metric OfHistory(std::string_view history, std::string_view name, std::string_view help, std::string_view label = {}) {
  return {.name = name, .help = help, .labels = {"job", label}, .history = history};
}
}  // namespace internal

// Of a step: the gauge has the last one's.
inline constexpr std::array kStepMetrics = {
    internal::OfHistory("reward", "tandem_train_reward", "Weighted reward, mean over the completions"),
    internal::OfHistory("reward_std", "tandem_train_reward_std", "Its spread"),
    internal::OfHistory("rewards/*/mean", "tandem_train_rewards_mean",
                        "Of one reward function, over the completions that it applied to", "function"),
    internal::OfHistory("rewards/*/std", "tandem_train_rewards_std", "Its spread", "function"),
    internal::OfHistory("advantages/std", "tandem_train_advantages_std", "Spread of the advantages"),
    internal::OfHistory("advantages/min", "tandem_train_advantages_min", "The least advantage"),
    internal::OfHistory("advantages/max", "tandem_train_advantages_max", "The largest advantage"),
    internal::OfHistory("frac_reward_zero_std", "tandem_train_frac_reward_zero_std",
                        "Share of groups whose rewards are all equal: they teach nothing"),
    internal::OfHistory("groups_dropped", "tandem_train_groups_dropped", "Groups without any reward"),
    internal::OfHistory("groups_skipped", "tandem_train_groups_skipped", "Groups that skipped the backward pass"),
    internal::OfHistory("loss", "tandem_train_loss", "Loss, mean over the step's updates"),
    internal::OfHistory("grad_norm", "tandem_train_grad_norm", "Norm of the gradient before clipping"),
    internal::OfHistory("learning_rate", "tandem_train_learning_rate", "Learning rate of the last update"),
    internal::OfHistory("kl", "tandem_train_kl", "KL to the reference, mean over trained tokens; with beta above 0"),
    internal::OfHistory("kl_clamped", "tandem_train_kl_clamped", "Tokens whose KL estimate was clamped"),
    internal::OfHistory("entropy", "tandem_train_entropy", "Entropy of the policy, mean over trained tokens, nats"),
    internal::OfHistory("approx_kl_old", "tandem_train_approx_kl_old", "KL to the policy before the step's updates"),
    internal::OfHistory("off_policy_masked", "tandem_train_off_policy_masked",
                        "Share of tokens masked for being too far off policy"),
    internal::OfHistory("ratio/mean", "tandem_train_ratio_mean", "Importance ratio to the old policy"),
    internal::OfHistory("ratio/max", "tandem_train_ratio_max", "The largest one"),
    internal::OfHistory("clip_ratio/low_mean", "tandem_train_clip_ratio_low_mean", "Share of ratios clipped from below"),
    internal::OfHistory("clip_ratio/high_mean", "tandem_train_clip_ratio_high_mean", "Share of ratios clipped from above"),
    internal::OfHistory("clip_ratio/region_mean", "tandem_train_clip_ratio_region_mean", "Share of ratios clipped"),
    internal::OfHistory("clip_ratio/delta_mean", "tandem_train_clip_ratio_delta_mean", "Share of ratios cut by delta"),
    internal::OfHistory("sampling/sampling_logp_difference/mean", "tandem_train_sampling_sampling_logp_difference_mean",
                        "Log-prob gap: difference of the two daemons' log-probs of one token, mean of absolute values, nats"),
    internal::OfHistory("sampling/sampling_logp_difference/max", "tandem_train_sampling_sampling_logp_difference_max",
                        "The largest log-prob gap of a token"),
    internal::OfHistory("sampling/raw_ratio/max", "tandem_train_sampling_raw_ratio_max",
                        "The largest ratio of the two sides' probabilities"),
    internal::OfHistory("sampling/importance_sampling_ratio/min", "tandem_train_sampling_importance_sampling_ratio_min",
                        "The correction for the log-prob gap: the least weight"),
    internal::OfHistory("sampling/importance_sampling_ratio/mean", "tandem_train_sampling_importance_sampling_ratio_mean",
                        "The mean weight"),
    internal::OfHistory("sampling/importance_sampling_ratio/max", "tandem_train_sampling_importance_sampling_ratio_max",
                        "The largest weight"),
    internal::OfHistory("sampling/clipped_ratio", "tandem_train_sampling_clipped_ratio", "Share of weights cut"),
    internal::OfHistory("sampling/masked_ratio", "tandem_train_sampling_masked_ratio", "Share of weights masked"),
    internal::OfHistory("completions/mean_length", "tandem_train_completions_mean_length", "Tokens of a completion, mean"),
    internal::OfHistory("completions/min_length", "tandem_train_completions_min_length", "The shortest"),
    internal::OfHistory("completions/max_length", "tandem_train_completions_max_length", "The longest"),
    internal::OfHistory("completions/clipped_ratio", "tandem_train_completions_clipped_ratio",
                        "Share of completions truncated by the limit of tokens"),
    internal::OfHistory("completions/mean_terminated_length", "tandem_train_completions_mean_terminated_length",
                        "Tokens of completions that ended by themselves, mean"),
    internal::OfHistory("completions/min_terminated_length", "tandem_train_completions_min_terminated_length", "The shortest"),
    internal::OfHistory("completions/max_terminated_length", "tandem_train_completions_max_terminated_length", "The longest"),
    internal::OfHistory("conversations_split", "tandem_train_conversations_split",
                        "Conversations that a template which rewrites history split"),
    internal::OfHistory("dynamic_sampling/reward", "tandem_train_dynamic_sampling_reward",
                        "Mean weighted reward of all that was drawn"),
    internal::OfHistory("dynamic_sampling/rounds", "tandem_train_dynamic_sampling_rounds", "Rounds of drawing"),
    internal::OfHistory("dynamic_sampling/groups_drawn", "tandem_train_dynamic_sampling_groups_drawn", "Groups drawn"),
    internal::OfHistory("dynamic_sampling/groups_replaced", "tandem_train_dynamic_sampling_groups_replaced",
                        "Groups replaced for their equal rewards"),
    internal::OfHistory("dynamic_sampling/groups_flat", "tandem_train_dynamic_sampling_groups_flat",
                        "Groups of equal rewards that stayed in the step"),
    internal::OfHistory("num_tokens", "tandem_train_num_tokens", "Tokens of prompts and completions so far"),
    internal::OfHistory("epoch", "tandem_train_epoch", "Passes over the data so far"),
    internal::OfHistory("micro_batches", "tandem_train_micro_batches", "Micro-batches of the step"),
    internal::OfHistory("weight_version", "tandem_train_weight_version", "Version of the adapter that the step made"),
    internal::OfHistory("staleness", "tandem_train_staleness",
                        "Updates of the adapter between a completion's drawing and its last use, at most"),
    internal::OfHistory("step_time", "tandem_train_step_time", "Seconds of the whole step"),
    internal::OfHistory("rollout_seconds", "tandem_train_rollout_seconds", "Drawing completions"),
    internal::OfHistory("publish_seconds", "tandem_train_publish_seconds", "Handing the adapter over"),
    internal::OfHistory("reward_seconds", "tandem_train_reward_seconds",
                        "Scoring after the last completion: groups are scored while others are drawn"),
    internal::OfHistory("train_seconds", "tandem_train_train_seconds", "The training phase"),
    internal::OfHistory("phase_wait_seconds", "tandem_train_phase_wait_seconds", "Of it, waiting for the elastic region"),
    internal::OfHistory("score_seconds", "tandem_train_score_seconds", "Of it, old and reference log-probs"),
    internal::OfHistory("forward_seconds", "tandem_train_forward_seconds", "Of it, forward passes of the update"),
    internal::OfHistory("backward_seconds", "tandem_train_backward_seconds", "Of it, backward passes"),
    internal::OfHistory("optimizer_seconds", "tandem_train_optimizer_seconds", "Of it, the optimizer"),
    internal::OfHistory("rollout_tokens_per_second", "tandem_train_rollout_tokens_per_second",
                        "Completion tokens drawn a second"),
    internal::OfHistory(
        "train_tokens_per_second", "tandem_train_train_tokens_per_second",
        "Tokens of prompts and completions a second of forward and backward passes; a shared prompt counts for each "
        "of its completions"),
    internal::OfHistory("train_flops_per_second", "tandem_train_train_flops_per_second",
                        "Useful FLOP a second of forward and backward passes: no recomputation, no gradient of frozen weights"),
    internal::OfHistory("seconds_left", "tandem_train_seconds_left", "Estimate for the job's remaining steps"),
};

// Of an evaluation: the gauge has the last one's.
inline constexpr std::array kEvaluationMetrics = {
    internal::OfHistory("reward", "tandem_train_evaluation_reward", "Weighted reward on the held-out rows"),
    internal::OfHistory("rewards/*/mean", "tandem_train_evaluation_rewards_mean", "Of one reward function", "function"),
    internal::OfHistory("pass_at_*", "tandem_train_evaluation_pass_at", "Share of prompts with a passing completion among k",
                        "k"),
    internal::OfHistory("completions/mean_length", "tandem_train_evaluation_completions_mean_length", "Tokens, mean"),
    internal::OfHistory("completions/min_length", "tandem_train_evaluation_completions_min_length", "The shortest"),
    internal::OfHistory("completions/max_length", "tandem_train_evaluation_completions_max_length", "The longest"),
    internal::OfHistory("completions/clipped_ratio", "tandem_train_evaluation_completions_clipped_ratio",
                        "Share of completions truncated by the limit of tokens"),
    internal::OfHistory("num_prompts", "tandem_train_evaluation_num_prompts", "Held-out rows drawn for"),
    internal::OfHistory("best_step", "tandem_train_evaluation_best_step", "Step of the best evaluation so far"),
    internal::OfHistory("best/*", "tandem_train_evaluation_best", "The best value so far of the metric that is compared",
                        "metric"),
    internal::OfHistory("stops_job", "tandem_train_evaluation_stops_job", "1 where the job ends early"),
    internal::OfHistory("evaluation_seconds", "tandem_train_evaluation_seconds", "Time of the evaluation"),
};

// Serves the event's values under `job`. A value that no metric is declared for is logged and left out.
void ExportHistory(const HistoryEvent& event, const std::string& job, Metrics* metrics);

}  // namespace tandem
