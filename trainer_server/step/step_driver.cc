#include "trainer_server/step/step_driver.h"

#include <algorithm>
#include <utility>

#include "common/base/check.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/random.h"
#include "trainer_server/batch/pack_micro_batches.h"

namespace tandem {

// One completion's arrays, all as long as its ids. Values of tokens outside the mask are never read.
struct StepDriver::Sequence {
  const Rollout* rollout = nullptr;
  const std::vector<std::optional<double>>* rewards = nullptr;
  std::vector<std::uint8_t> loss_mask;
  std::vector<double> policy_logprobs, old_logprobs, ref_logprobs, entropies, scored_entropies;
  std::span<const double> advantages;

  bool is_trained() const { return std::ranges::find(loss_mask, 1) != loss_mask.end(); }
  LossSequence ForLoss(bool use_scored_entropies) const {
    return {.policy_logprobs = policy_logprobs,
            .old_logprobs = old_logprobs,
            .ref_logprobs = ref_logprobs,
            .rollout_logprobs = rollout->rollout_logprobs,
            .entropies = use_scored_entropies ? scored_entropies : entropies,
            .loss_mask = loss_mask,
            .kept_mass = rollout->kept_mass,
            .advantages = advantages,
            .is_truncated = rollout->is_truncated()};
  }
};

namespace {

// Calls `visit(completion, token, head_row)` for each head row of a micro-batch, in order.
template <typename Mask, typename Visit>
void VisitHeadRows(const MicroBatch& batch, const Mask& mask_of, const Visit& visit) {
  std::size_t row = 0;
  for (const PackedCompletion& completion : batch.completions) {
    const std::vector<std::uint8_t>& mask = mask_of(completion);
    for (std::size_t t = 0; t < mask.size(); ++t) {
      if (mask[t] != 0) visit(completion, t, row++);
    }
  }
  TANDEM_CHECK(row + batch.num_prompt_head_rows == batch.head_rows.size(), row, " masked tokens for ", batch.head_rows.size(),
               " head rows, ", batch.num_prompt_head_rows, " of prompts");
}

bool IsZero(std::span<const double> values) {
  return std::ranges::all_of(values, [](double value) { return value == 0; });
}

}  // namespace

StepDriver::StepDriver(PolicyModel* policy, TrainedState* state, ElasticPhase* phase, Options options)
    : policy_(policy), state_(state), phase_(phase), options_(std::move(options)) {}

absl::StatusOr<StepReport> StepDriver::Run(std::uint64_t step, std::span<const ScoredGroup> groups) {
  // With several updates an earlier one may be applied when a later one is refused.
  std::vector<std::vector<float>> saved;
  const std::span<float> arrays[] = {state_->masters, state_->first_moments, state_->second_moments};
  const std::uint64_t saved_optimizer_steps = state_->optimizer_steps;
  if (num_updates() > 1) {
    for (const std::span<float> array : arrays) {
      saved.emplace_back(array.size());
      TANDEM_RETURN_IF_ERROR(CopyToHost(options_.device.device, saved.back().data(), array.data(), array.size_bytes()));
    }
  }
  absl::StatusOr<StepReport> report = RunInPhase(step, groups);
  for (std::size_t i = 0; !report.ok() && i < saved.size(); ++i) {
    const absl::Status restored = CopyFromHost(options_.device.device, arrays[i].data(), saved[i].data(), arrays[i].size_bytes());
    if (!restored.ok()) return Annotate(restored, absl::StrCat("step ", step, ": restoring what it began with"));
  }
  if (!report.ok()) state_->optimizer_steps = saved_optimizer_steps;
  const absl::Status left = phase_->Leave();
  if (!report.ok()) return Annotate(report.status(), absl::StrCat("step ", step));
  if (!left.ok()) TANDEM_LOG(kWarning, "step", "elastic region kept because=", std::string(left.message()));
  if (report->num_micro_batches > 0) report->peak_bytes = phase_->peak_bytes();
  return report;
}

absl::StatusOr<StepReport> StepDriver::RunInPhase(std::uint64_t step, std::span<const ScoredGroup> groups) {
  TANDEM_CHECK(!groups.empty(), "a step has groups");
  const std::size_t group_size = groups[0].rollouts.members.size();
  std::vector<Sequence> sequences;
  for (const ScoredGroup& group : groups) {
    TANDEM_CHECK(group.rollouts.members.size() == group_size && group.rewards.size() == group_size, "groups of one size");
    for (std::size_t m = 0; m < group_size; ++m) {
      const Rollout& rollout = group.rollouts.members[m];
      Sequence sequence;
      sequence.rollout = &rollout;
      sequence.rewards = &group.rewards[m];
      sequence.loss_mask = LossMaskFromLength(options_.loss, rollout.token_ids.size(), rollout.is_truncated());
      for (std::size_t t = 0; t < rollout.loss_mask.size(); ++t) sequence.loss_mask[t] &= rollout.loss_mask[t];
      sequences.push_back(std::move(sequence));
    }
  }
  StepReport report;
  report.learning_rate = LearningRateAt(options_.learning_rate, step);
  const bool is_kl_in_reward = options_.advantage.kl_in_reward != 0;
  if (!is_kl_in_reward) TANDEM_RETURN_IF_ERROR(ComputeStepAdvantages(sequences, group_size, &report));
  const std::uint32_t num_mini_batches = options_.mini_batches_per_rollout;
  TANDEM_CHECK(groups.size() % num_mini_batches == 0, groups.size(), " groups in ", num_mini_batches, " mini-batches");
  const std::size_t groups_each = groups.size() / num_mini_batches;
  std::vector<MiniBatch> mini_batches;
  for (std::size_t begin = 0; begin < groups.size(); begin += groups_each) {
    TANDEM_ASSIGN_OR_RETURN(MiniBatch mini_batch, Pack(groups.subspan(begin, groups_each), begin * group_size, sequences,
                                                       is_kl_in_reward ? nullptr : &report.advantages, &report));
    report.num_micro_batches += mini_batch.micro_batches.size();
    mini_batches.push_back(std::move(mini_batch));
  }
  if (report.num_micro_batches > 0) {
    const MonotonicTime begin = MonotonicTime::Now();
    TANDEM_RETURN_IF_ERROR(phase_->Enter());
    report.phase_wait = MonotonicTime::Now() - begin;
  }
  const auto score = [&](std::span<const MiniBatch> of, Scores wanted) -> absl::Status {
    const MonotonicTime begin = MonotonicTime::Now();
    TANDEM_RETURN_IF_ERROR(Score(of, wanted, &sequences));
    report.score_time += MonotonicTime::Now() - begin;
    return absl::OkStatus();
  };
  // Old and reference log-probs before the first update, entropies before each: the top-entropy mask's threshold is that of its
  // optimizer step.
  const bool needs_entropies = options_.loss.top_entropy_quantile < 1, is_one_batch = num_mini_batches == 1;
  TANDEM_RETURN_IF_ERROR(score(mini_batches, {.old = num_updates() > 1 || is_kl_in_reward,
                                              .reference = options_.loss.beta != 0 || is_kl_in_reward,
                                              .entropies = needs_entropies && is_one_batch}));
  if (is_kl_in_reward) TANDEM_RETURN_IF_ERROR(ComputeStepAdvantages(sequences, group_size, &report));
  for (std::size_t i = 0; i < sequences.size(); ++i) sequences[i].advantages = report.advantages.advantages[i];
  for (std::uint32_t update = 0; update < num_updates(); ++update) {
    const MiniBatch& mini_batch = mini_batches[update % num_mini_batches];
    const bool has_entropies = update == 0 && is_one_batch;
    if (needs_entropies && !has_entropies) TANDEM_RETURN_IF_ERROR(score({&mini_batch, 1}, {.entropies = true}));
    TANDEM_RETURN_IF_ERROR(Update(step, update, mini_batch, &sequences, &report));
  }
  report.loss /= num_updates();
  report.num_updates = num_updates();
  if (const auto warning = RolloutMaskWarning(report.metrics)) TANDEM_LOG(kWarning, "step", *warning);
  return report;
}

absl::Status StepDriver::ComputeStepAdvantages(std::span<const Sequence> sequences, std::size_t group_size,
                                               StepReport* report) const {
  std::vector<AdvantageSequence> inputs;
  for (const Sequence& sequence : sequences) {
    inputs.push_back({.rewards = *sequence.rewards,
                      .old_logprobs = sequence.old_logprobs,
                      .ref_logprobs = sequence.ref_logprobs,
                      .loss_mask = sequence.loss_mask});
  }
  TANDEM_ASSIGN_OR_RETURN(report->advantages, ComputeAdvantages(options_.advantage, inputs, static_cast<int>(group_size)));
  return absl::OkStatus();
}

// `first`: index of the groups' first sequence.
absl::StatusOr<StepDriver::MiniBatch> StepDriver::Pack(std::span<const ScoredGroup> groups, std::size_t first,
                                                       std::span<const Sequence> sequences, const AdvantageResult* advantages,
                                                       StepReport* report) const {
  MiniBatch mini_batch;
  mini_batch.begin = first;
  const LossOptions& loss = options_.loss;
  const bool can_skip = advantages != nullptr && loss.beta == 0 && loss.entropy_coefficient == 0 &&
                        loss.top_entropy_quantile >= 1 && loss.aggregation != Aggregation::kMicroBatchTokenMean;
  std::vector<GroupToPack> to_pack;
  std::int64_t longest = 0;
  for (const ScoredGroup& group : groups) {
    const std::size_t group_size = group.rollouts.members.size();
    bool is_flat = can_skip;
    for (std::size_t i = first; is_flat && i < first + group_size; ++i) is_flat = IsZero(advantages->advantages[i]);
    if (is_flat) {
      ++report->num_groups_skipped;
    } else {
      GroupToPack packed{.prompt_ids = group.prompt_ids, .completions = {}};
      for (std::size_t i = first; i < first + group_size; ++i) {
        if (!sequences[i].is_trained()) continue;
        const Rollout& rollout = *sequences[i].rollout;
        const CompletionToPack completion{static_cast<std::int32_t>(i), rollout.token_ids, sequences[i].loss_mask};
        if (rollout.prompt_ids.empty()) {
          packed.completions.push_back(completion);
        } else {
          to_pack.push_back({.prompt_ids = rollout.prompt_ids, .completions = {completion}});
        }
        const std::size_t prompt_size = rollout.prompt_ids.empty() ? group.prompt_ids.size() : rollout.prompt_ids.size();
        longest = std::max(longest, static_cast<std::int64_t>(prompt_size + rollout.token_ids.size()));
      }
      to_pack.push_back(std::move(packed));
    }
    first += group_size;
  }
  std::int64_t max_tokens = MicroBatchLimit(options_.micro_batch_tokens, longest);
  if (options_.halves_micro_batches) max_tokens = std::max(longest, max_tokens / 2);
  mini_batch.end = first;
  TANDEM_ASSIGN_OR_RETURN(mini_batch.micro_batches, PackMicroBatches(to_pack, max_tokens));
  if (options_.scores_prompts) {
    std::ranges::for_each(mini_batch.micro_batches, [](MicroBatch& batch) { AddPromptHeadRows(&batch); });
  }
  return mini_batch;
}

absl::Status StepDriver::Score(std::span<const MiniBatch> mini_batches, Scores wanted, std::vector<Sequence>* sequences) {
  const auto mask_of = [&](const PackedCompletion& completion) -> const std::vector<std::uint8_t>& {
    return (*sequences)[static_cast<std::size_t>(completion.sequence_index)].loss_mask;
  };
  const auto sequence_of = [&](const PackedCompletion& completion) -> Sequence& {
    return (*sequences)[static_cast<std::size_t>(completion.sequence_index)];
  };
  for (const MiniBatch& mini_batch : mini_batches) {
    // Every sequence gets arrays of its own length, packed or not.
    for (std::size_t i = mini_batch.begin; i < mini_batch.end; ++i) {
      Sequence& sequence = (*sequences)[i];
      const std::size_t length = sequence.loss_mask.size();
      if (wanted.old) sequence.old_logprobs.assign(length, 0);
      if (wanted.reference) sequence.ref_logprobs.assign(length, 0);
      if (wanted.entropies) sequence.scored_entropies.assign(length, 0);
    }
    for (const MicroBatch& batch : mini_batch.micro_batches) {
      if (options_.is_interrupted()) return absl::CancelledError("interrupted");
      if (wanted.old || wanted.entropies) {
        TANDEM_ASSIGN_OR_RETURN(const HeadScores scores, policy_->Score(batch, PolicyKind::kPolicy));
        VisitHeadRows(batch, mask_of, [&](const PackedCompletion& completion, std::size_t t, std::size_t row) {
          Sequence& sequence = sequence_of(completion);
          if (wanted.old) sequence.old_logprobs[t] = scores.logprobs[row];
          if (wanted.entropies) sequence.scored_entropies[t] = scores.entropies[row];
        });
      }
      if (wanted.reference) {
        TANDEM_ASSIGN_OR_RETURN(const HeadScores scores, policy_->Score(batch, PolicyKind::kReference));
        VisitHeadRows(batch, mask_of, [&](const PackedCompletion& completion, std::size_t t, std::size_t row) {
          sequence_of(completion).ref_logprobs[t] = scores.logprobs[row];
        });
      }
    }
  }
  return absl::OkStatus();
}

absl::Status StepDriver::Update(std::uint64_t step, std::uint32_t update, const MiniBatch& mini_batch,
                                std::vector<Sequence>* sequences, StepReport* report) {
  const std::span<const MicroBatch> batches = mini_batch.micro_batches;
  const bool use_scored_entropies = options_.loss.top_entropy_quantile < 1;
  const bool has_entropy_bonus = options_.loss.entropy_coefficient != 0;
  std::vector<LossSequence> all;
  for (std::size_t i = mini_batch.begin; i < mini_batch.end; ++i) all.push_back((*sequences)[i].ForLoss(use_scored_entropies));
  const StepTotals totals = ComputeStepTotals(options_.loss, all, static_cast<int>(batches.size()));
  const auto mask_of = [&](const PackedCompletion& completion) -> const std::vector<std::uint8_t>& {
    return (*sequences)[static_cast<std::size_t>(completion.sequence_index)].loss_mask;
  };
  TANDEM_RETURN_IF_ERROR(policy_->ZeroGradients());
  MonotonicTime since = MonotonicTime::Now();
  const auto add_to = [&since](absl::Duration* sum) {
    const MonotonicTime now = MonotonicTime::Now();
    *sum += now - since;
    since = now;
  };
  for (std::size_t b = 0; b < batches.size(); ++b) {
    const MicroBatch& batch = batches[b];
    if (options_.is_interrupted()) return absl::CancelledError("interrupted");
    const std::uint64_t dropout_stream = DeriveSeed(DeriveSeed(step, update), b);
    TANDEM_ASSIGN_OR_RETURN(const HeadScores scores, policy_->Forward(batch, has_entropy_bonus, dropout_stream));
    add_to(&report->forward_time);
    report->work.Add(batch);
    for (const PackedCompletion& completion : batch.completions) {
      Sequence& sequence = (*sequences)[static_cast<std::size_t>(completion.sequence_index)];
      report->num_tokens += completion.prompt_end - completion.prompt_begin + completion.end - completion.begin;
      sequence.policy_logprobs.assign(sequence.loss_mask.size(), 0);
      sequence.entropies.assign(sequence.loss_mask.size(), 0);
    }
    VisitHeadRows(batch, mask_of, [&](const PackedCompletion& completion, std::size_t t, std::size_t row) {
      Sequence& sequence = (*sequences)[static_cast<std::size_t>(completion.sequence_index)];
      sequence.policy_logprobs[t] = scores.logprobs[row];
      sequence.entropies[t] = scores.entropies[row];
    });
    std::vector<LossSequence> members;
    for (const PackedCompletion& completion : batch.completions) {
      members.push_back((*sequences)[static_cast<std::size_t>(completion.sequence_index)].ForLoss(use_scored_entropies));
    }
    absl::StatusOr<LossResult> result = EvaluateLoss(options_.loss, totals, members);
    if (!result.ok()) return Annotate(result.status(), absl::StrCat("micro-batch ", b));
    std::vector<double> grad_logprobs(batch.head_rows.size()), grad_entropies(has_entropy_bonus ? batch.head_rows.size() : 0);
    const PackedCompletion* const first = batch.completions.data();
    VisitHeadRows(batch, mask_of, [&](const PackedCompletion& completion, std::size_t t, std::size_t row) {
      const auto member = static_cast<std::size_t>(&completion - first);
      grad_logprobs[row] = result->grad_logprobs[member][t];
      if (has_entropy_bonus) grad_entropies[row] = result->grad_entropies[member][t];
    });
    TANDEM_RETURN_IF_ERROR(policy_->Backward(grad_logprobs, grad_entropies));
    add_to(&report->backward_time);
    report->loss += result->loss;
    report->metrics.Add(result->metrics);
  }
  TANDEM_ASSIGN_OR_RETURN(report->optimizer,
                          AdamWStep(options_.adamw, report->learning_rate, state_->optimizer_steps + 1, state_->masters,
                                    state_->gradients, state_->first_moments, state_->second_moments, options_.device));
  add_to(&report->optimizer_time);
  ++state_->optimizer_steps;
  return absl::OkStatus();
}

}  // namespace tandem
