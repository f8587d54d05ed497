#include "trainer_server/job/training_loop.h"

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/random.h"
#include "common/base/units.h"
#include "common/gpu/device_peak.h"
#include "trainer_server/batch/pass_work.h"
#include "trainer_server/job/adapter_files.h"
#include "trainer_server/job/job_metrics.h"
#include "trainer_server/rollout/further_turns.h"

namespace tandem {
namespace {

// Part of the job's seed that draws evaluations, the same before and after training; beyond any step number.
constexpr std::uint64_t kEvaluationPart = 0x4576616c'00000001ULL;
constexpr std::size_t kEvaluationUnitCompletions = 1024;
constexpr std::size_t kReferencePieceBytes = 16 << 20;
constexpr std::size_t kRecentSteps = 10;
constexpr std::size_t kMaxLoggedFailures = 8;     // of rewards, a step
constexpr char kTrainingOwner[] = "activations";  // of the arena that passes compute in
constexpr int kSmallerLogitChunk = 128;           // rows, where the trainer chooses

double SecondsSince(MonotonicTime begin) { return absl::ToDoubleSeconds(MonotonicTime::Now() - begin); }

double NowSeconds() { return absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()); }

}  // namespace

absl::StatusOr<StandingPiece> StandingPiece::Allocate(StandingAllocator* standing, std::uint64_t size_bytes,
                                                      const std::string& owner) {
  StandingPiece piece;
  TANDEM_ASSIGN_OR_RETURN(piece.bytes_, standing->Allocate(size_bytes, owner));
  piece.standing_ = standing;
  return piece;
}
StandingPiece::StandingPiece(StandingPiece&& other) noexcept
    : standing_(std::exchange(other.standing_, nullptr)), bytes_(std::exchange(other.bytes_, {})) {}
StandingPiece& StandingPiece::operator=(StandingPiece&& other) noexcept {
  if (this != &other) {
    Free();
    standing_ = std::exchange(other.standing_, nullptr);
    bytes_ = std::exchange(other.bytes_, {});
  }
  return *this;
}
void StandingPiece::Free() noexcept {
  if (standing_ != nullptr) standing_->Free(bytes_);
  standing_ = nullptr;
  bytes_ = {};
}
std::span<float> StandingPiece::floats() const {
  return {static_cast<float*>(static_cast<void*>(bytes_.data())), bytes_.size() / sizeof(float)};
}

TrainingLoop::TrainingLoop(const LoopEnvironment& environment, std::string job, std::string job_text, JobPlan plan)
    : environment_(environment), job_(std::move(job)), job_text_(std::move(job_text)), plan_(std::move(plan)) {}

absl::StatusOr<std::unique_ptr<TrainingLoop>> TrainingLoop::Create(const LoopEnvironment& environment, const std::string& job,
                                                                   const std::string& job_text, JobPlan plan,
                                                                   const std::string& directory) {
  std::unique_ptr<TrainingLoop> loop(new TrainingLoop(environment, job, job_text, std::move(plan)));
  TANDEM_RETURN_IF_ERROR(loop->TakeMemory());
  TANDEM_RETURN_IF_ERROR(loop->MakeParts());
  TANDEM_RETURN_IF_ERROR(loop->ResumeOrBegin(directory));
  return loop;
}

absl::Status TrainingLoop::TakeMemory() {
  const std::uint64_t size = plan_.layout.total_bytes;
  StandingAllocator* const standing = environment_.standing;
  const auto take = [&](const char* owner, StandingPiece* piece) -> absl::Status {
    TANDEM_ASSIGN_OR_RETURN(*piece, StandingPiece::Allocate(standing, size, owner));
    return absl::OkStatus();
  };
  TANDEM_RETURN_IF_ERROR(take("adapter_masters", &masters_));
  TANDEM_RETURN_IF_ERROR(take("gradients", &gradients_));
  TANDEM_RETURN_IF_ERROR(take("optimizer", &first_moments_));
  TANDEM_RETURN_IF_ERROR(take("optimizer", &second_moments_));
  for (StandingPiece& slot : slots_) TANDEM_RETURN_IF_ERROR(take("adapter_slots", &slot));
  trained_ = {masters_.floats(), gradients_.floats(), first_moments_.floats(), second_moments_.floats(), 0};
  return absl::OkStatus();
}

