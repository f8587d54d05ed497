// A step of the loop, of one optimizer step or several: scored groups -> advantages -> mini-batches -> micro-batches -> loss ->
// AdamW. Each of `updates_per_rollout` passes over the groups makes one optimizer step a mini-batch. Confined to the trainer
// thread. Deterministic: the same groups and state give the same bits.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "trainer_server/advantage/advantage.h"
#include "trainer_server/batch/pass_work.h"
#include "trainer_server/loss/loss.h"
#include "trainer_server/optim/adamw.h"
#include "trainer_server/optim/learning_rate.h"
#include "trainer_server/policy/policy_model.h"
#include "trainer_server/rollout/rollout_group.h"
#include "trainer_server/step/elastic_phase.h"

namespace tandem {

// What the job trains, flat fp32 in AdapterLayout order on the driver's device, and how often it was updated.
struct TrainedState {
  std::span<float> masters, gradients, first_moments, second_moments;
  std::uint64_t optimizer_steps = 0;
};

// A group with the values of each reward function; nullopt: the function did not apply.
struct ScoredGroup {
  std::vector<std::uint32_t> prompt_ids;
  RolloutGroup rollouts;
  std::vector<std::vector<std::optional<double>>> rewards;  // [group_size][num_functions]
};

struct StepReport {
  double loss = 0;        // mean over the updates
  AdamWReport optimizer;  // of the last update
  double learning_rate = 0;
  AdvantageResult advantages;  // sequences in the order of groups and members
  LossMetrics metrics;         // summed over the updates
  std::size_t num_micro_batches = 0;
  std::uint32_t num_updates = 0;
  double num_tokens = 0;               // trained on, summed over the updates; a shared prompt counts for each of its completions
  PassWork work;                       // of the updates' passes
  std::size_t num_groups_skipped = 0;  // no variance: nothing to learn from
  absl::Duration phase_wait;           // for the elastic region
  // What of the phase went where, the device's work included; summed over the updates.
  absl::Duration score_time, forward_time, backward_time, optimizer_time;
  std::uint64_t peak_bytes = 0;  // of training memory in it; 0: the step took none
};

class StepDriver {
 public:
  struct Options {
    LossOptions loss;
    AdvantageOptions advantage;
    AdamWOptions adamw;
    LearningRateOptions learning_rate;
    std::uint32_t updates_per_rollout = 1;
    std::uint32_t mini_batches_per_rollout = 1;  // of equally many groups, in their order; divides their number
    std::int64_t micro_batch_tokens = 0;         // see MicroBatchLimit
    bool halves_micro_batches = false;           // as far as the longest sequence allows
    bool scores_prompts = false;                 // with weight 0: for measurements
    std::function<bool()> is_interrupted;        // asked between micro-batches
    AdamWDevice device;                          // where the trained state lies
  };

  StepDriver(PolicyModel* policy, TrainedState* state, ElasticPhase* phase, Options options);

  // `step` counts from 1. A group whose advantages are all exactly 0 is not computed when nothing but the advantage gives it a
  // gradient; it stays in every denominator. Errors: CANCELLED (interrupted), FAILED_PRECONDITION (a value is not finite: the
  // step is refused), RESOURCE_EXHAUSTED (the elastic region has no room for a micro-batch), those of ElasticPhase. After an
  // error masters, moments and counters are what they were, and the region is given back unless that failed.
  absl::StatusOr<StepReport> Run(std::uint64_t step, std::span<const ScoredGroup> groups);

 private:
  struct Sequence;
  // One optimizer step's share of the groups.
  struct MiniBatch {
    std::size_t begin = 0, end = 0;  // of sequences
    std::vector<MicroBatch> micro_batches;
  };
  struct Scores {
    bool old = false, reference = false, entropies = false;
  };
  std::uint32_t num_updates() const { return options_.updates_per_rollout * options_.mini_batches_per_rollout; }
  absl::StatusOr<StepReport> RunInPhase(std::uint64_t step, std::span<const ScoredGroup> groups);
  absl::Status ComputeStepAdvantages(std::span<const Sequence> sequences, std::size_t group_size, StepReport* report) const;
  absl::StatusOr<MiniBatch> Pack(std::span<const ScoredGroup> groups, std::size_t first, std::span<const Sequence> sequences,
                                 const AdvantageResult* advantages, StepReport* report) const;
  absl::Status Score(std::span<const MiniBatch> mini_batches, Scores wanted, std::vector<Sequence>* sequences);
  absl::Status Update(std::uint64_t step, std::uint32_t update, const MiniBatch& mini_batch, std::vector<Sequence>* sequences,
                      StepReport* report);

  PolicyModel* const policy_;
  TrainedState* const state_;
  ElasticPhase* const phase_;
  const Options options_;
};

}  // namespace tandem
