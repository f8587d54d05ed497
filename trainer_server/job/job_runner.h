// The one thread that owns training: takes the first job of the queue, walks it through its loop, takes the next. A job left
// RUNNING by a life before goes on from its checkpoint. One that is cancelled ends at once, one that is paused at its next step
// boundary. Public functions are thread-safe unless they say otherwise.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/base/clock.h"
#include "common/base/mutex.h"
#include "common/base/repeated_log.h"
#include "trainer_server/job/job_store.h"
#include "trainer_server/job/training_loop.h"

namespace tandem {

class JobRunner {
 public:
  struct Options {
    std::string directory;  // holds jobs/<job>/
    absl::Duration idle_poll = absl::Milliseconds(500);
    absl::Duration ended_job_served = absl::Seconds(15);  // its metrics: three scrapes
  };
  JobRunner(JobStore* store, LoopEnvironment environment, Options options);
  ~JobRunner();

  void Start();
  // Interrupts the step under way, writes a checkpoint of the last one and joins the thread; the running job stays RUNNING in the
  // store. Idempotent.
  void Stop();
  bool is_stopping() const;

  // Something in the store changed: a job came, or a request for the running one.
  void Notify();
  // The rollout server came back; an adapter it served is made known to it again.
  void OnPeerAttached();
  // Rises with every step, evaluation and state; blocks until it is above `seen` or `timeout` passed.
  std::uint64_t WaitForChange(std::uint64_t seen, absl::Duration timeout);

  // The store's status with what is waited for; where no job runs, the next one says why.
  absl::StatusOr<v1::JobStatus> StatusOf(const std::string& job) const;
  v1::JobStatus StatusOf(const StoredJob& job) const;
  std::string running_job() const;
  std::string phase() const;  // "rollout", "training", "idle"
  // The first error of the runner itself, not of a job; OK while it serves.
  absl::Status background_error() const;
  // The pool by owner, the trainer's standing region split among its own.
  std::vector<v1::OwnedBytes> Ledger() const;
  std::string DirectoryOf(const std::string& job) const { return options_.directory + "/jobs/" + job; }

 private:
  void Run();
  // Errors: RESOURCE_EXHAUSTED (the job store cannot be written for now), those of the store.
  absl::Status RunNext();
  // No job runs for now because of `why`; waits until it is worth while to try again.
  void Hold(const absl::Status& why);
  // What no job runs for, by what StatusOf says of the next; empty: nothing.
  void SetHeldBy(const std::string& what);
  absl::Status GiveBackElastic();
  void RunJob(const StoredJob& job);
  // Until the job ends, or pauses, or the runner stops. OK: all steps done.
  absl::Status WalkThrough(TrainingLoop* loop);
  absl::StatusOr<std::unique_ptr<TrainingLoop>> Begin(const StoredJob& job);
  // The running job has held the device since it was charged last.
  absl::Status Charge(const std::string& job);
  absl::Status ClearStandingRegion(const std::string& next_job);
  void EndJob(const std::string& job, const absl::Status& result, TrainingLoop* loop);
  void Changed(const std::string& running_job, const std::string& phase);
  void ExportState() const;
  void ExportQueue() const;
  // The series of jobs that ended long enough ago to have been scraped.
  void ForgetEndedJobs();

  JobStore* const store_;
  LoopEnvironment environment_;
  const Options options_;
  std::unique_ptr<TrainingLoop> resident_;  // of the last job: its adapter may still be asked for. Runner thread only.
  std::deque<std::pair<std::string, MonotonicTime>> ended_jobs_;  // whose metrics are still served. Runner thread only.
  RepeatedLog holds_{"job"}, reactivations_{"job"};               // Runner thread only.
  MonotonicTime charged_;  // up to when the running job has been charged for the device. Runner thread only.
  std::thread thread_;

  Mutex request_mutex_;  // before mutex_: a request is read and handed on before the next one is. A holder waits for the disk.
  mutable Mutex mutex_;
  mutable CondVar changed_;
  bool is_stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_notified_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_reactivation_due_ ABSL_GUARDED_BY(mutex_) = false;
  std::uint64_t change_ ABSL_GUARDED_BY(mutex_) = 1;
  std::string running_job_ ABSL_GUARDED_BY(mutex_);
  std::string phase_ ABSL_GUARDED_BY(mutex_) = "idle";
  std::string held_by_ ABSL_GUARDED_BY(mutex_);
  absl::Status background_error_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tandem