absl::Status TrainingLoop::MakeParts() {
  prompts_ =
      std::make_unique<PromptSource>(plan_.data, plan_.rows.trained, environment_.encoder, plan_.spec.data(), plan_.spec.seed());
  if (plan_.evaluation != nullptr) {
    evaluation_prompts_ = std::make_unique<PromptSource>(plan_.evaluation, plan_.evaluation_rows, environment_.encoder,
                                                         plan_.spec.data(), plan_.spec.seed());
  }
  RolloutPeer* const peer = environment_.peer;
  PoolMember* const member = environment_.member;
  publisher_ = std::make_unique<AdapterPublisher>(
      peer, AdapterPublisher::Options{.job = job_,
                                      .slots = {slots_[0].bytes(), slots_[1].bytes()},
                                      .offset_of = [member](const void* address) { return member->offset_of(address); },
                                      .layout = plan_.layout,
                                      .scale = plan_.policy.scale,
                                      .device = environment_.device.device});
  client_ = std::make_unique<RolloutClient>(
      peer, [this] { return publisher_->Reactivate(); },
      RolloutClient::Options{.tokenizer = environment_.tokenizer,
                             .end_token_ids = environment_.model.end_token_ids,
                             .vocab_size = static_cast<std::size_t>(environment_.model.vocab_size)});
  scorer_ =
      std::make_unique<GroupScorer>(&*plan_.rewards, environment_.reward_workers, [peer] { return peer->is_interrupted(); });
  phase_ = std::make_unique<ElasticPhase>(peer, ElasticPhase::Options{.member = member, .enter_arena = environment_.enter_arena});
  TANDEM_RETURN_IF_ERROR(MakeTrainer(StepPieces::kUsual));
  TANDEM_RETURN_IF_ERROR(policy_->InitializeAdapters(plan_.spec.seed()));
  const bool has_start_adapter = HasStartAdapter(plan_.spec.adapter());
  if (!has_start_adapter && !moves_reference()) return absl::OkStatus();
  TANDEM_ASSIGN_OR_RETURN(reference_,
                          StandingPiece::Allocate(environment_.standing, plan_.layout.total_bytes, "reference_adapter"));
  if (has_start_adapter) return LoadStartAdapter();
  // An adapter whose B is still zero computes what the base does.
  TANDEM_RETURN_IF_ERROR(
      CopyOnDevice(environment_.device.device, reference_.bytes().data(), masters_.bytes().data(), masters_.bytes().size()));
  return policy_->SetReference(reference_.bytes(), plan_.layout, plan_.policy.scale);
}

absl::Status TrainingLoop::MakeTrainer(StepPieces pieces) {
  driver_.reset();
  policy_.reset();  // before the next one takes what it holds
  PolicyOptions options = plan_.policy;
  if (pieces == StepPieces::kSmaller) {
    options.logit_chunk = options.logit_chunk > 0 ? (options.logit_chunk + 1) / 2 : kSmallerLogitChunk;
  }
  TANDEM_ASSIGN_OR_RETURN(policy_, environment_.make_policy({masters_.bytes(), gradients_.bytes()}, options));
  if (!reference_.bytes().empty()) {
    TANDEM_RETURN_IF_ERROR(policy_->SetReference(reference_.bytes(), plan_.layout, plan_.policy.scale));
  }
  RolloutPeer* const peer = environment_.peer;
  driver_ =
      std::make_unique<StepDriver>(policy_.get(), &trained_, phase_.get(),
                                   StepDriver::Options{.loss = plan_.loss,
                                                       .advantage = plan_.advantage,
                                                       .adamw = plan_.adamw,
                                                       .learning_rate = plan_.learning_rate,
                                                       .updates_per_rollout = plan_.spec.loss().updates_per_rollout(),
                                                       .mini_batches_per_rollout = plan_.spec.loss().mini_batches_per_rollout(),
                                                       .micro_batch_tokens = plan_.spec.batch().micro_batch_tokens(),
                                                       .halves_micro_batches = pieces == StepPieces::kSmaller,
                                                       .scores_prompts = plan_.spec.batch().score_prompts(),
                                                       .is_interrupted = [peer] { return peer->is_interrupted(); },
                                                       .device = environment_.device});
  return absl::OkStatus();
}

