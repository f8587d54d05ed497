#include "trainer_server/job/job_runner.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "absl/time/clock.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/rpc/job_state.h"
#include "common/rpc/node_watch.h"
#include "trainer_server/job/job_metrics.h"

namespace tandem {

JobRunner::JobRunner(JobStore* store, LoopEnvironment environment, Options options)
    : store_(store), environment_(std::move(environment)), options_(std::move(options)) {
  environment_.on_phase = [this](const std::string& phase) { Changed(running_job(), phase); };
  environment_.directory_of = [this](const std::string& job) { return DirectoryOf(job); };
}

JobRunner::~JobRunner() { Stop(); }

void JobRunner::Start() {
  ExportState();
  ExportQueue();
  thread_ = std::thread([this] {
    try {
      Run();
    } catch (const std::exception& error) {
      TANDEM_LOG(kError, "job", "the runner ends because=", error.what());
      MutexLock lock(&mutex_);
      background_error_ = absl::InternalError(absl::StrCat("job runner: ", error.what()));
    }
  });
}

void JobRunner::Stop() {
  {
    MutexLock lock(&mutex_);
    is_stopping_ = true;
    changed_.SignalAll();
  }
  environment_.peer->Interrupt();
  if (thread_.joinable()) thread_.join();
}

void JobRunner::Notify() {
  ExportQueue();
  {
    MutexLock lock(&request_mutex_);
    JobRequest request = JobRequest::kNone;
    if (const std::string running = running_job(); !running.empty()) {
      const auto job = store_->Get(running);
      if (job.ok()) request = job->request;
    }
    environment_.peer->SetImpatient(request != JobRequest::kNone);
    environment_.peer->SetCancelled(request == JobRequest::kCancel);
  }
  MutexLock lock(&mutex_);
  is_notified_ = true;
  ++change_;
  changed_.SignalAll();
}

void JobRunner::OnPeerAttached() {
  MutexLock lock(&mutex_);
  is_reactivation_due_ = true;
  is_notified_ = true;
  changed_.SignalAll();
}

std::uint64_t JobRunner::WaitForChange(std::uint64_t seen, absl::Duration timeout) {
  const MonotonicTime deadline = MonotonicTime::Now() + timeout;
  MutexLock lock(&mutex_);
  while (change_ <= seen && !is_stopping_) {
    const absl::Duration left = deadline - MonotonicTime::Now();
    if (left <= absl::ZeroDuration()) break;
    changed_.WaitFor(&mutex_, left);
  }
  return change_;
}

absl::StatusOr<v1::JobStatus> JobRunner::StatusOf(const std::string& job) const {
  TANDEM_ASSIGN_OR_RETURN(const StoredJob stored, store_->Get(job));
  return StatusOf(stored);
}

v1::JobStatus JobRunner::StatusOf(const StoredJob& job) const {
  v1::JobStatus status = job.status;
  std::string running, held_by;
  {
    MutexLock lock(&mutex_);
    running = running_job_;
    held_by = held_by_;
  }
  const std::string peer = environment_.peer->waiting_for();
  const bool is_next = status.state() == v1::JOB_STATE_RUNNING || status.queue_position() == 1;
  if (running.empty() && is_next && !held_by.empty()) status.set_waiting_for(peer.empty() ? held_by : peer);
  if (running != status.job()) return status;
  status.set_waiting_for(peer);
  if (job.request == JobRequest::kCancel) status.set_waiting_for("its cancellation");
  if (status.waiting_for().empty() && job.request == JobRequest::kPause)
    status.set_waiting_for("the end of its step, to be paused");
  return status;
}

std::string JobRunner::running_job() const {
  MutexLock lock(&mutex_);
  return running_job_;
}
bool JobRunner::is_stopping() const {
  MutexLock lock(&mutex_);
  return is_stopping_;
}
std::string JobRunner::phase() const {
  MutexLock lock(&mutex_);
  return phase_;
}
absl::Status JobRunner::background_error() const {
  MutexLock lock(&mutex_);
  return background_error_;
}

void JobRunner::Changed(const std::string& running_job, const std::string& phase) {
  {
    MutexLock lock(&mutex_);
    running_job_ = running_job;
    if (!running_job.empty()) held_by_.clear();
    phase_ = phase;
    ++change_;
    changed_.SignalAll();
  }
  ExportState();
}

std::vector<v1::OwnedBytes> JobRunner::Ledger() const {
  std::vector<v1::OwnedBytes> ledger;
  for (v1::OwnedBytes& entry : environment_.member->RegionLedger()) {
    if (entry.owner() != "trainer_standing") ledger.push_back(std::move(entry));
  }
  for (v1::OwnedBytes& entry : environment_.standing->Ledger()) ledger.push_back(std::move(entry));
  return ledger;
}

void JobRunner::ExportState() const {
  ExportMemory(*environment_.member, v1::ROLE_TRAINER, environment_.standing->Ledger(), environment_.metrics);
  const std::string now = phase();
  for (const char* phase : {"rollout", "training", "idle"}) {
    environment_.metrics->SetGauge(kPhase, {phase}, now == phase ? 1 : 0);
  }
}

void JobRunner::ExportQueue() const {
  const QueueDepth depth = store_->depth();
  const std::pair<const char*, int> states[] = {
      {"ready", depth.ready}, {"blocked", depth.blocked}, {"running", depth.running}, {"paused", depth.paused}};
  for (const auto& [state, count] : states) environment_.metrics->SetGauge(kQueueJobs, {state}, count);
}

void JobRunner::ForgetEndedJobs() {
  while (!ended_jobs_.empty() && MonotonicTime::Now() - ended_jobs_.front().second >= options_.ended_job_served) {
    environment_.metrics->RemoveLabel("job", ended_jobs_.front().first);
    ended_jobs_.pop_front();
  }
}

void JobRunner::Run() {
  while (true) {
    bool is_reactivation_due = false;
    {
      MutexLock lock(&mutex_);
      if (is_stopping_) return;
      is_notified_ = false;
      is_reactivation_due = std::exchange(is_reactivation_due_, false);
    }
    if (is_reactivation_due && resident_ != nullptr) {
      if (const absl::Status status = resident_->Reactivate(); !status.ok()) {
        reactivations_.Warn(absl::StrCat("adapter of job=", resident_->job(), " not served because=", status.message()));
        MutexLock lock(&mutex_);
        is_reactivation_due_ = true;
      } else {
        reactivations_.Forget();
      }
    }
    ForgetEndedJobs();
    if (const absl::Status given_back = GiveBackElastic(); !given_back.ok()) {
      Hold(given_back);
      continue;
    }
    const absl::Status status = RunNext();
    if (absl::IsResourceExhausted(status)) {
      SetHeldBy("room for the job store");
      Hold(status);
      continue;
    }
    if (!status.ok()) {
      TANDEM_LOG(kError, "job", "job store because=", std::string(status.message()));
      MutexLock lock(&mutex_);
      background_error_ = status;
      return;
    }
    holds_.Forget();
    SetHeldBy("");
    MutexLock lock(&mutex_);
    if (!is_stopping_ && !is_notified_) changed_.WaitFor(&mutex_, options_.idle_poll);
  }
}

void JobRunner::Hold(const absl::Status& why) {
  holds_.Warn(absl::StrCat("no job runs because=", why.message()));
  environment_.peer->Pause(options_.idle_poll).IgnoreError();  // cut short by Stop alone
}

void JobRunner::SetHeldBy(const std::string& what) {
  MutexLock lock(&mutex_);
  if (what == held_by_) return;
  held_by_ = what;
  ++change_;
  changed_.SignalAll();
}

// A step that is broken off does not wait for a rollout server that does not answer, so it may have left this to be done.
absl::Status JobRunner::GiveBackElastic() {
  if (!environment_.member->holds_elastic()) return absl::OkStatus();
  SetHeldBy("the elastic region to be given back");
  return ElasticPhase(environment_.peer, {.member = environment_.member, .enter_arena = nullptr}).Leave();
}

absl::Status JobRunner::RunNext() {
  TANDEM_ASSIGN_OR_RETURN(const std::optional<StoredJob> job, store_->Next());
  if (!job.has_value()) return absl::OkStatus();
  const std::string& name = job->status.job();
  const absl::Status started = store_->Transition(name, v1::JOB_STATE_RUNNING, "");
  if (absl::IsFailedPrecondition(started)) return absl::OkStatus();  // cancelled or paused in between
  TANDEM_RETURN_IF_ERROR(started);
  if (job->status.state() == v1::JOB_STATE_QUEUED && job->ready_at != absl::InfinitePast()) {
    const double waited = std::max(absl::ToDoubleSeconds(absl::Now() - job->ready_at), 0.0);
    environment_.metrics->Observe(kQueueWaitSeconds, {}, waited);
  }
  charged_ = MonotonicTime::Now();
  Changed(name, "idle");
  Notify();
  RunJob(*job);
  Changed("", "idle");
  // The next job may wait already.
  Notify();
  return absl::OkStatus();
}

void JobRunner::RunJob(const StoredJob& job) {
  const std::string& name = job.status.job();
  std::erase_if(ended_jobs_, [&](const auto& ended) { return ended.first == name; });  // it was paused
  environment_.metrics->SetGauge(kJobRunning, {name}, 1);
  environment_.metrics->SetGauge(kNumSteps, {name}, job.status.num_steps());
  environment_.metrics->SetGauge(kStep, {name}, job.status.step());
  environment_.metrics->SetGauge(kStepTimestampSeconds, {name}, absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()));
  absl::StatusOr<std::unique_ptr<TrainingLoop>> loop = Begin(job);
  const absl::Status result = loop.ok() ? WalkThrough(loop->get()) : loop.status();
  EndJob(name, result, loop.ok() ? loop->get() : nullptr);
  // Its last values, an evaluation's among them, are served for a while.
  environment_.metrics->SetGauge(kJobRunning, {name}, 0);
  ended_jobs_.emplace_back(name, MonotonicTime::Now());
  if (loop.ok() && (*loop)->has_published()) {
    (*loop)->KeepOnlyAdapter();
    resident_ = *std::move(loop);
  }
}

