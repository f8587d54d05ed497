#include "trainer_server/service/job_service.h"

#include <algorithm>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/units.h"
#include "common/gpu/device.h"
#include "common/rpc/channel.h"
#include "common/rpc/job_state.h"
#include "google/protobuf/text_format.h"
#include "trainer_server/checkpoint/checkpoint_store.h"
#include "trainer_server/job/adapter_files.h"
#include "trainer_server/job/history.h"

namespace tandem {
namespace {

constexpr std::size_t kPieceBytes = kMiB;
constexpr std::uint32_t kMaxPageSize = 100;
constexpr std::size_t kMaxListedStates = 6;  // each once

bool IsSame(const v1::JobStatus& a, const v1::JobStatus& b) { return a.SerializeAsString() == b.SerializeAsString(); }

void Add(const std::string& name, double value, google::protobuf::RepeatedPtrField<v1::NamedValue>* values) {
  v1::NamedValue* const added = values->Add();
  added->set_name(name);
  added->set_value(value);
}

v1::WatchResponse ToResponse(const HistoryEvent& event) {
  v1::WatchResponse response;
  if (event.kind == HistoryEvent::Kind::kData) {
    *response.mutable_data() = DataCountsOf(event.values);
    return response;
  }
  if (event.kind == HistoryEvent::Kind::kStep) {
    v1::StepMetrics* const step = response.mutable_step();
    step->set_step(static_cast<std::uint32_t>(event.step));
    for (const NamedValues* values : {&event.values, &event.times}) {
      for (const auto& [name, value] : *values) {
        if (name == "seconds_left") {
          step->set_seconds_left(value);
        } else {
          Add(name, value, step->mutable_values());
        }
      }
    }
    return response;
  }
  v1::EvaluationMetrics* const evaluation = response.mutable_evaluation();
  evaluation->set_step(static_cast<std::uint32_t>(event.step));
  const std::string prefix = "rewards/", suffix = "/mean", best = "best/";
  for (const auto& [name, value] : event.values) {
    if (name == "reward") {
      evaluation->set_reward(value);
    } else if (name == "num_prompts") {
      evaluation->set_num_prompts(CountOf<std::uint32_t>(value));
    } else if (name.size() > prefix.size() + suffix.size() && name.rfind(prefix, 0) == 0) {
      Add(name.substr(prefix.size(), name.size() - prefix.size() - suffix.size()), value, evaluation->mutable_rewards());
    } else if (name == "best_step") {
      evaluation->set_best_step(CountOf<std::uint32_t>(value));
    } else if (name.rfind(best, 0) == 0) {
      evaluation->set_metric(name.substr(best.size()));
      evaluation->set_best_value(value);
    } else if (name == "stops_job") {
      evaluation->set_stops_job(true);
    } else {
      Add(name, value, evaluation->mutable_values());
    }
  }
  return response;
}

std::optional<double> ValueOf(const v1::CompletionsRequest& request, const v1::CompletionRecord& record) {
  if (request.function().empty()) return record.reward();
  const auto found = std::ranges::find(record.rewards(), request.function(), &v1::NamedValue::name);
  return found == record.rewards().end() ? std::nullopt : std::optional(found->value());
}

bool Passes(const v1::CompletionsRequest& request, const v1::CompletionRecord& record) {
  const std::optional<double> value = ValueOf(request, record);
  return value.has_value() && (!request.has_min_reward() || *value >= request.min_reward()) &&
         (!request.has_max_reward() || *value <= request.max_reward()) && record.completion_tokens() >= request.min_tokens() &&
         (request.max_tokens() == 0 || record.completion_tokens() <= request.max_tokens()) &&
         (request.finish_reason() == v1::FINISH_REASON_UNSPECIFIED || request.finish_reason() == record.finish_reason()) &&
         (!request.has_group_index() || request.group_index() == record.group_index());
}

absl::Status CheckFilters(const v1::CompletionsRequest& request, const std::string& job_text) {
  if (request.last_step() != 0 && request.last_step() < request.step()) {
    return absl::InvalidArgumentError(
        absl::StrCat("last_step: ", request.last_step(), "; must be at least step, ", request.step()));
  }
  if (request.function().empty()) return absl::OkStatus();
  v1::JobSpec spec;
  if (!google::protobuf::TextFormat::ParseFromString(job_text, &spec))
    return absl::InternalError("the stored job cannot be read");
  std::vector<std::string> names;
  for (const v1::RewardConfig& reward : spec.rewards()) names.push_back(reward.name());
  if (std::ranges::find(names, request.function()) != names.end()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("function: '", request.function(), "'; must be one of the job's rewards: ", absl::StrJoin(names, ", ")));
}

void AddWarnings(const JobPlan& plan, google::protobuf::RepeatedPtrField<std::string>* warnings) {
  for (const auto* lines : {&plan.warnings, &plan.memory.warnings}) warnings->Add(lines->begin(), lines->end());
}

}  // namespace

class JobService::StreamPlace {
 public:
  // `what`: the plural of what has the places.
  StreamPlace(std::atomic<int>* count, int limit, std::string_view what)
      : count_(count), limit_(limit), what_(what), is_granted_(count->fetch_add(1) < limit) {}
  ~StreamPlace() { count_->fetch_sub(1); }
  StreamPlace(const StreamPlace&) = delete;
  StreamPlace& operator=(const StreamPlace&) = delete;
  grpc::Status status() const {
    if (is_granted_) return grpc::Status::OK;
    return ToGrpc(absl::ResourceExhaustedError(absl::StrCat("trainer_server serves ", limit_, " ", ToAbsl(what_), " at a time")));
  }