// In the order of the layout, on the host.
absl::StatusOr<std::vector<std::byte>> TrainingLoop::ReadStartAdapter() const {
  const v1::AdapterConfig& config = plan_.spec.adapter();
  std::vector<std::byte> on_host(plan_.layout.total_bytes);
  if (config.start_job().empty()) {
    TANDEM_ASSIGN_OR_RETURN(const PeftAdapter start, OpenStartAdapter(config, environment_.model, *environment_.content));
    TANDEM_RETURN_IF_ERROR(start.Load(on_host));
    return on_host;
  }
  const std::string field = absl::StrCat("adapter.start_job: job ", config.start_job());
  const auto checkpoints = CheckpointStore::OpenForReading(environment_.directory_of(config.start_job()) + "/checkpoints");
  const absl::StatusOr<std::string> adapter =
      config.start_best() ? checkpoints.ReadBestAdapter() : checkpoints.ReadNewestAdapter();
  if (!adapter.ok()) return Annotate(adapter.status(), field);
  if (adapter->size() != on_host.size()) {
    return absl::FailedPreconditionError(absl::StrCat(field, " has an adapter of ", adapter->size(), " bytes; this job's has ",
                                                      on_host.size(), ": it was trained on another model"));
  }
  std::ranges::copy(std::as_bytes(std::span<const char>(*adapter)), on_host.begin());
  return on_host;
}

// The job begins at this adapter, which is its reference too.
absl::Status TrainingLoop::LoadStartAdapter() {
  TANDEM_ASSIGN_OR_RETURN(const std::vector<std::byte> on_host, ReadStartAdapter());
  for (const StandingPiece* piece : {&reference_, &masters_}) {
    TANDEM_RETURN_IF_ERROR(CopyFromHost(environment_.device.device, piece->bytes().data(), on_host.data(), on_host.size()));
  }
  return policy_->SetReference(reference_.bytes(), plan_.layout, plan_.policy.scale);
}

// In pieces through the host: rare, and the sums are those of the CPU wherever the pool lies.
absl::Status TrainingLoop::SyncReference() {
  const auto alpha = static_cast<float>(plan_.spec.loss().reference_sync().alpha());
  const Device device = environment_.device.device;
  std::vector<float> policy, reference;
  const std::span<float> all_policy = masters_.floats(), all_reference = reference_.floats();
  const std::size_t piece = kReferencePieceBytes / sizeof(float);
  for (std::size_t begin = 0; begin < all_policy.size(); begin += piece) {
    const std::size_t count = std::min(piece, all_policy.size() - begin), bytes = count * sizeof(float);
    policy.resize(count);
    reference.resize(count);
    TANDEM_RETURN_IF_ERROR(CopyToHost(device, policy.data(), all_policy.data() + begin, bytes));
    TANDEM_RETURN_IF_ERROR(CopyToHost(device, reference.data(), all_reference.data() + begin, bytes));
    for (std::size_t i = 0; i < count; ++i) reference[i] = alpha * policy[i] + (1 - alpha) * reference[i];
    TANDEM_RETURN_IF_ERROR(CopyFromHost(device, all_reference.data() + begin, reference.data(), bytes));
  }
  return absl::OkStatus();
}

absl::Status TrainingLoop::ResumeOrBegin(const std::string& directory) {
  TANDEM_ASSIGN_OR_RETURN(checkpoints_, CheckpointStore::Open(directory + "/checkpoints", environment_.checkpoint_quota));
  TANDEM_ASSIGN_OR_RETURN(const std::optional<CheckpointState> resumed, checkpoints_->LoadNewest(job_text_, arrays()));
  state_.seed = plan_.spec.seed();
  if (resumed.has_value()) state_ = *resumed;
  trained_.optimizer_steps = state_.optimizer_steps;
  TANDEM_ASSIGN_OR_RETURN(history_, HistoryWriter::Open(directory, state_.history_bytes, state_.step));
  state_.history_bytes = history_->size_bytes();
  TANDEM_LOG(kInfo, "job", resumed.has_value() ? "resumed" : "begins", " job=", job_, " step=", state_.step,
             " of=", plan_.spec.num_steps());
  if (resumed.has_value()) return absl::OkStatus();
  state_.weight_version = 1;
  TANDEM_RETURN_IF_ERROR(history_->Append(DataEvent(plan_.rows.counts)));
  state_.history_bytes = history_->size_bytes();
  return WriteCheckpoint();
}

absl::Status TrainingLoop::EnsurePublished() {
  if (publisher_->version() == state_.weight_version) return absl::OkStatus();
  return publisher_->PublishWhenServing(state_.weight_version, masters_.bytes());
}

