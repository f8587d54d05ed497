#include "rollout_server/engine/engine.h"

#include <algorithm>
#include <utility>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/random.h"
#include "rollout_server/batch/step_batch_builder.h"
#include "rollout_server/cache/cache_key.h"

namespace tandem {
namespace {

constexpr std::size_t kMaxCommands = 1024;
constexpr int kMaxFailedSteps = 8;
constexpr absl::Duration kIdleWait = absl::Milliseconds(20);  // between looks at cancelled sinks and abandoned replies
constexpr absl::Duration kCommandDeadline = absl::Seconds(30);

Lane LaneOf(const BatchRequest& request) { return request.mode == v1::SCHEDULE_MODE_UNIT ? Lane::kUnit : Lane::kShared; }

absl::Status ShuttingDown() { return absl::UnavailableError("the rollout server is shutting down"); }

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(EngineOptions options, DecoderModel* model, Sampler* sampler,
                                                       std::shared_ptr<const Tokenizer> tokenizer, Metrics* metrics) {
  const auto refuse = [](const char* name, int value, const std::string& limit) {
    return absl::InvalidArgumentError(absl::StrCat("engine option ", name, ": ", value, " is not ", limit));
  };
  if (options.num_blocks < 1) return refuse("num_blocks", options.num_blocks, "at least 1: the elastic region holds no KV block");
  if (options.block_tokens < 1) return refuse("block_tokens", options.block_tokens, "at least 1");
  if (options.max_sequences < 1) return refuse("max_sequences", options.max_sequences, "at least 1");
  if (options.max_batch_tokens < options.max_sequences) {
    return refuse("max_batch_tokens", options.max_batch_tokens, absl::StrCat("at least max_sequences, ", options.max_sequences));
  }
  if (options.max_adapters < 1) return refuse("max_adapters", options.max_adapters, "at least 1");
  if (options.max_waiting_sequences < 1) return refuse("max_waiting_sequences", options.max_waiting_sequences, "at least 1");
  if (options.vocab_size < 1) return refuse("vocab_size", options.vocab_size, "at least 1");
  return std::unique_ptr<Engine>(new Engine(std::move(options), model, sampler, std::move(tokenizer), metrics));
}

Engine::Engine(EngineOptions options, DecoderModel* model, Sampler* sampler, std::shared_ptr<const Tokenizer> tokenizer,
               Metrics* metrics)
    : options_(std::move(options)),
      model_(model),
      sampler_(sampler),
      tokenizer_(std::move(tokenizer)),
      metrics_(metrics),
      commands_(kMaxCommands),
      allocator_(options_.num_blocks),
      scheduler_({.block_tokens = options_.block_tokens,
                  .max_batch_tokens = options_.max_batch_tokens,
                  .max_sequences = options_.max_sequences,
                  .max_adapters = options_.max_adapters},
                 &allocator_, [this](const Sequence& sequence) { return RootKeyOf(sequence); }),
      is_paused_(options_.is_paused),
      lease_epoch_(options_.lease_epoch) {
  PublishStatus();
  MutexLock lock(&stop_mutex_);
  thread_ = std::thread([this] { Loop(); });
}

Engine::~Engine() { Stop(); }

void Engine::Stop() {
  is_stopping_ = true;
  commands_.Close();
  MutexLock lock(&stop_mutex_);
  if (thread_.joinable()) thread_.join();
}

EngineStatus Engine::status() const {
  MutexLock lock(&mutex_);
  EngineStatus status = status_;
  status.queued_commands = commands_.size();
  return status;
}

absl::Status Engine::error() const {
  MutexLock lock(&mutex_);
  return error_;
}

absl::Status Engine::Send(std::function<void()> command) {
  if (commands_.TryPush(std::move(command))) return absl::OkStatus();
  if (is_stopping_) return ShuttingDown();
  return absl::ResourceExhaustedError(absl::StrCat("the engine's command queue is full: ", kMaxCommands));
}

absl::Status Engine::SendAndWait(const std::shared_ptr<Reply>& reply, MonotonicTime deadline, std::string_view what,
                                 std::function<void()> command) {
  TANDEM_RETURN_IF_ERROR(Send(std::move(command)));
  return reply->Wait(deadline, what);
}

absl::Status Engine::Submit(BatchRequest batch, std::shared_ptr<BatchSink> sink) {
  auto request = std::make_shared<BatchRequest>(std::move(batch));
  return Send(
      [this, request, sink = std::move(sink), arrived = MonotonicTime::Now()] { AddBatch(std::move(*request), sink, arrived); });
}

absl::Status Engine::Activate(Adapter adapter, bool drain, MonotonicTime deadline) {
  auto reply = std::make_shared<Reply>();
  const std::string what = absl::StrCat("activating version ", adapter.weight_version, " of job ", adapter.job);
  return SendAndWait(reply, deadline, what, [this, reply, adapter = std::move(adapter), drain] {
    absl::Status status = adapters_.Check(adapter);
    const bool must_drain = drain && scheduler_.num_started(&adapter.job) > 0;
    if (status.ok() && must_drain && is_paused_) {
      status = absl::FailedPreconditionError(
          absl::StrCat("job ", adapter.job,
                       ": sequences of the older version cannot end while the trainer holds the elastic memory; "
                       "publish without drain, or return the memory first"));
    }
    if (status.ok() && must_drain) {
      scheduler_.HoldJob(adapter.job, true);
      pending_activations_.push_back({.adapter = adapter, .reply = reply});
      return;
    }
    if (!reply->Claim()) return;
    if (status.ok()) status = ActivateNow(adapter);
    reply->Set(status);
  });
}

absl::Status Engine::Retire(const std::string& job, MonotonicTime deadline) {
  auto reply = std::make_shared<Reply>();
  return SendAndWait(reply, deadline, absl::StrCat("retiring the adapter of job ", job), [this, reply, job] {
    if (!reply->Claim()) return;
    reply->Set(RetireNow(job));
  });
}

absl::Status Engine::YieldElastic(v1::StreamMode mode, MonotonicTime deadline) {
  if (mode != v1::STREAM_MODE_DRAIN && mode != v1::STREAM_MODE_PAUSE) {
    return absl::InvalidArgumentError(absl::StrCat("mode: ", static_cast<int>(mode), " is not DRAIN (1) or PAUSE (2)"));
  }
  auto reply = std::make_shared<Reply>();
  return SendAndWait(reply, deadline, "yielding the elastic memory", [this, reply, mode] {
    pending_yields_.push_back({.mode = mode, .reply = reply});
    if (mode == v1::STREAM_MODE_DRAIN) scheduler_.HoldAll(true);
  });
}

absl::Status Engine::ReturnElastic(std::uint64_t lease_epoch) {
  auto reply = std::make_shared<Reply>();
  return SendAndWait(reply, MonotonicTime::Now() + kCommandDeadline, "taking the elastic memory back",
                     [this, reply, lease_epoch] {
                       if (!reply->Claim()) return;
                       lease_epoch_ = lease_epoch;
                       is_paused_ = false;
                       allocator_.ResetPeak();
                       reply->Set(absl::OkStatus());
                     });
}

absl::Status Engine::PeerLost() {
  const auto end_work = [this] {
    std::vector<std::uint64_t> units;
    for (const auto& [id, batch] : batches_) {
      if (LaneOf(batch.request) == Lane::kUnit) units.push_back(id);
    }
    for (std::uint64_t id : units) EndBatch(id, v1::FINISH_REASON_CANCELLED, absl::CancelledError("the trainer was lost"));
    while (!pending_activations_.empty()) DropActivations(std::string(pending_activations_.front().adapter.job));
    for (const std::string& job : adapters_.Jobs()) {
      if (const absl::Status status = RetireNow(job); !status.ok()) TANDEM_LOG(kError, "engine", status.ToString());
    }
  };
  // Whoever tells must not wait for a step; a full queue is emptied by the next.
  for (const MonotonicTime deadline = MonotonicTime::Now() + kCommandDeadline;; absl::SleepFor(absl::Milliseconds(10))) {
    const absl::Status status = Send(end_work);
    if (!absl::IsResourceExhausted(status) || MonotonicTime::Now() > deadline) return status;
  }
}

void Engine::Loop() {
  bool has_worked = true;
  while (!is_stopping_) {
    RunCommands(has_worked ? absl::ZeroDuration() : kIdleWait);
    EndCancelled();
    SettlePending();
    has_worked = !is_paused_ && Step();
    PublishStatus();
  }
  commands_.Close();  // before the last are run: none may come after them
  RunCommands(absl::ZeroDuration());
  for (Lane lane : {Lane::kUnit, Lane::kShared}) FinishStep(lane);
  while (!batches_.empty()) EndBatch(batches_.begin()->first, v1::FINISH_REASON_CANCELLED, ShuttingDown());
  for (const PendingActivation& pending : pending_activations_) pending.reply->Set(ShuttingDown());
  for (const PendingYield& pending : pending_yields_) pending.reply->Set(ShuttingDown());
  pending_activations_.clear();
  pending_yields_.clear();
  PublishStatus();
}

void Engine::RunCommands(absl::Duration wait) {
  // At most as many as stood in the queue: a flood of commands must not keep the steps away.
  std::size_t left = std::max<std::size_t>(commands_.size(), 1);
  while (left-- > 0) {
    std::optional<std::function<void()>> command = commands_.Pop(wait);
    if (!command.has_value()) return;
    (*command)();
    wait = absl::ZeroDuration();
  }
}

// Activations and yields whose sequences have ended by now.
void Engine::SettlePending() {
  for (auto pending = pending_activations_.begin(); pending != pending_activations_.end();) {
    const std::string job = pending->adapter.job;
    const bool is_abandoned = pending->reply->is_abandoned();
    if (!is_abandoned && scheduler_.num_started(&job) > 0) {
      ++pending;
      continue;
    }
    if (!is_abandoned && pending->reply->Claim()) {
      absl::Status status = adapters_.Check(pending->adapter);
      if (status.ok()) status = ActivateNow(std::move(pending->adapter));
      pending->reply->Set(status);
    }
    pending = pending_activations_.erase(pending);
    const bool is_still_held = std::any_of(pending_activations_.begin(), pending_activations_.end(),
                                           [&](const PendingActivation& other) { return other.adapter.job == job; });
    scheduler_.HoldJob(job, is_still_held);
  }
  for (auto pending = pending_yields_.begin(); pending != pending_yields_.end();) {
    const bool is_abandoned = pending->reply->is_abandoned();
    const bool is_ready = is_paused_ || pending->mode == v1::STREAM_MODE_PAUSE || scheduler_.num_started(nullptr) == 0;
    if (!is_abandoned && !is_ready) {
      ++pending;
      continue;
    }
    if (!is_abandoned && pending->reply->Claim()) {
      const absl::Status status = PauseNow();
      pending->reply->Set(status);
      // What the last steps drew, and the bookkeeping of what the cache held, touch no memory of the elastic range: the caller
      // need not wait for them.
      if (status.ok()) {
        for (Lane lane : {Lane::kUnit, Lane::kShared}) FinishStep(lane);
        scheduler_.PreemptAll();
      }
    }
    pending = pending_yields_.erase(pending);
    const bool is_still_draining = std::any_of(pending_yields_.begin(), pending_yields_.end(),
                                               [](const PendingYield& other) { return other.mode == v1::STREAM_MODE_DRAIN; });
    scheduler_.HoldAll(is_still_draining);
  }
}

absl::Status Engine::PauseNow() {
  TANDEM_RETURN_IF_ERROR(Fence("the elastic memory is yielded"));
  is_paused_ = true;
  PublishStatus();
  return absl::OkStatus();
}

// The last model call has returned, for this thread made it; this waits for what it left on the device.
absl::Status Engine::Fence(const char* before) {
  const absl::Status status = model_->Fence();
  if (status.ok()) return status;
  if (IsDeviceLost()) return absl::UnavailableError(absl::StrCat("the device's context is lost: ", status.message()));
  return Annotate(status, absl::StrCat("fence before ", before));
}

void Engine::GiveUp(const absl::Status& status) {
  MutexLock lock(&mutex_);
  if (error_.ok()) error_ = status;
}

// Asked after a failure. A lost context can do nothing any more: the daemon ends, and with it every stream, so that callers see
// UNAVAILABLE as after any other death, and ask the next daemon.
bool Engine::IsDeviceLost() {
  const absl::Status health = ContextHealth(options_.device);
  if (!health.ok()) GiveUp(Annotate(health, "device context"));
  is_device_lost_ = is_device_lost_ || !health.ok();
  return is_device_lost_;
}

bool Engine::Step() {
  if (is_device_lost_) return false;
  const Lane other = last_lane_ == Lane::kUnit ? Lane::kShared : Lane::kUnit;
  for (Lane lane : {other, last_lane_}) {
    if ((!scheduler_.HasSequences(lane) && !under_way_.contains(lane)) || !StepLane(lane)) continue;
    last_lane_ = lane;
    return true;
  }
  return false;
}

// Hands the lane's next step over and then finishes the one before, which is done while the next one runs. The order is the same
// whatever the other lane does, so that a unit's plans are its own.
bool Engine::StepLane(Lane lane) {
  metrics_.EndStage(nullptr);
  StepPlan plan = scheduler_.Schedule(lane);
  ReportAdmissions(plan);
  metrics_.CountPreemptions(static_cast<std::uint32_t>(plan.preempted.size()));
  if (plan.sequences.empty()) {
    const bool has_step = under_way_.contains(lane);
    FinishStep(lane);
    return has_step;
  }
  metrics_.EndStage("schedule");
  absl::StatusOr<StepUnderWay> next = StartStep(plan);
  metrics_.EndStage("model");
  FinishStep(lane);
  if (is_device_lost_) return true;
  if (!next.ok()) {
    FailStep(plan, next.status());
    return true;
  }
  const bool runs_ahead = options_.runs_ahead && !next->penalises;
  StepStarted(*std::move(next));
  if (!runs_ahead) FinishStep(lane);
  return true;
}

absl::StatusOr<Engine::StepUnderWay> Engine::StartStep(StepPlan plan) {
  StepUnderWay step;
  step.begin = MonotonicTime::Now();
  step.number = ++num_steps_;
  for (const BlockCopy& copy : plan.copies) TANDEM_RETURN_IF_ERROR(model_->CopyBlock(copy.from, copy.to));
  const StepBatch batch = BuildStepBatch(plan, scheduler_, options_.block_tokens, [&](const Sequence& sequence) {
    const Generation& generation = generations_.at(sequence.id);
    SequenceInputs inputs{.last_token_place = generation.last_token_place};
    const Adapter* adapter = adapters_.Find(generation.batch->request.job);
    if (adapter != nullptr) inputs.adapter = adapter->view();
    return inputs;
  });
  TANDEM_ASSIGN_OR_RETURN(const Logits logits, model_->Run(batch));
  const auto expected = static_cast<std::int64_t>(batch.logit_rows.size());
  if (logits.num_rows != expected || logits.vocab_size != options_.vocab_size) {
    return absl::InternalError(absl::StrCat("the model gave [", logits.num_rows, ", ", logits.vocab_size, "] logits, expected [",
                                            expected, ", ", options_.vocab_size, "]"));
  }
  std::vector<DrawInput> inputs;
  for (const PlannedSequence& planned : plan.sequences) {
    if (!planned.draws) continue;
    const Sequence& sequence = scheduler_.sequence(planned.id);
    const Generation& generation = generations_.at(planned.id);
    step.rows.push_back({.id = planned.id, .weight_version = VersionOf(generation.batch->request.job)});
    step.penalises = step.penalises || generation.group->sampling.penalises();
    inputs.push_back({.params = &generation.group->sampling,
                      .seed = generation.seed,
                      .position = static_cast<std::uint32_t>(sequence.completion.size()),
                      .prompt = *sequence.prompt,
                      .completion = sequence.completion});
  }
  TANDEM_ASSIGN_OR_RETURN(step.draw, sampler_->Start(logits, inputs));
  step.plan = std::move(plan);
  return step;
}

// From here on the step's tokens count, though nobody knows them.
void Engine::StepStarted(StepUnderWay step) {
  num_failed_in_a_row_ = 0;
  scheduler_.Computed(step.plan);
  for (std::size_t row = 0; row < step.rows.size(); ++row) {
    const auto generation = generations_.find(step.rows[row].id);
    if (generation == generations_.end()) continue;
    scheduler_.Append(generation->first, kUnknownToken);
    generation->second.last_token_place = step.draw.place(static_cast<std::int64_t>(row));
  }
  const Lane lane = step.plan.lane;
  under_way_.emplace(lane, std::move(step));
}

void Engine::ReportAdmissions(const StepPlan& plan) {
  for (const Admission& admission : plan.admissions) {
    metrics_.CountPrefixCache(admission.queried_tokens, admission.hit_tokens);
    const Generation& generation = generations_.at(admission.id);
    if (!generation.batch->is_prompt_reported[generation.member.group_index]) {
      generation.batch->is_prompt_reported[generation.member.group_index] = true;
      const auto prompt_tokens = static_cast<std::uint32_t>(generation.group->prompt->size());
      metrics_.CountPrompt(prompt_tokens);
      generation.batch->sink->OnPrompt(generation.member.group_index, prompt_tokens, admission.hit_tokens);
    }
  }
}

// Collects and delivers the tokens of the step that is under way in `lane`, if there is one.
void Engine::FinishStep(Lane lane) {
  const auto found = under_way_.find(lane);
  if (found == under_way_.end()) return;
  const StepUnderWay step = std::move(found->second);
  under_way_.erase(found);
  metrics_.EndStage(nullptr);
  const std::vector<absl::StatusOr<DrawnToken>> tokens = sampler_->Collect(step.draw);
  metrics_.EndStage("sample");
  const bool has_failed = std::any_of(tokens.begin(), tokens.end(), [](const auto& token) { return !token.ok(); });
  if (has_failed && IsDeviceLost()) return;
  std::uint32_t num_drawn = 0;
  for (std::size_t i = 0; i < step.rows.size(); ++i) {
    const SequenceId id = step.rows[i].id;
    const auto generation = generations_.find(id);
    if (generation == generations_.end()) continue;  // it ended after the step was handed over
    const absl::StatusOr<DrawnToken>& token = tokens[i];
    if (token.ok()) {
      FinishToken(step.rows[i], *token);
      ++num_drawn;
      continue;
    }
    metrics_.CountBadLogits();
    const std::string error = absl::StrCat(token.status().message(), ", engine step ", step.number);
    TANDEM_LOG(kError, "engine", "sequence=", id, " job=\"", generation->second.batch->request.job, "\" ended: ", error);
    EndSequence(id, v1::FINISH_REASON_ERROR, "", error);
  }
  metrics_.CountTokens(num_drawn);
  const MonotonicTime now = MonotonicTime::Now();
  metrics_.ObserveStep(lane == Lane::kUnit ? "unit" : "shared", now - std::max(step.begin, finished_), step.plan.num_tokens);
  finished_ = now;
  metrics_.EndStage("finish");
}

void Engine::FinishToken(const StepUnderWay::Row& row, const DrawnToken& token) {
  const SequenceId id = row.id;
  Generation& generation = generations_.at(id);
  generation.last_token_place = nullptr;
  const SamplingParams& sampling = generation.group->sampling;
  scheduler_.Resolve(id, token.id);
  const auto num_tokens = static_cast<std::uint32_t>(scheduler_.sequence(id).completion.size());
  const MonotonicTime now = MonotonicTime::Now();
  if (num_tokens == 1) {
    metrics_.ObserveFirstToken(now - generation.batch->arrived);
  } else {
    metrics_.ObserveNextToken(now - generation.last_token);
  }
  generation.last_token = now;

  const auto contains = [&](const std::vector<std::uint32_t>& ids) {
    return std::find(ids.begin(), ids.end(), token.id) != ids.end();
  };
  bool is_stopped = (!sampling.ignore_end_tokens && contains(options_.end_token_ids)) || contains(sampling.stop_token_ids);
  bool is_text_cut = false;
  std::string text;
  if (!is_stopped && generation.text.has_value()) {
    CompletionText::Step step = generation.text->Push(token.id);
    text = std::move(step.text);
    is_text_cut = is_stopped = step.is_stopped;
  }
  const bool returns_text = generation.batch->request.return_text;
  generation.batch->sink->OnToken(generation.member, token, row.weight_version, returns_text ? std::move(text) : std::string());
  if (!is_stopped && num_tokens < sampling.max_tokens) return;
  std::string rest = returns_text && !is_text_cut ? generation.text->Finish() : std::string();
  EndSequence(id, is_stopped ? v1::FINISH_REASON_STOP : v1::FINISH_REASON_LENGTH, std::move(rest), "");
}

// The sequences that have not ended in the step before it.
void Engine::FailStep(const StepPlan& plan, const absl::Status& status) {
  TANDEM_LOG(kError, "engine", "step=", num_steps_, " sequences=", plan.sequences.size(), " failed: ", status.ToString());
  if (IsDeviceLost()) return;
  // Numbers out of range are the fault of weights or adapters that these sequences chose.
  if (!absl::IsOutOfRange(status) && ++num_failed_in_a_row_ >= kMaxFailedSteps) {
    GiveUp(Annotate(status, absl::StrCat(kMaxFailedSteps, " steps in a row failed")));
  }
  for (const PlannedSequence& planned : plan.sequences) {
    if (!generations_.contains(planned.id)) continue;
    EndSequence(planned.id, v1::FINISH_REASON_ERROR, "", absl::StrCat("engine step ", num_steps_, ": ", status.message()));
  }
}

// A token that is being drawn counts in the completion already.
std::uint32_t Engine::NumDelivered(SequenceId id) const {
  const bool is_drawing = generations_.at(id).last_token_place != nullptr;
  return static_cast<std::uint32_t>(scheduler_.sequence(id).completion.size()) - (is_drawing ? 1 : 0);
}

void Engine::EndSequence(SequenceId id, v1::FinishReason reason, std::string text, const std::string& error) {
  const std::uint32_t num_tokens = NumDelivered(id);
  const Generation generation = std::move(generations_.at(id));
  generations_.erase(id);
  scheduler_.End(id);
  metrics_.CountFinished(reason);
  Batch* batch = generation.batch;
  batch->sink->OnFinished(generation.member, reason, num_tokens, std::move(text), error);
  batch->live.erase(id);
  if (!batch->live.empty()) return;
  const std::shared_ptr<BatchSink> sink = batch->sink;
  batches_.erase(batch->id);
  sink->OnEnd(absl::OkStatus());
}

void Engine::AddBatch(BatchRequest request, const std::shared_ptr<BatchSink>& sink, MonotonicTime arrived) {
  if (is_stopping_) return sink->OnEnd(ShuttingDown());
  if (absl::Status status = adapters_.CheckVersion(request.job, request.weight_version); !status.ok()) {
    return sink->OnEnd(std::move(status));
  }
  std::uint64_t num_sequences = 0;
  for (const GroupRequest& group : request.groups) num_sequences += group.group_size;
  const int num_waiting = scheduler_.num_waiting();
  if (num_sequences + num_waiting > static_cast<std::uint64_t>(options_.max_waiting_sequences)) {
    return sink->OnEnd(
        absl::ResourceExhaustedError(absl::StrCat("waiting queue: ", num_sequences, " sequences do not fit beside ", num_waiting,
                                                  "; it holds ", options_.max_waiting_sequences)));
  }
  const std::uint64_t id = next_batch_id_++;
  Batch& batch = batches_[id];
  batch.id = id;
  batch.request = std::move(request);
  batch.sink = sink;
  batch.is_prompt_reported.resize(batch.request.groups.size());
  batch.arrived = arrived;
  AddSequences(&batch);
  TANDEM_LOG(kDebug, "engine", "batch=", id, " job=\"", batch.request.job, "\" groups=", batch.request.groups.size(),
             " sequences=", num_sequences);
}

void Engine::AddSequences(Batch* batch) {
  for (const GroupRequest& group : batch->request.groups) {
    const SequenceId first_id = scheduler_.AddGroup({.lane = LaneOf(batch->request),
                                                     .unit_id = batch->id,
                                                     .job = batch->request.job,
                                                     .prompt = group.prompt,
                                                     .group_size = group.group_size,
                                                     .max_tokens = group.sampling.max_tokens});
    for (std::uint32_t member = 0; member < group.group_size; ++member) {
      Generation generation;
      generation.batch = batch;
      generation.group = &group;
      generation.member = {.group_index = group.group_index, .member_index = member};
      generation.seed = DeriveSeed(group.sampling.seed, member);
      if (batch->request.return_text || !group.sampling.stop_strings.empty()) {
        generation.text.emplace(tokenizer_, group.sampling.stop_strings);
      }
      generations_.emplace(first_id + member, std::move(generation));
      batch->live.insert(first_id + member);
    }
  }
}

void Engine::EndBatch(std::uint64_t batch_id, v1::FinishReason reason, const absl::Status& status) {
  Batch& batch = batches_.at(batch_id);
  for (SequenceId id : batch.live) {
    const Generation& generation = generations_.at(id);
    batch.sink->OnFinished(generation.member, reason, NumDelivered(id), "",
                           reason == v1::FINISH_REASON_ERROR ? std::string(status.message()) : std::string());
    metrics_.CountFinished(reason);
    generations_.erase(id);
    scheduler_.End(id);
  }
  const std::shared_ptr<BatchSink> sink = batch.sink;
  batches_.erase(batch_id);
  sink->OnEnd(status);
}

void Engine::EndCancelled() {
  std::vector<std::uint64_t> cancelled;
  for (const auto& [id, batch] : batches_) {
    if (batch.sink->is_cancelled()) cancelled.push_back(id);
  }
  for (std::uint64_t id : cancelled) EndBatch(id, v1::FINISH_REASON_CANCELLED, absl::CancelledError("cancelled by the caller"));
}

// A step under way may read the slot that becomes the idle one: whoever asked may write there when he is answered.
absl::Status Engine::ActivateNow(Adapter adapter) {
  TANDEM_RETURN_IF_ERROR(Fence("an adapter is activated"));
  const std::string job = adapter.job;
  TANDEM_LOG(kInfo, "engine", "activated job=\"", job, "\" weight_version=", adapter.weight_version,
             " rank=", adapter.layout->rank);
  metrics_.SetVersion(job, adapter.weight_version);
  adapters_.Activate(std::move(adapter));
  scheduler_.WeightsChanged(job);
  return absl::OkStatus();
}

// None may be activated any more: its memory is about to be another's.
void Engine::DropActivations(const std::string& job) {
  std::erase_if(pending_activations_, [&](const PendingActivation& pending) {
    if (pending.adapter.job != job) return false;
    if (pending.reply->Claim()) pending.reply->Set(absl::AbortedError(absl::StrCat("the adapter of job ", job, " was retired")));
    return true;
  });
  scheduler_.HoldJob(job, false);
}

absl::Status Engine::RetireNow(const std::string& job) {
  DropActivations(job);
  if (adapters_.Find(job) == nullptr) return absl::OkStatus();
  TANDEM_RETURN_IF_ERROR(Fence("an adapter is retired"));
  std::vector<std::uint64_t> ended;
  for (const auto& [id, batch] : batches_) {
    if (batch.request.job == job) ended.push_back(id);
  }
  for (std::uint64_t id : ended) {
    EndBatch(id, v1::FINISH_REASON_ERROR,
             absl::FailedPreconditionError(absl::StrCat("the adapter of job ", job, " was retired")));
  }
  adapters_.Retire(job);
  metrics_.ForgetJob(job);
  TANDEM_LOG(kInfo, "engine", "retired job=\"", job, "\"");
  return absl::OkStatus();
}

std::uint64_t Engine::VersionOf(const std::string& job) const {
  const Adapter* adapter = adapters_.Find(job);
  return adapter == nullptr ? 0 : adapter->weight_version;
}

std::string Engine::RootKeyOf(const Sequence& sequence) const {
  const Generation& generation = generations_.at(sequence.id);
  const Adapter* adapter = adapters_.Find(generation.batch->request.job);
  return RootKey({.model_digest = options_.model_digest,
                  .job = generation.batch->request.job,
                  .activation_id = adapter == nullptr ? 0 : adapter->activation_id,
                  .weight_version = adapter == nullptr ? 0 : adapter->weight_version,
                  .lease_epoch = lease_epoch_,
                  .prompt_kind = generation.group->prompt_kind});
}

void Engine::PublishStatus() {
  const EngineStatus status = {.is_paused = is_paused_,
                               .running_sequences = scheduler_.num_running(),
                               .waiting_sequences = scheduler_.num_waiting(),
                               .kv_blocks_total = allocator_.num_blocks(),
                               .kv_blocks_used = allocator_.num_blocks() - allocator_.num_free(),
                               .kv_blocks_peak = allocator_.peak_used()};
  metrics_.SetLoad({.running = status.running_sequences,
                    .waiting = status.waiting_sequences,
                    .max_waiting = options_.max_waiting_sequences,
                    .kv_blocks_used = status.kv_blocks_used,
                    .kv_blocks = status.kv_blocks_total,
                    .kv_block_bytes = options_.block_bytes,
                    .captured_steps = model_->captured_steps(),
                    .is_paused = status.is_paused,
                    .queued_commands = commands_.size()});
  MutexLock lock(&mutex_);
  status_ = status;
}

}  // namespace tandem
