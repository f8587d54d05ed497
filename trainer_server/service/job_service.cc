#include "trainer_server/service/job_service.h"

#include <algorithm>
#include <utility>

#include "absl/strings/numbers.h"
#include "common/base/units.h"
#include "common/rpc/channel.h"
#include "google/protobuf/text_format.h"
#include "trainer_server/checkpoint/checkpoint_store.h"
#include "trainer_server/job/adapter_files.h"
#include "trainer_server/job/history.h"

namespace tandem {
namespace {

constexpr std::size_t kPieceBytes = kMiB;
constexpr std::uint32_t kMaxPageSize = 100;

bool HasEnded(v1::JobState state) {
  return state == v1::JOB_STATE_SUCCEEDED || state == v1::JOB_STATE_FAILED || state == v1::JOB_STATE_CANCELLED;
}

bool IsSame(const v1::JobStatus& a, const v1::JobStatus& b) { return a.SerializeAsString() == b.SerializeAsString(); }

void Add(const std::string& name, double value, google::protobuf::RepeatedPtrField<v1::NamedValue>* values) {
  v1::NamedValue* const added = values->Add();
  added->set_name(name);
  added->set_value(value);
}

v1::WatchResponse ToResponse(const HistoryEvent& event) {
  v1::WatchResponse response;
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
  const std::string prefix = "rewards/", suffix = "/mean";
  for (const auto& [name, value] : event.values) {
    if (name == "reward") {
      evaluation->set_reward(value);
    } else if (name == "num_prompts") {
      evaluation->set_num_prompts(static_cast<std::uint32_t>(value));
    } else if (name.size() > prefix.size() + suffix.size() && name.rfind(prefix, 0) == 0) {
      Add(name.substr(prefix.size(), name.size() - prefix.size() - suffix.size()), value, evaluation->mutable_rewards());
    }
  }
  return response;
}

void AddWarnings(const JobPlan& plan, google::protobuf::RepeatedPtrField<std::string>* warnings) {
  for (const auto* lines : {&plan.warnings, &plan.memory.warnings}) warnings->Add(lines->begin(), lines->end());
}

}  // namespace

class JobService::StreamPlace {
 public:
  explicit StreamPlace(std::atomic<int>* count) : count_(count), is_granted_(count->fetch_add(1) < kMaxStreams) {}
  ~StreamPlace() { count_->fetch_sub(1); }
  StreamPlace(const StreamPlace&) = delete;
  StreamPlace& operator=(const StreamPlace&) = delete;
  grpc::Status status() const {
    if (is_granted_) return grpc::Status::OK;
    return ToGrpc(absl::ResourceExhaustedError(absl::StrCat("trainer_server serves ", kMaxStreams, " streams at a time")));
  }