absl::StatusOr<TrainingLoop::DrawnGroups> TrainingLoop::DrawGroups(const std::vector<Prompt>& prompts, std::uint32_t group_size,
                                                                   const v1::SamplingParams& sampling,
                                                                   std::vector<std::uint64_t> seeds) {
  RolloutUnit unit{.job = job_,
                   .weight_version = state_.weight_version,
                   .group_size = group_size,
                   .sampling = sampling,
                   .prompts = {},
                   .seeds = std::move(seeds)};
  for (const Prompt& prompt : prompts) unit.prompts.emplace_back(prompt.token_ids);
  const auto score = [&](std::size_t g, const RolloutGroup& group) {
    std::vector<RewardInput> completions;
    for (const Rollout& rollout : group.members) {
      completions.push_back({.row = &prompts[g].row,
                             .completion = rollout.text,
                             .completion_tokens = static_cast<int>(rollout.num_drawn()),
                             .is_truncated = rollout.is_truncated(),
                             .token_ids = rollout.token_ids});
    }
    scorer_->Add(g, std::move(completions), absl::StrCat("data set row ", prompts[g].row_index));
  };
  unit.on_group = [&](std::size_t g, const RolloutGroup& group) {
    if (prompts[g].messages.empty()) score(g, group);
  };
  scorer_->Begin(state_.step, num_steps(), prompts.size());
  DrawnGroups drawn;
  absl::StatusOr<std::vector<RolloutGroup>> rollouts = client_->Draw(unit);
  absl::Status status = rollouts.status();
  if (status.ok()) {
    drawn.rollouts = *std::move(rollouts);
    const FurtherTurns turns{.encoder = environment_.encoder.get(),
                             .template_arguments = plan_.spec.data().template_arguments(),
                             .largest_context_tokens = plan_.memory.figures.largest_context_tokens()};
    status = DrawFurtherTurns(turns, unit, prompts, client_.get(), &drawn.rollouts);
  }
  if (!status.ok()) {
    scorer_->Abandon();
    return status;
  }
  for (std::size_t g = 0; g < prompts.size(); ++g) {
    if (!prompts[g].messages.empty()) score(g, drawn.rollouts[g]);
  }
  const MonotonicTime reward_begin = MonotonicTime::Now();
  absl::StatusOr<std::vector<RewardTable>> rewards = scorer_->Finish();
  ReportFailures(scorer_->TakeFailures());
  TANDEM_ASSIGN_OR_RETURN(drawn.rewards, std::move(rewards));
  drawn.reward_seconds = SecondsSince(reward_begin);
  return drawn;
}

void TrainingLoop::ReportFailures(const std::vector<RewardFailure>& failures) {
  for (std::size_t i = 0; i < failures.size(); ++i) {
    const RewardFailure& failure = failures[i];
    if (i < kMaxLoggedFailures) {
      TANDEM_LOG(kWarning, "job", "counted as None job=", job_, " step=", state_.step + 1, " because=", failure.text);
    } else if (i == kMaxLoggedFailures) {
      TANDEM_LOG(kWarning, "job", "counted as None job=", job_, " step=", state_.step + 1, " further=", failures.size() - i);
    }
    environment_.metrics->AddCounter(kRewardFailuresTotal, {job_, failure.function}, 1);
  }
}

// A data set may hold longer prompts than those that the plan was made with.
absl::Status TrainingLoop::CheckPrompts(const std::vector<Prompt>& prompts, const DataSet& data, std::uint64_t max_tokens) const {
  const std::uint64_t limit = plan_.memory.figures.largest_context_tokens();
  const std::uint64_t further = plan_.needs.further_tokens;
  const std::uint64_t completion = max_tokens + further;
  for (const Prompt& prompt : prompts) {
    if (prompt.token_ids.size() + completion <= limit) continue;
    return absl::ResourceExhaustedError(absl::StrCat("data set line ", data.line_of(prompt.row_index), ": the prompt has ",
                                                     prompt.token_ids.size(), " tokens; with completions of up to ", completion,
                                                     " tokens the largest context that fits is ", limit, " tokens"));
  }
  return absl::OkStatus();
}

// An allocation that fails costs the step one more try. Its gradient is the same but for the order of sums.
absl::StatusOr<StepReport> TrainingLoop::Train(std::uint64_t step, std::span<const ScoredGroup> groups) {
  if (driver_ == nullptr) TANDEM_RETURN_IF_ERROR(MakeTrainer(StepPieces::kUsual));
  absl::StatusOr<StepReport> report = driver_->Run(step, groups);
  if (!absl::IsResourceExhausted(report.status())) return report;
  TANDEM_LOG(kWarning, "job", "step again in smaller pieces job=", job_, " because=", std::string(report.status().message()));
  environment_.metrics->AddCounter(kMemoryRetriesTotal, {job_}, 1);
  TANDEM_RETURN_IF_ERROR(MakeTrainer(StepPieces::kSmaller));
  report = driver_->Run(step, groups);
  if (absl::IsResourceExhausted(report.status())) return Annotate(report.status(), "in smaller pieces too");
  driver_.reset();  // the step is done: what the usual pieces find no memory for is the next one's failure
  return report;
}

