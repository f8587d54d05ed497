#include "trainer_server/job/step_record.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "common/base/printable.h"

namespace tandem {
namespace {

constexpr std::size_t kMaxRecordPromptBytes = 64 << 10;
constexpr std::size_t kMaxRecordCompletionBytes = 256 << 10;

void AppendLossMetrics(const LossOptions& options, const LossMetrics& metrics, NamedValues* values) {
  if (metrics.token_count > 0) {
    if (options.beta != 0) {
      values->emplace_back("kl", metrics.kl_sum / metrics.token_count);
      values->emplace_back("kl_clamped", metrics.kl_clamped);
    }
    values->emplace_back("entropy", metrics.entropy_sum / metrics.token_count);
    values->emplace_back("approx_kl_old", metrics.approx_kl_old_sum / metrics.token_count);
    if (options.off_policy_threshold.has_value()) {
      values->emplace_back("off_policy_masked", metrics.off_policy_masked / metrics.token_count);
    }
  }
  if (metrics.ratio_count > 0) {
    values->emplace_back("ratio/mean", metrics.ratio_sum / metrics.ratio_count);
    values->emplace_back("ratio/max", metrics.ratio_max);
    values->emplace_back("clip_ratio/low_mean", metrics.clip_low / metrics.ratio_count);
    values->emplace_back("clip_ratio/high_mean", metrics.clip_high / metrics.ratio_count);
    values->emplace_back("clip_ratio/region_mean", (metrics.clip_low + metrics.clip_high) / metrics.ratio_count);
    if (options.delta.has_value()) values->emplace_back("clip_ratio/delta_mean", metrics.delta_clip / metrics.ratio_count);
  }
  if (metrics.difference_count > 0) {
    values->emplace_back("sampling/sampling_logp_difference/mean", metrics.logprob_difference_sum / metrics.difference_count);
    values->emplace_back("sampling/sampling_logp_difference/max", metrics.logprob_difference_max);
    values->emplace_back("sampling/raw_ratio/max", metrics.rollout_ratio_max);
  }
  if (metrics.rollout_weight_count > 0) {
    values->emplace_back("sampling/importance_sampling_ratio/min", metrics.rollout_weight_min);
    values->emplace_back("sampling/importance_sampling_ratio/mean", metrics.rollout_weight_sum / metrics.rollout_weight_count);
    values->emplace_back("sampling/importance_sampling_ratio/max", metrics.rollout_weight_max);
    values->emplace_back("sampling/clipped_ratio", metrics.rollout_clipped / metrics.rollout_weight_count);
    values->emplace_back("sampling/masked_ratio", metrics.rollout_masked / metrics.rollout_weight_count);
  }
}

}  // namespace

double Mean(const std::vector<double>& values) {
  return values.empty() ? 0 : std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

void AppendLengths(const std::string& suffix, const std::vector<double>& lengths, NamedValues* values) {
  if (lengths.empty()) return;
  const auto [low, high] = std::ranges::minmax(lengths);
  values->emplace_back("completions/mean_" + suffix, Mean(lengths));
  values->emplace_back("completions/min_" + suffix, low);
  values->emplace_back("completions/max_" + suffix, high);
}

NamedValues StepValues(const JobPlan& plan, const CheckpointState& state, std::size_t num_rows, const DrawnStep& drawn,
                       const std::vector<RewardMetrics>& functions, const StepReport& report) {
  const std::vector<ScoredGroup>& groups = drawn.groups;
  std::vector<double> lengths, terminated;
  std::size_t num_split = 0;
  for (const ScoredGroup& group : groups) {
    for (const Rollout& rollout : group.rollouts.members) {
      lengths.push_back(static_cast<double>(rollout.num_drawn()));
      num_split += rollout.prompt_ids.empty() ? 0 : 1;
      if (!rollout.is_truncated()) terminated.push_back(lengths.back());
    }
  }
  NamedValues values = {{"loss", report.loss},
                        {"grad_norm", report.optimizer.grad_norm},
                        {"learning_rate", report.learning_rate},
                        {"reward", report.advantages.reward_mean},
                        {"reward_std", report.advantages.reward_std},
                        {"frac_reward_zero_std", report.advantages.zero_std_fraction},
                        {"groups_dropped", report.advantages.groups_dropped},
                        {"groups_skipped", static_cast<double>(report.num_groups_skipped)}};
  for (const RewardMetrics& function : functions) {
    if (function.num_applied == 0) continue;
    values.emplace_back("rewards/" + function.name + "/mean", function.mean);
    values.emplace_back("rewards/" + function.name + "/std", function.std);
  }
  std::vector<double> advantages;
  for (const std::vector<double>& sequence : report.advantages.advantages) {
    advantages.insert(advantages.end(), sequence.begin(), sequence.end());
  }
  if (!advantages.empty()) {
    const auto [low, high] = std::ranges::minmax(advantages);
    const double mean = Mean(advantages);
    double squares = 0;
    for (const double advantage : advantages) squares += (advantage - mean) * (advantage - mean);
    values.emplace_back("advantages/std", std::sqrt(squares / static_cast<double>(advantages.size())));
    values.emplace_back("advantages/min", low);
    values.emplace_back("advantages/max", high);
  }
  AppendLengths("length", lengths, &values);
  values.emplace_back("completions/clipped_ratio",
                      1 - static_cast<double>(terminated.size()) / static_cast<double>(lengths.size()));
  AppendLengths("terminated_length", terminated, &values);
  if (plan.prompts.has_value() && plan.prompts->most_further > 0) {
    values.emplace_back("conversations_split", static_cast<double>(num_split));
  }
  if (plan.spec.rollout().has_dynamic_sampling()) {
    const auto replaced = static_cast<double>(drawn.num_prompts - groups.size());
    values.emplace_back("dynamic_sampling/reward", Mean(drawn.drawn_totals));
    values.emplace_back("dynamic_sampling/rounds", static_cast<double>(drawn.num_rounds));
    values.emplace_back("dynamic_sampling/groups_drawn", static_cast<double>(drawn.num_prompts));
    values.emplace_back("dynamic_sampling/groups_replaced", replaced);
    values.emplace_back("dynamic_sampling/groups_flat", static_cast<double>(drawn.num_flat) - replaced);
  }
  AppendLossMetrics(plan.loss, report.metrics, &values);
  values.emplace_back("num_tokens", static_cast<double>(state.num_tokens));
  values.emplace_back("epoch", static_cast<double>(state.prompt_cursor) / static_cast<double>(num_rows));
  values.emplace_back("micro_batches", static_cast<double>(report.num_micro_batches));
  values.emplace_back("weight_version", static_cast<double>(state.weight_version));
  values.emplace_back("staleness", static_cast<double>(report.num_updates) - 1);
  return values;
}

std::vector<v1::CompletionRecord> CompletionRecords(std::uint64_t step, const RewardSet& rewards, const Tokenizer& tokenizer,
                                                    const std::vector<ScoredGroup>& groups, const StepReport& report) {
  std::vector<v1::CompletionRecord> records;
  std::size_t sequence = 0;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const std::string prompt = Shorten(tokenizer.Decode(groups[g].prompt_ids, /*skip_special=*/false), kMaxRecordPromptBytes);
    for (std::size_t m = 0; m < groups[g].rollouts.members.size(); ++m, ++sequence) {
      const Rollout& rollout = groups[g].rollouts.members[m];
      v1::CompletionRecord record;
      record.set_step(static_cast<std::uint32_t>(step));
      record.set_group_index(static_cast<std::uint32_t>(g));
      record.set_member_index(static_cast<std::uint32_t>(m));
      record.set_prompt(prompt);
      // A conversation with what was said in it.
      const std::string text = rollout.loss_mask.empty() ? rollout.text : tokenizer.Decode(rollout.token_ids, false);
      record.set_completion(Shorten(text, kMaxRecordCompletionBytes));
      record.set_reward(report.advantages.rewards[sequence].value_or(0));
      record.set_advantage(Mean(report.advantages.advantages[sequence]));
      for (std::size_t k = 0; k < rewards.size(); ++k) {
        if (!groups[g].rewards[m][k].has_value()) continue;
        v1::NamedValue* value = record.add_rewards();
        value->set_name(rewards.names()[k]);
        value->set_value(*groups[g].rewards[m][k]);
      }
      record.set_completion_tokens(static_cast<std::uint32_t>(rollout.num_drawn()));
      record.set_finish_reason(rollout.finish_reason);
      records.push_back(std::move(record));
    }
  }
  return records;
}

}  // namespace tandem
