// The loop of one job: prompts -> rollouts -> rewards -> advantages -> micro-batches -> loss -> adapters -> weight version, with
// its memory in the trainer's standing region and its files under one directory. Confined to the trainer thread; blocks.
//
// Between two calls the object is at a step boundary: a failed or interrupted call leaves it where it was.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/metrics/metrics.h"
#include "common/model/prompt_encoder.h"
#include "common/sharing/pool_member.h"
#include "common/sharing/standing_allocator.h"
#include "trainer_server/checkpoint/checkpoint_store.h"
#include "trainer_server/job/evaluation.h"
#include "trainer_server/job/history.h"
#include "trainer_server/job/job_plan.h"
#include "trainer_server/job/step_record.h"
#include "trainer_server/policy/policy_model.h"
#include "trainer_server/prompt/prompt_source.h"
#include "trainer_server/publish/adapter_publisher.h"
#include "trainer_server/reward/group_scorer.h"
#include "trainer_server/rollout/rollout_client.h"
#include "trainer_server/step/step_driver.h"

namespace tandem {

using PolicyFactory =
    std::function<absl::StatusOr<std::unique_ptr<PolicyModel>>(const AdapterMemory& memory, const PolicyOptions& options)>;

// What every job shares.
struct LoopEnvironment {
  ModelConfig model;
  std::shared_ptr<const Tokenizer> tokenizer;
  std::shared_ptr<const PromptEncoder> encoder;
  PoolMember* member = nullptr;
  StandingAllocator* standing = nullptr;
  RolloutPeer* peer = nullptr;
  const ContentStore* content = nullptr;
  Metrics* metrics = nullptr;
  PolicyFactory make_policy;
  AdamWDevice device;                       // where the pool lies; its stream is the trainer thread's
  std::function<NodeMemory()> node_memory;  // as it is now
  SandboxSource* sandbox = nullptr;         // of rewards
  int reward_workers = 1;                   // groups scored at a time
  CheckpointQuota checkpoint_quota;
  std::function<std::unique_ptr<PhaseMemory>(std::span<std::byte> elastic)> enter_arena;  // may be empty
  std::function<void(const std::string& phase)> on_phase;                                 // "rollout", "training"
  std::function<std::string(const std::string& job)> directory_of;                        // of a job's files
};

// A piece of the standing region, given back with its owner.
class StandingPiece {
 public:
  StandingPiece() = default;
  static absl::StatusOr<StandingPiece> Allocate(StandingAllocator* standing, std::uint64_t size_bytes, const std::string& owner);
  StandingPiece(StandingPiece&& other) noexcept;
  StandingPiece& operator=(StandingPiece&& other) noexcept;
  ~StandingPiece() { Free(); }
  void Free() noexcept;
  std::span<std::byte> bytes() const { return bytes_; }
  std::span<float> floats() const;  // on the pool's device

 private:
  StandingAllocator* standing_ = nullptr;
  std::span<std::byte> bytes_;
};

class TrainingLoop {
 public:
  // Takes memory, resumes from the newest checkpoint under `directory` or writes the one of step 0. Requires: nobody reads the
  // standing region's free parts. Errors: RESOURCE_EXHAUSTED (memory, by owner), DATA_LOSS (checkpoint).
  static absl::StatusOr<std::unique_ptr<TrainingLoop>> Create(const LoopEnvironment& environment, const std::string& job,
                                                              const std::string& job_text, JobPlan plan,
                                                              const std::string& directory);

  std::uint64_t step() const { return state_.step; }  // steps finished
  std::uint64_t num_steps() const { return plan_.spec.num_steps(); }
  // Draws, scores, trains; appends to the history. A step that finds no memory is tried once more in smaller pieces. Errors:
  // RESOURCE_EXHAUSTED (a prompt longer than what the plan has room for, memory in smaller pieces too); see RolloutClient,
  // StepDriver.
  absl::Status RunStep();
  bool is_evaluation_due() const;
  // Draws, scores, appends to the history; writes a checkpoint when none was better before.
  absl::Status Evaluate();
  // By the job's own rule, or for want of further steps.
  bool is_finished() const;
  bool is_checkpoint_due() const;
  // Of the last step boundary. Errors: FAILED_PRECONDITION (the step was trained and its record could not be written: it has to
  // be done again).
  absl::Status WriteCheckpoint();