// Rewards of one value teach nothing under any estimator that compares a group's members.
bool TrainingLoop::IsFlat(const ScoredGroup& group) const {
  const std::string& named = plan_.spec.rollout().dynamic_sampling().reward();
  std::vector<double> values;
  for (const auto& rewards : group.rewards) {
    const auto function =
        static_cast<std::size_t>(std::ranges::find(plan_.rewards->names(), named) - plan_.rewards->names().begin());
    const std::optional<double> value = named.empty() ? WeightedReward(rewards, plan_.advantage.weights) : rewards[function];
    if (value.has_value()) values.push_back(*value);
  }
  return values.empty() || std::ranges::min(values) == std::ranges::max(values);
}

// The next prompts of the stream; flat groups go to `flat` where they may be replaced.
absl::Status TrainingLoop::DrawRound(std::uint64_t step, std::size_t num_prompts, DrawnStep* drawn,
                                     std::vector<ScoredGroup>* flat) {
  const MonotonicTime begin = MonotonicTime::Now();
  const v1::RolloutConfig& rollout = plan_.spec.rollout();
  TANDEM_ASSIGN_OR_RETURN(std::vector<Prompt> prompts, prompts_->Draw(state_.prompt_cursor + drawn->num_prompts, num_prompts));
  TANDEM_RETURN_IF_ERROR(CheckPrompts(prompts, *plan_.data, rollout.sampling().max_tokens()));
  const std::uint64_t step_seed = DeriveSeed(plan_.spec.seed(), step);
  std::vector<std::uint64_t> seeds;
  for (std::size_t g = 0; g < num_prompts; ++g) seeds.push_back(DeriveSeed(step_seed, drawn->num_prompts + g));
  TANDEM_ASSIGN_OR_RETURN(DrawnGroups groups, DrawGroups(prompts, rollout.group_size(), rollout.sampling(), std::move(seeds)));
  drawn->rollout_seconds += SecondsSince(begin) - groups.reward_seconds;
  drawn->reward_seconds += groups.reward_seconds;
  drawn->num_prompts += num_prompts;
  ++drawn->num_rounds;

  for (std::size_t g = 0; g < num_prompts; ++g) {
    RewardTable& rewards = groups.rewards[g];
    for (const auto& row : rewards) {
      if (const auto total = WeightedReward(row, plan_.advantage.weights)) drawn->drawn_totals.push_back(*total);
    }
    for (const Rollout& member : groups.rollouts[g].members) drawn->completion_tokens += member.token_ids.size();
    ScoredGroup group{std::move(prompts[g].token_ids), std::move(groups.rollouts[g]), std::move(rewards)};
    const bool is_flat = rollout.has_dynamic_sampling() && IsFlat(group);
    drawn->num_flat += is_flat ? 1 : 0;
    (is_flat ? *flat : drawn->groups).push_back(std::move(group));
  }
  return absl::OkStatus();
}

absl::StatusOr<DrawnStep> TrainingLoop::DrawStep(std::uint64_t step) {
  const v1::RolloutConfig& rollout = plan_.spec.rollout();
  const std::size_t wanted = rollout.prompts_per_step();
  const std::uint32_t max_rounds = rollout.has_dynamic_sampling() ? rollout.dynamic_sampling().max_rounds() : 1;
  DrawnStep drawn;
  std::vector<ScoredGroup> flat;
  for (std::uint32_t round = 0; round < max_rounds && drawn.groups.size() < wanted; ++round) {
    TANDEM_RETURN_IF_ERROR(DrawRound(step, wanted - drawn.groups.size(), &drawn, &flat));
    // Those that no place can be left for need not be kept.
    flat.erase(flat.begin() + static_cast<std::ptrdiff_t>(std::min(flat.size(), wanted - drawn.groups.size())), flat.end());
  }
  for (std::size_t i = 0; drawn.groups.size() < wanted; ++i) drawn.groups.push_back(std::move(flat[i]));
  return drawn;
}

