// JobService over gRPC: parses, asks the stores and the runner, writes. Never waits for training. Thread-safe.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "common/base/mutex.h"
#include "common/rpc/access.h"
#include "common/rpc/stream_watch.h"
#include "proto/job.grpc.pb.h"
#include "trainer_server/job/content_store.h"
#include "trainer_server/job/job_plan.h"
#include "trainer_server/job/job_runner.h"
#include "trainer_server/job/job_store.h"

namespace tandem {

class JobService final : public v1::JobService::Service {
 public:
  struct Options {
    JobSurroundings surroundings;
    ModelDescription model;
    std::string model_path;  // as --model says; may be empty
    std::string device;
    PoolMember* member = nullptr;
    std::shared_ptr<Access> access;  // who calls
  };
  static constexpr int kMaxStreams = 64;  // Upload, Completions and Export calls at a time
  static constexpr int kMaxWatchers = 1024;
  static constexpr int kMaxPlans = 4;           // Submit and Plan calls that read their data and start their workers, at a time
  static constexpr int kLooksPerSecond = 1000;  // of all watchers together
  static constexpr absl::Duration kMessageTimeout = absl::Seconds(20);  // for one message of a stream, to come or to go

  JobService(Options options, JobStore* store, ContentStore* content, JobRunner* runner);

  grpc::Status Upload(grpc::ServerContext* context, grpc::ServerReader<v1::UploadRequest>* reader,
                      v1::UploadResponse* response) override;
  grpc::Status HasContent(grpc::ServerContext* context, const v1::HasContentRequest* request,
                          v1::HasContentResponse* response) override;
  grpc::Status Submit(grpc::ServerContext* context, const v1::SubmitRequest* request, v1::SubmitResponse* response) override;
  grpc::Status Plan(grpc::ServerContext* context, const v1::PlanRequest* request, v1::PlanResponse* response) override;
  grpc::Status ListJobs(grpc::ServerContext* context, const v1::ListJobsRequest* request,
                        v1::ListJobsResponse* response) override;
  grpc::Status GetJob(grpc::ServerContext* context, const v1::GetJobRequest* request, v1::JobStatus* response) override;
  grpc::Status Describe(grpc::ServerContext* context, const v1::GetJobRequest* request, v1::JobDescription* response) override;
  grpc::Status Watch(grpc::ServerContext* context, const v1::WatchRequest* request,
                     grpc::ServerWriter<v1::WatchResponse>* writer) override;
  grpc::Status Cancel(grpc::ServerContext* context, const v1::CancelRequest* request, v1::JobStatus* response) override;
  grpc::Status Pause(grpc::ServerContext* context, const v1::PauseRequest* request, v1::JobStatus* response) override;
  grpc::Status Resume(grpc::ServerContext* context, const v1::ResumeRequest* request, v1::JobStatus* response) override;
  grpc::Status SetPriority(grpc::ServerContext* context, const v1::SetPriorityRequest* request, v1::JobStatus* response) override;
  grpc::Status Completions(grpc::ServerContext* context, const v1::CompletionsRequest* request,
                           grpc::ServerWriter<v1::CompletionRecord>* writer) override;
  grpc::Status Export(grpc::ServerContext* context, const v1::ExportRequest* request,
                      grpc::ServerWriter<v1::ExportResponse>* writer) override;
  grpc::Status GetStatus(grpc::ServerContext* context, const v1::TrainerStatusRequest* request,
                         v1::TrainerStatus* response) override;

 private:
  // One of so many places; RAII. Errors: RESOURCE_EXHAUSTED.
  class StreamPlace;
  // One of kMaxPlans turns, which may have to be waited for; RAII. Errors: RESOURCE_EXHAUSTED (kMaxStreams wait), UNAVAILABLE
  // (the trainer stops), CANCELLED.
  class PlanTurn;
  // Writes or reads a message; false when the stream has ended, or took longer than kMessageTimeout.
  template <typename Transfer>
  bool InTime(grpc::ServerContext* context, const Transfer& transfer);
  // A plan for whoever calls, with memory and micro-batches; `submitter` may be null.
  absl::StatusOr<JobPlan> PlanFor(const grpc::ServerContext& context, const std::string& job_text, std::string* submitter) const;
  // Does `change` where the caller is the job's submitter or administers; what the job then is. Errors: PERMISSION_DENIED.
  grpc::Status ChangeJob(const grpc::ServerContext& context, const std::string& job, const std::function<absl::Status()>& change,
                         v1::JobStatus* response);
  // Memory and micro-batches of a plan that was made to be submitted.
  absl::Status MeasureSubmitted(JobPlan* plan) const;

  const Options options_;
  JobStore* const store_;
  ContentStore* const content_;
  JobRunner* const runner_;
  std::atomic<int> num_streams_ = 0, num_watchers_ = 0, num_planners_ = 0;
  Mutex plans_mutex_;
  CondVar plan_ended_;
  int num_plans_ ABSL_GUARDED_BY(plans_mutex_) = 0;
  StreamWatch stream_watch_;
};

}  // namespace tandem