  bool has_published() const { return publisher_->version() > 0; }
  // Makes the adapter known again to a rollout server that came back. Requires: has_published.
  absl::Status Reactivate() { return publisher_->Reactivate(); }
  // Frees all but the adapter in use, which `generate` may still ask for.
  void KeepOnlyAdapter();
  const std::string& job() const { return job_; }

 private:
  TrainingLoop(const LoopEnvironment& environment, std::string job, std::string job_text, JobPlan plan);
  absl::Status TakeMemory();
  absl::Status MakeParts();
  // The policy, over masters that stay as they are, and the driver of its steps.
  enum class StepPieces { kUsual, kSmaller };
  absl::Status MakeTrainer(StepPieces pieces);
  absl::Status LoadStartAdapter();
  absl::StatusOr<std::vector<std::byte>> ReadStartAdapter() const;
  absl::Status ResumeOrBegin(const std::string& directory);
  absl::Status EnsurePublished();
  // Groups of the prompts, each scored while others are still drawn.
  struct DrawnGroups {
    std::vector<RolloutGroup> rollouts;
    std::vector<RewardTable> rewards;
    double reward_seconds = 0;  // after the last completion
  };
  absl::StatusOr<DrawnGroups> DrawGroups(const std::vector<Prompt>& prompts, std::uint32_t group_size,
                                         const v1::SamplingParams& sampling, std::vector<std::uint64_t> seeds);
  void ReportFailures(const std::vector<RewardFailure>& failures);
  absl::StatusOr<DrawnStep> DrawStep(std::uint64_t step);
  absl::Status DrawRound(std::uint64_t step, std::size_t num_prompts, DrawnStep* drawn, std::vector<ScoredGroup>* flat);
  bool IsFlat(const ScoredGroup& group) const;
  bool moves_reference() const { return plan_.spec.loss().has_reference_sync(); }
  absl::Status SyncReference();
  absl::StatusOr<StepReport> Train(std::uint64_t step, std::span<const ScoredGroup> groups);
  absl::Status CheckPrompts(const std::vector<Prompt>& prompts, const DataSet& data, std::uint64_t max_tokens) const;
  void Use(const std::string& owner, std::uint64_t bytes);
  // The rollout server's peaks, while they are of this step's rollouts. Where it does not answer they are left out.
  void ObserveGeneration();
  // Plan against use, by owner.
  void ExportMemory(std::uint64_t training_peak_bytes);
  void ExportStep(const StepReport& report);
  CheckpointArrays arrays() const {
    return {.adapter = masters_.bytes(),
            .first_moments = first_moments_.bytes(),
            .second_moments = second_moments_.bytes(),
            .reference = moves_reference() ? reference_.bytes() : std::span<std::byte>(),
            .device = environment_.device.device};
  }

  const LoopEnvironment environment_;
  const std::string job_;
  const std::string job_text_;
  JobPlan plan_;
  StandingPiece masters_, gradients_, first_moments_, second_moments_, slots_[2];
  StandingPiece reference_;  // the adapter that the KL is measured to; empty: the base model
  std::unique_ptr<PolicyModel> policy_;
  std::unique_ptr<PromptSource> prompts_, evaluation_prompts_;
  std::unique_ptr<AdapterPublisher> publisher_;
  std::unique_ptr<RolloutClient> client_;
  std::unique_ptr<GroupScorer> scorer_;
  std::unique_ptr<ElasticPhase> phase_;
  std::unique_ptr<StepDriver> driver_;  // null: the next step makes it
  std::optional<CheckpointStore> checkpoints_;
  std::optional<HistoryWriter> history_;
  bool is_recorded_ = true;  // what was trained
  TrainedState trained_;
  CheckpointState state_;  // of the last step boundary
  std::vector<double> recent_step_seconds_;
  std::map<std::string, std::uint64_t> peak_bytes_;  // by owner, since the job began here
  // The KV cache's peak since training last held the elastic region is not of one step's rollouts alone, as the plan is.
  bool has_evaluated_in_phase_ = false;
};

}  // namespace tandem