 private:
  std::atomic<int>* const count_;
  const bool is_granted_;
};

JobService::JobService(Options options, JobStore* store, ContentStore* content, JobRunner* runner)
    : options_(std::move(options)), store_(store), content_(content), runner_(runner) {}

grpc::Status JobService::Upload(grpc::ServerContext*, grpc::ServerReader<v1::UploadRequest>* reader,
                                v1::UploadResponse* response) {
  const StreamPlace place(&num_streams_);
  if (!place.status().ok()) return place.status();
  v1::UploadRequest request;
  if (!reader->Read(&request) || !request.has_header()) {
    return ToGrpc(absl::InvalidArgumentError("an upload begins with a header"));
  }
  const std::string sha256 = request.header().sha256();
  auto upload = content_->BeginUpload(sha256, request.header().size_bytes());
  if (!upload.ok()) return ToGrpc(upload.status());
  while (reader->Read(&request)) {
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
  return grpc::Status::OK;
}

grpc::Status JobService::Submit(grpc::ServerContext*, const v1::SubmitRequest* request, v1::SubmitResponse* response) {
  auto plan = PlanJob(request->job_text(), options_.surroundings, JobOrigin::kSubmitted);
  if (!plan.ok()) return ToGrpc(plan.status());
  const absl::Status measured = MeasureMemory(options_.surroundings, options_.surroundings.node_memory(), &*plan);
  if (!measured.ok()) return ToGrpc(measured);
  if (const absl::Status fits = CheckMemory(plan->memory); !fits.ok()) return ToGrpc(fits);
  const auto job = store_->Add(plan->spec, request->job_text());
  if (!job.ok()) return ToGrpc(job.status());
  runner_->Notify();
  response->set_job(*job);
  AddWarnings(*plan, response->mutable_warnings());
  return grpc::Status::OK;
}

grpc::Status JobService::Plan(grpc::ServerContext*, const v1::PlanRequest* request, v1::PlanResponse* response) {
  auto plan = PlanJob(request->job_text(), options_.surroundings, JobOrigin::kSubmitted);
  if (!plan.ok()) return ToGrpc(plan.status());
  plan->needs.live_sequences = request->live_sequences();
  const absl::Status measured = MeasureMemory(options_.surroundings, options_.surroundings.node_memory(), &*plan);
  if (!measured.ok()) return ToGrpc(measured);
  *response->mutable_memory() = plan->memory.figures;
  response->mutable_faults()->Assign(plan->memory.faults.begin(), plan->memory.faults.end());
  if (!google::protobuf::TextFormat::PrintToString(plan->spec, response->mutable_job_text())) {
    return ToGrpc(absl::InternalError("the job cannot be printed"));
  }
  AddWarnings(*plan, response->mutable_warnings());
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
  const auto jobs = store_->List(static_cast<int>(page), before);
  if (!jobs.ok()) return ToGrpc(jobs.status());
  for (const StoredJob& job : *jobs) {
    const auto status = runner_->StatusOf(job.status.job());
    *response->add_jobs() = status.ok() ? *status : job.status;
  }
  if (jobs->size() == page) response->set_next_page_token(absl::StrCat(jobs->back().ordinal));
  return grpc::Status::OK;
}

grpc::Status JobService::GetJob(grpc::ServerContext*, const v1::GetJobRequest* request, v1::JobStatus* response) {
  const auto status = runner_->StatusOf(request->job());
  if (status.ok()) *response = *status;
  return ToGrpc(status.status());
}

grpc::Status JobService::Watch(grpc::ServerContext* context, const v1::WatchRequest* request,
                               grpc::ServerWriter<v1::WatchResponse>* writer) {
  const StreamPlace place(&num_streams_);
  if (!place.status().ok()) return place.status();
  HistoryReader history(runner_->DirectoryOf(request->job()));
  v1::JobStatus sent;
  std::uint64_t next_step = request->from_step(), change = 0;
  while (!context->IsCancelled()) {
    // The status first: when it says that the job has ended, the history read after it is whole.
    const auto status = runner_->StatusOf(request->job());
    if (!status.ok()) return ToGrpc(status.status());
    while (const auto event = history.Next()) {
      const bool is_step = event->kind == HistoryEvent::Kind::kStep;
      // The evaluation of step s comes after its figures, so that a caller who has those may lack it.
      if (event->step + (is_step ? 0 : 1) < next_step) continue;
      if (is_step) next_step = event->step + 1;
      if (!writer->Write(ToResponse(*event))) return grpc::Status::CANCELLED;
    }
    if (!IsSame(*status, sent)) {
      v1::WatchResponse response;
      *response.mutable_status() = *status;
      if (!writer->Write(response)) return grpc::Status::CANCELLED;
      sent = *status;
    }
    if (HasEnded(status->state())) return grpc::Status::OK;
    change = runner_->WaitForChange(change, absl::Milliseconds(500));
  }
  return grpc::Status::CANCELLED;
}

grpc::Status JobService::Cancel(grpc::ServerContext*, const v1::CancelRequest* request, v1::JobStatus* response) {
  const absl::Status done = store_->Cancel(request->job());
  if (!done.ok()) return ToGrpc(done);
  runner_->Notify();
  const auto status = runner_->StatusOf(request->job());
  if (status.ok()) *response = *status;
  return ToGrpc(status.status());
}

grpc::Status JobService::Pause(grpc::ServerContext*, const v1::PauseRequest* request, v1::JobStatus* response) {
  const absl::Status done = store_->Pause(request->job());
  if (!done.ok()) return ToGrpc(done);
  runner_->Notify();
  const auto status = runner_->StatusOf(request->job());
  if (status.ok()) *response = *status;
  return ToGrpc(status.status());
}

grpc::Status JobService::Resume(grpc::ServerContext*, const v1::ResumeRequest* request, v1::JobStatus* response) {
  const absl::Status done = store_->Resume(request->job());
  if (!done.ok()) return ToGrpc(done);
  runner_->Notify();
  const auto status = runner_->StatusOf(request->job());
  if (status.ok()) *response = *status;
  return ToGrpc(status.status());
}

grpc::Status JobService::Completions(grpc::ServerContext*, const v1::CompletionsRequest* request,
                                     grpc::ServerWriter<v1::CompletionRecord>* writer) {
  const StreamPlace place(&num_streams_);
  if (!place.status().ok()) return place.status();
  const auto job = store_->Get(request->job());
  if (!job.ok()) return ToGrpc(job.status());
  std::uint32_t written = 0;
  bool is_open = true;
  const absl::Status read =
      ReadCompletions(runner_->DirectoryOf(request->job()), request->step(), [&](const v1::CompletionRecord& record) {
        is_open = writer->Write(record);
        ++written;
        return is_open && (request->limit() == 0 || written < request->limit());
      });
  if (!is_open) return grpc::Status::CANCELLED;
  return ToGrpc(Annotate(read, absl::StrCat("job ", request->job())));
}

grpc::Status JobService::Export(grpc::ServerContext*, const v1::ExportRequest* request,
                                grpc::ServerWriter<v1::ExportResponse>* writer) {
  const StreamPlace place(&num_streams_);
  if (!place.status().ok()) return place.status();
  const auto job = store_->Get(request->job());
  if (!job.ok()) return ToGrpc(job.status());
  const auto plan = PlanJob(job->job_text, options_.surroundings, JobOrigin::kStored);
  if (!plan.ok()) return ToGrpc(plan.status());
  const auto checkpoints = CheckpointStore::OpenForReading(runner_->DirectoryOf(request->job()) + "/checkpoints");
  auto adapter = checkpoints.ReadNewestAdapter();
  // A running job may replace its newest checkpoint while it is read.
  for (int attempt = 0; attempt < 3 && absl::IsDataLoss(adapter.status()); ++attempt) adapter = checkpoints.ReadNewestAdapter();
  if (!adapter.ok()) return ToGrpc(adapter.status());
  const auto files = ExportFiles(plan->spec.adapter(), options_.surroundings.model, *adapter);
  if (!files.ok()) return ToGrpc(files.status());
  for (const auto& [name, bytes] : *files) {
    std::size_t begin = 0;
    do {
      const std::size_t size = std::min(kPieceBytes, bytes.size() - begin);
      v1::ExportResponse response;
      response.set_file(name);
      response.set_piece(bytes.substr(begin, size));
      begin += size;
      response.set_is_last(begin == bytes.size());
      if (!writer->Write(response)) return grpc::Status::CANCELLED;
    } while (begin < bytes.size());
  }
  return grpc::Status::OK;
}

grpc::Status JobService::GetStatus(grpc::ServerContext*, const v1::TrainerStatusRequest*, v1::TrainerStatus* response) {
  const auto num_queued = store_->CountQueued();
  if (!num_queued.ok()) return ToGrpc(num_queued.status());
  response->set_model(options_.model);
  response->set_device(options_.device);
  response->set_running_job(runner_->running_job());
  response->set_phase(runner_->phase());
  response->set_queued_jobs(static_cast<std::uint32_t>(*num_queued));
  for (v1::OwnedBytes& entry : runner_->Ledger()) *response->add_ledger() = std::move(entry);
  response->set_lease_epoch(options_.member->lease().epoch());
  response->set_is_peer_attached(options_.member->is_peer_attached());
  return grpc::Status::OK;
}

}  // namespace tandem