absl::Status TrainingLoop::RunStep() {
  const MonotonicTime begin = MonotonicTime::Now();
  const std::uint64_t step = state_.step + 1;
  environment_.on_phase("rollout");
  TANDEM_RETURN_IF_ERROR(EnsurePublished());
  const double publish_seconds = SecondsSince(begin);

  TANDEM_ASSIGN_OR_RETURN(const DrawnStep drawn, DrawStep(step));
  const std::vector<ScoredGroup>& groups = drawn.groups;
  ObserveGeneration();

  const MonotonicTime train_begin = MonotonicTime::Now();
  RewardTable table;
  for (const ScoredGroup& group : groups) table.insert(table.end(), group.rewards.begin(), group.rewards.end());
  TANDEM_ASSIGN_OR_RETURN(const std::vector<RewardMetrics> functions, plan_.rewards->Summarize(table));
  environment_.on_phase("training");
  TANDEM_ASSIGN_OR_RETURN(const StepReport report, Train(step, groups));
  is_recorded_ = false;
  if (report.peak_bytes > 0) has_evaluated_in_phase_ = false;
  if (moves_reference() && step % plan_.spec.loss().reference_sync().interval_steps() == 0)
    TANDEM_RETURN_IF_ERROR(SyncReference());

  std::uint64_t step_tokens = 0;
  for (const ScoredGroup& group : groups) {
    for (const Rollout& member : group.rollouts.members) {
      step_tokens += member.token_ids.size() + (member.prompt_ids.empty() ? group.prompt_ids : member.prompt_ids).size();
    }
  }
  state_.step = step;
  state_.weight_version = step + 1;
  state_.optimizer_steps = trained_.optimizer_steps;
  state_.prompt_cursor += drawn.num_prompts;
  state_.num_tokens += step_tokens;

  HistoryEvent event{.kind = HistoryEvent::Kind::kStep,
                     .step = step,
                     .values = StepValues(plan_, state_, prompts_->num_rows(), drawn, functions, report),
                     .times = {}};
  const double step_seconds = SecondsSince(begin);
  recent_step_seconds_.push_back(step_seconds);
  if (recent_step_seconds_.size() > kRecentSteps) recent_step_seconds_.erase(recent_step_seconds_.begin());
  const double pass_seconds = std::max(absl::ToDoubleSeconds(report.forward_time + report.backward_time), 1e-9);
  event.times = {
      {"step_time", step_seconds},
      {"rollout_seconds", drawn.rollout_seconds},
      {"publish_seconds", publish_seconds},
      {"reward_seconds", drawn.reward_seconds},
      {"train_seconds", SecondsSince(train_begin)},
      {"phase_wait_seconds", absl::ToDoubleSeconds(report.phase_wait)},
      {"score_seconds", absl::ToDoubleSeconds(report.score_time)},
      {"forward_seconds", absl::ToDoubleSeconds(report.forward_time)},
      {"backward_seconds", absl::ToDoubleSeconds(report.backward_time)},
      {"optimizer_seconds", absl::ToDoubleSeconds(report.optimizer_time)},
      {"rollout_tokens_per_second", static_cast<double>(drawn.completion_tokens) / std::max(drawn.rollout_seconds, 1e-9)},
      {"train_tokens_per_second", report.num_tokens / pass_seconds},
      {"train_flops_per_second", UsefulFlops(environment_.model, report.work) / pass_seconds},
      {"seconds_left", Mean(recent_step_seconds_) * static_cast<double>(num_steps() - step)}};
  TANDEM_RETURN_IF_ERROR(
      history_->WriteCompletions(step, CompletionRecords(step, *plan_.rewards, *environment_.tokenizer, groups, report)));
  TANDEM_RETURN_IF_ERROR(history_->Append(event));
  is_recorded_ = true;
  state_.history_bytes = history_->size_bytes();
  ExportHistory(event, job_, environment_.metrics);
  ExportStep(report);
  if (plan_.spec.rollout().has_dynamic_sampling()) {
    environment_.metrics->AddCounter(kGroupsReplacedTotal, {job_}, static_cast<double>(drawn.num_prompts - groups.size()));
  }
  ExportMemory(report.peak_bytes);
  TANDEM_LOG(kInfo, "job", "step job=", job_, " step=", step, " reward=", report.advantages.reward_mean, " loss=", report.loss,
             " grad_norm=", report.optimizer.grad_norm, " seconds=", step_seconds,
             " training_peak=", FormatBytes(report.peak_bytes));
  return absl::OkStatus();
}

bool TrainingLoop::is_evaluation_due() const {
  if (evaluation_prompts_ == nullptr || state_.evaluation.evaluated_step == state_.step) return false;
  const std::uint64_t interval = plan_.spec.evaluation().interval_steps();
  return state_.step == 0 || state_.step == num_steps() || (interval > 0 && state_.step % interval == 0);
}

bool TrainingLoop::is_finished() const {
  return state_.step == num_steps() || HasStoppedRising(plan_.spec.evaluation(), state_.evaluation);
}