 private:
  std::atomic<int>* const count_;
  const int limit_;
  const std::string_view what_;
  const bool is_granted_;
};

class JobService::PlanTurn {
 public:
  PlanTurn(JobService* service, const grpc::ServerContext& context)
      : service_(service), place_(&service->num_planners_, kMaxStreams, "calls that submit or plan"), status_(place_.status()) {
    if (!status_.ok()) return;
    MutexLock lock(&service_->plans_mutex_);
    while (service_->num_plans_ >= kMaxPlans) {
      if (context.IsCancelled()) status_ = grpc::Status::CANCELLED;
      if (service_->runner_->is_stopping()) status_ = ToGrpc(absl::UnavailableError("trainer_server stops"));
      if (!status_.ok()) return;
      service_->plan_ended_.WaitFor(&service_->plans_mutex_, absl::Milliseconds(100));
    }
    ++service_->num_plans_;
  }
  ~PlanTurn() {
    if (!status_.ok()) return;
    MutexLock lock(&service_->plans_mutex_);
    --service_->num_plans_;
    service_->plan_ended_.Signal();
  }
  PlanTurn(const PlanTurn&) = delete;
  PlanTurn& operator=(const PlanTurn&) = delete;
  const grpc::Status& status() const { return status_; }

 private:
  JobService* const service_;
  const StreamPlace place_;
  grpc::Status status_;
};

template <typename Transfer>
bool JobService::InTime(grpc::ServerContext* context, const Transfer& transfer) {
  const StreamWatch::Wait wait(&stream_watch_, context, MonotonicTime::Now() + kMessageTimeout);
  return transfer();
}

JobService::JobService(Options options, JobStore* store, ContentStore* content, JobRunner* runner)
    : options_(std::move(options)), store_(store), content_(content), runner_(runner) {}

grpc::Status JobService::Upload(grpc::ServerContext* context, grpc::ServerReader<v1::UploadRequest>* reader,
                                v1::UploadResponse* response) {
  const StreamPlace place(&num_streams_, kMaxStreams, "streams");
  if (!place.status().ok()) return place.status();
  v1::UploadRequest request;
  const auto read = [&] { return InTime(context, [&] { return reader->Read(&request); }); };
  if (!read() || !request.has_header()) { return ToGrpc(absl::InvalidArgumentError("an upload begins with a header")); }
  const std::string sha256 = request.header().sha256();
  auto upload = content_->BeginUpload(sha256, request.header().size_bytes(), request.header().offset_bytes());
  if (!upload.ok()) return ToGrpc(upload.status());
  if (request.header().offset_bytes() > 0)
    TANDEM_LOG(kInfo, "service", "upload goes on sha256=", sha256, " at_bytes=", request.header().offset_bytes());
  while (read()) {
    if (!request.has_piece() || request.piece().size() > kPieceBytes) {
      return ToGrpc(absl::InvalidArgumentError(
          absl::StrCat("upload of ", sha256, ": a piece of ", request.piece().size(), " bytes; the limit is ", kPieceBytes)));
    }
    if (const absl::Status status = (*upload)->Append(request.piece()); !status.ok()) return ToGrpc(status);
  }
  if (const absl::Status status = (*upload)->Commit(); !status.ok()) return ToGrpc(status);
  response->set_sha256(sha256);
  return grpc::Status::OK;
}

grpc::Status JobService::HasContent(grpc::ServerContext*, const v1::HasContentRequest* request,
                                    v1::HasContentResponse* response) {
  response->set_present(content_->Has(request->sha256()));
  response->set_partial_bytes(content_->PartialBytes(request->sha256()));
  return grpc::Status::OK;
}

absl::Status JobService::MeasureSubmitted(JobPlan* plan) const {
  const NodeMemory node = options_.surroundings.node_memory();
  TANDEM_RETURN_IF_ERROR(MeasureMemory(options_.surroundings, node, plan));
  KeepGroupsWhole(options_.surroundings, node, plan);
  return absl::OkStatus();
}

absl::StatusOr<JobPlan> JobService::PlanFor(const grpc::ServerContext& context, const std::string& job_text,
                                            std::string* submitter) const {
  TANDEM_ASSIGN_OR_RETURN(const Caller caller, options_.access->CallerOf(context));
  if (submitter != nullptr) *submitter = caller.name;
  JobSurroundings surroundings = options_.surroundings;
  surroundings.find_job = [&](const std::string& id_or_name) { return store_->Find(id_or_name, caller.name); };
  return PlanJob(job_text, surroundings, JobOrigin::kSubmitted);
}

grpc::Status JobService::Submit(grpc::ServerContext* context, const v1::SubmitRequest* request, v1::SubmitResponse* response) {
  const PlanTurn turn(this, *context);
  if (!turn.status().ok()) return turn.status();
  std::string submitter;
  auto plan = PlanFor(*context, request->job_text(), &submitter);
  if (!plan.ok()) return ToGrpc(plan.status());
  if (const absl::Status measured = MeasureSubmitted(&*plan); !measured.ok()) return ToGrpc(measured);
  if (const absl::Status fits = CheckMemory(plan->memory); !fits.ok()) return ToGrpc(fits);
  const auto text = JobText(*plan);
  if (!text.ok()) return ToGrpc(text.status());
  const auto job = store_->Add(plan->spec, *text, submitter);
  if (!job.ok()) return ToGrpc(job.status());
  runner_->Notify();
  response->set_job(*job);
  AddWarnings(*plan, response->mutable_warnings());
  *response->mutable_data() = plan->rows.counts;
  return grpc::Status::OK;
}

grpc::Status JobService::Plan(grpc::ServerContext* context, const v1::PlanRequest* request, v1::PlanResponse* response) {
  const PlanTurn turn(this, *context);
  if (!turn.status().ok()) return turn.status();
  auto plan = PlanFor(*context, request->job_text(), nullptr);
  if (!plan.ok()) return ToGrpc(plan.status());
  plan->needs.live_sequences = request->live_sequences();
  if (const absl::Status measured = MeasureSubmitted(&*plan); !measured.ok()) return ToGrpc(measured);
  *response->mutable_memory() = plan->memory.figures;
  response->mutable_faults()->Assign(plan->memory.faults.begin(), plan->memory.faults.end());
  const auto text = JobText(*plan);
  if (!text.ok()) return ToGrpc(text.status());
  response->set_job_text(*text);
  AddWarnings(*plan, response->mutable_warnings());
  *response->mutable_data() = plan->rows.counts;
  response->set_steps_per_epoch(plan->steps_per_epoch);
  response->set_trained_parameters(plan->layout.num_parameters);
  return grpc::Status::OK;
}

grpc::Status JobService::ListJobs(grpc::ServerContext*, const v1::ListJobsRequest* request, v1::ListJobsResponse* response) {
  std::optional<std::int64_t> before;
  if (!request->page_token().empty()) {
    std::int64_t ordinal = 0;
    if (!absl::SimpleAtoi(request->page_token(), &ordinal)) {
      return ToGrpc(
          absl::InvalidArgumentError(absl::StrCat("page_token '", request->page_token(), "' is none of this server's")));
    }
    before = ordinal;
  }
  const std::uint32_t page = request->page_size() == 0 ? kMaxPageSize : std::min(request->page_size(), kMaxPageSize);
  std::vector<v1::JobState> states;
  for (const int state : request->states()) {
    if (state == v1::JOB_STATE_UNSPECIFIED || !v1::JobState_IsValid(state))
      return ToGrpc(absl::InvalidArgumentError(absl::StrCat("states: ", state, "; must be states of a job")));
    states.push_back(static_cast<v1::JobState>(state));
  }
  if (states.size() > kMaxListedStates)
    return ToGrpc(
        absl::InvalidArgumentError(absl::StrCat("states: ", states.size(), " of them; must be at most ", kMaxListedStates)));
  const auto jobs = store_->List(static_cast<int>(page), before, states);
  if (!jobs.ok()) return ToGrpc(jobs.status());
  for (const StoredJob& job : *jobs) *response->add_jobs() = runner_->StatusOf(job);
  if (jobs->size() == page) response->set_next_page_token(absl::StrCat(jobs->back().ordinal));
  return grpc::Status::OK;
}

grpc::Status JobService::GetJob(grpc::ServerContext*, const v1::GetJobRequest* request, v1::JobStatus* response) {
  const auto status = runner_->StatusOf(request->job());
  if (status.ok()) *response = *status;
  return ToGrpc(status.status());
}

grpc::Status JobService::Describe(grpc::ServerContext*, const v1::GetJobRequest* request, v1::JobDescription* response) {
  const auto job = store_->Get(request->job());
  if (!job.ok()) return ToGrpc(job.status());
  response->set_job_text(job->job_text);
  const auto status = runner_->StatusOf(request->job());
  if (status.ok()) *response->mutable_status() = *status;
  return ToGrpc(status.status());
}

grpc::Status JobService::Watch(grpc::ServerContext* context, const v1::WatchRequest* request,
                               grpc::ServerWriter<v1::WatchResponse>* writer) {
  const StreamPlace place(&num_watchers_, kMaxWatchers, "watchers");
  if (!place.status().ok()) return place.status();
  if (const auto job = store_->Get(request->job()); !job.ok()) return ToGrpc(job.status());
  HistoryReader history(runner_->DirectoryOf(request->job()), request->stride_steps());
  v1::JobStatus sent;
  std::uint64_t next_step = request->from_step(), change = 0;
  if (next_step > 0) history.Seek(next_step - 1);
  const auto write = [&](const v1::WatchResponse& message) { return InTime(context, [&] { return writer->Write(message); }); };
  while (!context->IsCancelled()) {
    // The status first: when it says that the job has ended, the history read after it is whole.
    const auto status = runner_->StatusOf(request->job());
    if (!status.ok()) return ToGrpc(status.status());
    while (const auto event = history.Next()) {
      const bool is_step = event->kind == HistoryEvent::Kind::kStep;
      if (event->kind == HistoryEvent::Kind::kData && next_step > 0) continue;
      // The evaluation of step s comes after its figures, so that a caller who has those may lack it.
      if (event->step + (is_step ? 0 : 1) < next_step) continue;
      if (is_step) next_step = event->step + 1;
      if (!write(ToResponse(*event))) return grpc::Status::CANCELLED;
    }
    if (!IsSame(*status, sent)) {
      v1::WatchResponse response;
      *response.mutable_status() = *status;
      if (!write(response)) return grpc::Status::CANCELLED;
      sent = *status;
    }
    if (HasEnded(status->state()) || request->until_now()) return grpc::Status::OK;
    if (runner_->is_stopping()) return ToGrpc(absl::UnavailableError("trainer_server stops"));
    // The more watchers there are the less often each looks, so that they do not slow the steps that they watch.
    absl::SleepFor(absl::Seconds(static_cast<double>(num_watchers_.load()) / kLooksPerSecond));
    change = runner_->WaitForChange(change, absl::Milliseconds(500));
  }
  return grpc::Status::CANCELLED;
}

grpc::Status JobService::ChangeJob(const grpc::ServerContext& context, const std::string& job,
                                   const std::function<absl::Status()>& change, v1::JobStatus* response) {
  const absl::StatusOr<Caller> caller = options_.access->CallerOf(context);
  if (!caller.ok()) return ToGrpc(caller.status());
  const absl::StatusOr<StoredJob> stored = store_->Get(job);
  if (!stored.ok()) return ToGrpc(stored.status());
  const std::string& submitter = stored->status.submitter();
  if (caller->role < AccessRole::kAdminister && caller->name != submitter) {
    return ToGrpc(absl::PermissionDeniedError(
        absl::StrCat("job ", job, " was submitted by ", submitter.empty() ? "nobody known" : submitter, "; ", caller->name,
                     " has the role ", AccessRoleName(caller->role), ", and others' jobs need the role administer")));
  }
  if (const absl::Status done = change(); !done.ok()) return ToGrpc(done);
  runner_->Notify();
  const auto status = runner_->StatusOf(job);
  if (status.ok()) *response = *status;
  return ToGrpc(status.status());
}

grpc::Status JobService::Cancel(grpc::ServerContext* context, const v1::CancelRequest* request, v1::JobStatus* response) {
  return ChangeJob(
      *context, request->job(), [&] { return store_->Cancel(request->job()); }, response);
}

grpc::Status JobService::Pause(grpc::ServerContext* context, const v1::PauseRequest* request, v1::JobStatus* response) {
  return ChangeJob(
      *context, request->job(), [&] { return store_->Pause(request->job()); }, response);
}

grpc::Status JobService::Resume(grpc::ServerContext* context, const v1::ResumeRequest* request, v1::JobStatus* response) {
  return ChangeJob(
      *context, request->job(), [&] { return store_->Resume(request->job()); }, response);
}

grpc::Status JobService::SetPriority(grpc::ServerContext* context, const v1::SetPriorityRequest* request,
                                     v1::JobStatus* response) {
  return ChangeJob(
      *context, request->job(), [&] { return store_->SetPriority(request->job(), request->priority()); }, response);
}

grpc::Status JobService::Completions(grpc::ServerContext* context, const v1::CompletionsRequest* request,
                                     grpc::ServerWriter<v1::CompletionRecord>* writer) {
  const StreamPlace place(&num_streams_, kMaxStreams, "streams");
  if (!place.status().ok()) return place.status();
  const auto job = store_->Get(request->job());
  if (!job.ok()) return ToGrpc(job.status());
  const absl::Status filters = CheckFilters(*request, job->job_text);
  if (!filters.ok()) return ToGrpc(filters);
  const std::string directory = runner_->DirectoryOf(request->job());
  const std::vector<std::uint64_t> steps = StepsWithCompletions(directory);
  std::uint64_t first = request->step(), last = std::max(request->step(), request->last_step());
  if (first == 0 && !steps.empty()) first = last = steps.back();
  const auto is_asked = [&](std::uint64_t step) { return step >= first && step <= last; };
  if (std::ranges::none_of(steps, is_asked)) {
    const std::string there =
        steps.empty() ? "there are none yet" : absl::StrCat("steps ", steps.front(), " to ", steps.back(), " have some");
    return ToGrpc(absl::NotFoundError(absl::StrCat("job ", request->job(), ": no completions of step ", first,
                                                   last > first ? absl::StrCat(" to ", last) : "", "; ", there)));
  }
  std::uint32_t written = 0;
  bool is_open = true;
  for (const std::uint64_t step : steps) {
    if (!is_asked(step)) continue;
    const absl::Status read = ReadCompletions(directory, step, [&](const v1::CompletionRecord& record) {
      is_open = !context->IsCancelled();
      if (!is_open || !Passes(*request, record)) return is_open;
      is_open = InTime(context, [&] { return writer->Write(record); }) && (request->limit() == 0 || ++written < request->limit());
      return is_open;
    });
    if (!read.ok()) return ToGrpc(Annotate(read, absl::StrCat("job ", request->job())));
    if (!is_open) break;
  }
  return grpc::Status::OK;
}

grpc::Status JobService::Export(grpc::ServerContext* context, const v1::ExportRequest* request,
                                grpc::ServerWriter<v1::ExportResponse>* writer) {
  const StreamPlace place(&num_streams_, kMaxStreams, "streams");
  if (!place.status().ok()) return place.status();
  const auto job = store_->Get(request->job());
  if (!job.ok()) return ToGrpc(job.status());
  const auto plan = PlanJob(job->job_text, options_.surroundings, JobOrigin::kSettings);
  if (!plan.ok()) return ToGrpc(plan.status());
  const auto checkpoints = CheckpointStore::OpenForReading(runner_->DirectoryOf(request->job()) + "/checkpoints");
  const auto read = [&] { return request->best() ? checkpoints.ReadBestAdapter() : checkpoints.ReadNewestAdapter(); };
  auto adapter = read();
  // A running job may replace its newest checkpoint while it is read.
  for (int attempt = 0; attempt < 3 && absl::IsDataLoss(adapter.status()); ++attempt) adapter = read();
  if (!adapter.ok()) return ToGrpc(adapter.status());
  v1::ExportResponse response;
  const FileSink sink = [&](const std::string& file, std::string_view piece, bool is_last) {
    response.set_file(file);
    response.set_piece(piece.data(), piece.size());
    response.set_is_last(is_last);
    return !context->IsCancelled() && InTime(context, [&] { return writer->Write(response); });
  };
  if (request->merged()) {
    return ToGrpc(ExportMerged(plan->spec.adapter(), options_.model, options_.model_path, *adapter, sink));
  }
  const auto files = ExportFiles(plan->spec.adapter(), options_.surroundings.model, *adapter);
  if (!files.ok()) return ToGrpc(files.status());
  for (const auto& [name, bytes] : *files) {
    std::string_view rest = bytes;
    do {
      const std::string_view piece = rest.substr(0, kPieceBytes);
      rest.remove_prefix(piece.size());
      if (!sink(name, piece, rest.empty())) return grpc::Status::CANCELLED;
    } while (!rest.empty());
  }
  return grpc::Status::OK;
}

grpc::Status JobService::GetStatus(grpc::ServerContext*, const v1::TrainerStatusRequest*, v1::TrainerStatus* response) {
  response->set_model(options_.model.config.name);
  response->set_device(options_.device);
  response->set_running_job(runner_->running_job());
  response->set_phase(runner_->phase());
  const QueueDepth depth = store_->depth();
  response->set_queued_jobs(static_cast<std::uint32_t>(depth.ready + depth.blocked));
  for (v1::OwnedBytes& entry : runner_->Ledger()) *response->add_ledger() = std::move(entry);
  response->set_lease_epoch(options_.member->lease().epoch());
  response->set_is_peer_attached(options_.member->is_peer_attached());
  if (const auto use = DriverMemory(options_.member->device()); use.ok()) {
    response->set_device_total_bytes(use->total_bytes);
    response->set_device_free_bytes(use->free_bytes);
  }
  return grpc::Status::OK;
}

}  // namespace tandem