absl::StatusOr<std::unique_ptr<TrainingLoop>> JobRunner::Begin(const StoredJob& job) {
  const std::string& name = job.status.job();
  TANDEM_RETURN_IF_ERROR(ClearStandingRegion(name));
  const JobSurroundings surroundings{environment_.model, environment_.encoder, environment_.content, environment_.node_memory,
                                     environment_.sandbox};
  TANDEM_ASSIGN_OR_RETURN(JobPlan plan, PlanJob(job.job_text, surroundings, JobOrigin::kStored));
  // A job is not refused for what is only assumed of the rollout server.
  NodeMemory node = environment_.node_memory();
  if (node.is_rollout_assumed) {
    TANDEM_RETURN_IF_ERROR(environment_.peer->WaitUntilServing());
    node = environment_.node_memory();
  }
  TANDEM_RETURN_IF_ERROR(MeasureMemory(surroundings, node, &plan));
  TANDEM_RETURN_IF_ERROR(CheckMemory(plan.memory));
  TANDEM_ASSIGN_OR_RETURN(auto loop, TrainingLoop::Create(environment_, name, job.job_text, std::move(plan), DirectoryOf(name)));
  TANDEM_RETURN_IF_ERROR(store_->SetStep(name, static_cast<std::uint32_t>(loop->step())));
  return loop;
}