absl::Status TrainingLoop::Evaluate() {
  const MonotonicTime begin = MonotonicTime::Now();
  has_evaluated_in_phase_ = true;
  environment_.on_phase("rollout");
  TANDEM_RETURN_IF_ERROR(EnsurePublished());
  const v1::EvaluationConfig& config = plan_.spec.evaluation();
  const std::size_t num_prompts = config.num_prompts();
  const std::uint32_t num_samples = config.samples_per_prompt();
  const v1::SamplingParams sampling = EvaluationSampling(plan_.spec);
  const auto pass_function =
      static_cast<std::size_t>(std::ranges::find(plan_.rewards->names(), config.pass_reward()) - plan_.rewards->names().begin());
  PassCounter passes(pass_function, config.pass_at_least());
  const std::uint64_t seed = DeriveSeed(plan_.spec.seed(), kEvaluationPart);
  std::vector<double> totals, lengths;
  std::size_t num_truncated = 0;
  RewardTable table;
  const std::size_t unit = std::max<std::size_t>(kEvaluationUnitCompletions / num_samples, 1);
  for (std::size_t first = 0; first < num_prompts; first += unit) {
    std::vector<Prompt> prompts;
    std::vector<std::uint64_t> seeds;
    for (std::size_t row = first; row < std::min(num_prompts, first + unit); ++row) {
      TANDEM_ASSIGN_OR_RETURN(Prompt prompt, evaluation_prompts_->Read(row));
      prompts.push_back(std::move(prompt));
      seeds.push_back(DeriveSeed(seed, row));
    }
    TANDEM_RETURN_IF_ERROR(CheckPrompts(prompts, *plan_.evaluation, sampling.max_tokens()));
    TANDEM_ASSIGN_OR_RETURN(const DrawnGroups groups, DrawGroups(prompts, num_samples, sampling, std::move(seeds)));
    for (std::size_t g = 0; g < groups.rollouts.size(); ++g) {
      const RewardTable& rewards = groups.rewards[g];
      for (const auto& row : rewards) {
        if (const auto total = WeightedReward(row, plan_.advantage.weights)) totals.push_back(*total);
      }
      for (const Rollout& rollout : groups.rollouts[g].members) {
        lengths.push_back(static_cast<double>(rollout.token_ids.size()));
        num_truncated += rollout.is_truncated() ? 1 : 0;
      }
      passes.Add(rewards);
      table.insert(table.end(), rewards.begin(), rewards.end());
    }
  }
  HistoryEvent event{.kind = HistoryEvent::Kind::kEvaluation, .step = state_.step, .values = {}, .times = {}};
  event.values.emplace_back("reward", Mean(totals));
  TANDEM_ASSIGN_OR_RETURN(const std::vector<RewardMetrics> functions, plan_.rewards->Summarize(table));
  for (const RewardMetrics& function : functions) event.values.emplace_back("rewards/" + function.name + "/mean", function.mean);
  for (const std::uint32_t k : config.pass_at()) {
    if (const auto mean = passes.Mean(k)) event.values.emplace_back(absl::StrCat("pass_at_", k), *mean);
  }
  AppendLengths("length", lengths, &event.values);
  event.values.emplace_back("completions/clipped_ratio",
                            static_cast<double>(num_truncated) / std::max(static_cast<double>(lengths.size()), 1.0));
  event.values.emplace_back("num_prompts", static_cast<double>(num_prompts));
  const auto measured = std::ranges::find(event.values, config.metric(), &std::pair<std::string, double>::first);
  EvaluationProgress progress = state_.evaluation;
  const bool is_best = RecordEvaluation(
      config, state_.step, measured == event.values.end() ? std::nullopt : std::optional(measured->second), &progress);
  if (progress.best_step.has_value()) {
    event.values.emplace_back("best_step", static_cast<double>(*progress.best_step));
    event.values.emplace_back("best/" + config.metric(), progress.best_value);
  }
  const bool stops = state_.step < num_steps() && HasStoppedRising(config, progress);
  if (stops) event.values.emplace_back("stops_job", 1);
  event.times = {{"evaluation_seconds", SecondsSince(begin)}};
  TANDEM_RETURN_IF_ERROR(history_->Append(event));
  state_.evaluation = progress;
  state_.history_bytes = history_->size_bytes();
  ExportHistory(event, job_, environment_.metrics);
  TANDEM_LOG(kInfo, "job", "evaluation job=", job_, " step=", state_.step, " reward=", Mean(totals), " is_best=", is_best);
  if (stops) {
    TANDEM_LOG(kInfo, "job", "ends early job=", job_, " step=", state_.step, " because=", config.metric(), " did not rise in ",
               state_.evaluation.evaluations_without_rise, " evaluations");
  }
  return is_best || stops ? WriteCheckpoint() : absl::OkStatus();
}