// The rollout server may read the slots of the job before, even one that a life before this one started: nothing in the region
// may be overwritten until it has let go.
absl::Status JobRunner::ClearStandingRegion(const std::string& next_job) {
  TANDEM_ASSIGN_OR_RETURN(const std::string before, store_->resident());
  while (!before.empty()) {
    const absl::Status retired = RetireAdapter(environment_.peer, before, absl::Seconds(30));
    if (retired.ok()) break;
    if (!absl::IsUnavailable(retired) && !absl::IsDeadlineExceeded(retired)) return retired;
    TANDEM_RETURN_IF_ERROR(environment_.peer->Pause(absl::Milliseconds(50)));
    TANDEM_RETURN_IF_ERROR(environment_.peer->WaitUntilServing());
  }
  resident_.reset();
  return store_->SetResident(next_job);
}

absl::Status JobRunner::Charge(const std::string& job) {
  const MonotonicTime now = MonotonicTime::Now();
  return store_->Charge(job, now - std::exchange(charged_, now));
}

absl::Status JobRunner::WalkThrough(TrainingLoop* loop) {
  const std::string& name = loop->job();
  while (true) {
    TANDEM_ASSIGN_OR_RETURN(const StoredJob job, store_->Get(name));
    if (job.request != JobRequest::kNone) return absl::CancelledError("asked to stop");
    if (loop->is_evaluation_due()) {
      TANDEM_RETURN_IF_ERROR(loop->Evaluate());
      TANDEM_RETURN_IF_ERROR(Charge(name));
      Changed(name, "rollout");
      continue;
    }
    if (loop->is_finished()) return absl::OkStatus();
    ForgetEndedJobs();
    TANDEM_RETURN_IF_ERROR(loop->RunStep());
    if (loop->is_checkpoint_due()) TANDEM_RETURN_IF_ERROR(loop->WriteCheckpoint());
    TANDEM_RETURN_IF_ERROR(store_->SetStep(name, static_cast<std::uint32_t>(loop->step())));
    TANDEM_RETURN_IF_ERROR(Charge(name));
    Changed(name, "rollout");
  }
}

void JobRunner::EndJob(const std::string& job, const absl::Status& result, TrainingLoop* loop) {
  if (const absl::Status charged = Charge(job); !charged.ok())
    TANDEM_LOG(kError, "job", "device time not stored job=", job, " because=", std::string(charged.message()));
  const absl::StatusOr<StoredJob> stored = store_->Get(job);
  const JobRequest request = stored.ok() ? stored->request : JobRequest::kNone;
  v1::JobState state = v1::JOB_STATE_FAILED;
  std::string error(result.message());
  if (result.ok()) {
    state = v1::JOB_STATE_SUCCEEDED;
  } else if (is_stopping()) {
    // Whichever build comes next goes on from this step.
    const absl::Status written = loop != nullptr ? loop->WriteCheckpoint() : absl::OkStatus();
    if (!written.ok())
      TANDEM_LOG(kError, "job", "no checkpoint at the stop job=", job, " because=", std::string(written.message()));
    TANDEM_LOG(kInfo, "job", "left running job=", job, " step=", loop != nullptr ? absl::StrCat(loop->step()) : "-");
    return;
  } else if (!ContextHealth(environment_.device.device).ok()) {
    // The daemon ends; the next one takes the job up from its checkpoint.
    TANDEM_LOG(kError, "job", "left running job=", job, " because the device's context is lost: ", error);
    environment_.peer->Pause(absl::Seconds(5)).IgnoreError();
    return;
  } else if (request == JobRequest::kCancel) {
    // Whatever the step that was broken off says.
    if (!absl::IsCancelled(result)) TANDEM_LOG(kInfo, "job", "cancelled job=", job, " which had ended with: ", error);
    state = v1::JOB_STATE_CANCELLED;
    error.clear();
  } else if (absl::IsCancelled(result) && request == JobRequest::kPause) {
    state = v1::JOB_STATE_PAUSED;
    error.clear();
  } else if (absl::IsCancelled(result) && request == JobRequest::kNone) {
    return;  // the request was taken back meanwhile: still RUNNING, so it is taken up again at once
  } else if (absl::IsDeadlineExceeded(result) || absl::IsUnavailable(result)) {
    state = v1::JOB_STATE_PAUSED;  // the rollout server stayed away; the job can go on when it is back
  }
  // What may be resumed on another day loses no step.
  if ((state == v1::JOB_STATE_PAUSED || absl::IsResourceExhausted(result)) && loop != nullptr) {
    if (const absl::Status written = loop->WriteCheckpoint(); !written.ok()) {
      if (written.message() != error)  // else it was the checkpoint that failed
        error = absl::StrCat(state == v1::JOB_STATE_PAUSED ? "pausing" : error, ": ", written.message());
      state = v1::JOB_STATE_FAILED;
    }
  }
  TANDEM_LOG(kInfo, "job", "ended job=", job, " state=", StateWord(state), " error=", error.empty() ? "-" : error);
  const absl::Status moved = store_->Transition(job, state, error);
  if (!moved.ok()) TANDEM_LOG(kError, "job", "state not stored job=", job, " because=", std::string(moved.message()));
}

}  // namespace tandem