bool TrainingLoop::is_checkpoint_due() const {
  return state_.step % plan_.spec.checkpoint().interval_steps() == 0 || state_.step == num_steps();
}

absl::Status TrainingLoop::WriteCheckpoint() {
  if (!is_recorded_)
    return absl::FailedPreconditionError(absl::StrCat(
        "no checkpoint of step ", state_.step, ", whose figures could not be written: the job resumes from the one before"));
  TANDEM_RETURN_IF_ERROR(history_->Sync());
  TANDEM_RETURN_IF_ERROR(checkpoints_->Write(state_, job_text_, arrays(), plan_.spec.checkpoint().keep()));
  environment_.metrics->SetGauge(kCheckpointTimestampSeconds, {job_}, NowSeconds());
  return absl::OkStatus();
}

void TrainingLoop::KeepOnlyAdapter() {
  driver_.reset();
  client_.reset();
  scorer_.reset();
  plan_.rewards.reset();  // with its workers
  policy_.reset();
  for (StandingPiece* piece : {&masters_, &gradients_, &first_moments_, &second_moments_, &reference_}) piece->Free();
}

void TrainingLoop::ExportStep(const StepReport& report) {
  Metrics* const metrics = environment_.metrics;
  metrics->AddCounter(kStepsTotal, {job_}, 1);
  metrics->SetGauge(kStep, {job_}, static_cast<double>(state_.step));
  metrics->SetGauge(kStepTimestampSeconds, {job_}, NowSeconds());
  metrics->AddCounter(kGroupsDroppedTotal, {job_}, report.advantages.groups_dropped);
  const double pass_seconds = absl::ToDoubleSeconds(report.forward_time + report.backward_time);
  if (const auto peak = PeakFlopsPerSecond(environment_.device.device); peak.ok() && pass_seconds > 0)
    metrics->SetGauge(kFlopsUtilizationRatio, {job_}, UsefulFlops(environment_.model, report.work) / pass_seconds / *peak);
  const std::vector<double>& histogram = report.metrics.rollout_ratio_histogram;
  for (std::size_t i = 0; i < histogram.size(); ++i) {
    const std::string bound = i < std::size(kRolloutRatioBuckets) ? absl::StrCat(kRolloutRatioBuckets[i]) : "+Inf";
    metrics->AddCounter(kRolloutRatioTokensTotal, {job_, bound}, histogram[i]);
  }
}

void TrainingLoop::Use(const std::string& owner, std::uint64_t bytes) {
  std::uint64_t& peak = peak_bytes_[owner];
  peak = std::max(peak, bytes);
}

void TrainingLoop::ObserveGeneration() {
  const auto status = environment_.peer->GetStatus();
  if (!status.ok()) return;
  if (!has_evaluated_in_phase_) Use("kv_cache", status->kv_blocks_peak() * status->memory().kv_block_bytes());
  for (const v1::OwnedBytes& owned : status->memory().standing()) Use(owned.owner(), owned.bytes());
}

void TrainingLoop::ExportMemory(std::uint64_t training_peak_bytes) {
  const v1::MemoryPlan& plan = plan_.memory.figures;
  std::map<std::string, std::uint64_t> standing;
  for (const v1::OwnedBytes& owned : environment_.standing->Ledger()) standing[owned.owner()] += owned.bytes();
  for (const auto& [owner, bytes] : standing) Use(owner, bytes);
  Use(kTrainingOwner, training_peak_bytes);
  std::map<std::string, std::uint64_t> planned;
  for (const v1::PlannedBytes& owned : plan.owners()) {
    if (owned.place() != v1::MEMORY_PLACE_POOL) continue;
    // One arena holds both: its peak is told of the two together.
    planned[owned.owner() == "layer_inputs" ? kTrainingOwner : owned.owner()] +=
        std::max(owned.generation_bytes(), owned.training_bytes());
  }
  Metrics* const metrics = environment_.metrics;
  for (const auto& [owner, bytes] : planned) {
    const Metrics::LabelValues labels = {job_, owner};
    metrics->SetGauge(kPlanBytes, labels, static_cast<double>(bytes));
    const auto peak = peak_bytes_.find(owner);
    if (peak == peak_bytes_.end() || bytes == 0) continue;
    metrics->SetGauge(kPlanPeakBytes, labels, static_cast<double>(peak->second));
    metrics->SetGauge(kPlanUseRatio, labels, static_cast<double>(peak->second) / static_cast<double>(bytes));
  }
}

}  // namespace tandem
