// Jobs in SQLite: what was submitted and by whom, where it stands, what was asked of it. Survives the trainer. Thread-safe.
//
//   QUEUED -> RUNNING -> SUCCEEDED | FAILED | CANCELLED
//   QUEUED | RUNNING -> PAUSED -> QUEUED;  QUEUED | PAUSED -> CANCELLED;  FAILED -> QUEUED: resumed, from its checkpoint
//   QUEUED | PAUSED -> FAILED: a job that it comes after did not succeed
// A running job is asked to cancel or pause; the runner hears of it. The order of the queue is job_queue.h's; a job that was
// paused, or failed and is resumed, has the place of its submission. What is queued, paused or running is held in memory too, so
// that neither bounds nor places cost a look through the file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/base/mutex.h"
#include "common/base/status.h"
#include "proto/job.pb.h"
#include "trainer_server/job/job_queue.h"

struct sqlite3;

namespace tandem {

enum class JobRequest { kNone = 0, kPause = 1, kCancel = 2 };

struct StoredJob {
  std::int64_t ordinal = 0;  // rises with the time of submission
  v1::JobStatus status;      // waiting_for only of a job that is queued
  std::string job_text;      // as submitted; empty in lists
  JobRequest request = JobRequest::kNone;
  absl::Time ready_at = absl::InfinitePast();  // since when a queued job could start; InfinitePast: not known
};

// Of jobs that have not ended.
struct QueueDepth {
  int ready = 0;    // queued
  int blocked = 0;  // queued behind jobs that have not succeeded yet
  int running = 0;
  int paused = 0;
};

// The jobs that `spec` comes after, each once: those of `after` and adapter.start_job.
std::vector<std::string> PrerequisitesOf(const v1::JobSpec& spec);

class JobStore {
 public:
  static constexpr int kSchemaVersion = 2;
  // Of jobs that are queued or paused.
  struct Limits {
    int max_queued = 20000;
    int max_queued_of_submitter = 10000;
  };
  // Opens or makes the database; one of an older schema is brought to kSchemaVersion. Errors: INTERNAL with SQLite's words;
  // DATA_LOSS (the file is damaged), RESOURCE_EXHAUSTED (the disk is full), FAILED_PRECONDITION (a newer schema, which is left as
  // it is).
  static absl::StatusOr<std::unique_ptr<JobStore>> Open(const std::string& path, const Limits& limits);
  static absl::StatusOr<std::unique_ptr<JobStore>> Open(const std::string& path) { return Open(path, Limits()); }
  ~JobStore();

  // A new job, QUEUED; its id is the name and a short unique suffix. `spec` names the jobs that it comes after by id. Errors:
  // RESOURCE_EXHAUSTED (limits), NOT_FOUND and FAILED_PRECONDITION (a job that it comes after is unknown, or has not succeeded
  // and never will).
  absl::StatusOr<std::string> Add(const v1::JobSpec& spec, const std::string& job_text, const std::string& submitter);
  // Errors: NOT_FOUND naming the job.
  absl::StatusOr<StoredJob> Get(const std::string& job) const;
  // The job of this id, else the newest of this name that `submitter` submitted. Errors: NOT_FOUND.
  absl::StatusOr<StoredJob> Find(const std::string& id_or_name, const std::string& submitter) const;
  // Newest first, from below `before_ordinal` (nullopt: the newest), in any of `states` (empty: all).
  absl::StatusOr<std::vector<StoredJob>> List(int limit, std::optional<std::int64_t> before_ordinal,
                                              std::span<const v1::JobState> states) const;
  // The job left RUNNING by a life before, else the first of the queue; nullopt when none can start.
  absl::StatusOr<std::optional<StoredJob>> Next() const;
  QueueDepth depth() const;

  // Where a job ends without success, those queued or paused that come after it fail with it. Errors: NOT_FOUND;
  // FAILED_PRECONDITION naming the state that does not allow it.
  absl::Status Transition(const std::string& job, v1::JobState to, const std::string& error);
  absl::Status SetStep(const std::string& job, std::uint32_t step);
  // The job held the device for `held` more, which counts against its submitter.
  absl::Status Charge(const std::string& job, absl::Duration held);
  // What cancel, pause and resume do at once or ask of the running job. Errors: NOT_FOUND, FAILED_PRECONDITION (its state, or
  // that of a job that it comes after), RESOURCE_EXHAUSTED (limits).
  absl::Status Cancel(const std::string& job);
  absl::Status Pause(const std::string& job);
  absl::Status Resume(const std::string& job);
  // Errors: NOT_FOUND, INVALID_ARGUMENT (range), FAILED_PRECONDITION (neither queued nor paused).
  absl::Status SetPriority(const std::string& job, std::int32_t priority);

  // The job whose adapter may lie in the standing region; empty: none. Survives the trainer, as the region does.
  absl::Status SetResident(const std::string& job);
  absl::StatusOr<std::string> resident() const;

 private:
  // A job that is queued, running or paused.
  struct Entry {
    v1::JobState state = v1::JOB_STATE_UNSPECIFIED;
    bool is_blocked = false;
    QueuedJob queued;
  };
  struct Usage {
    double seconds = 0;
    absl::Time at;
  };

  JobStore(sqlite3* database, const Limits& limits) : database_(database), limits_(limits) {}
  absl::Status Load() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes over what the file now says of the jobs.
  absl::Status Refresh(std::span<const std::string> jobs) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status TransitionLocked(const std::string& job, v1::JobState to, const std::string& error)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<StoredJob> GetLocked(const std::string& job) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status AskLocked(const std::string& job, JobRequest request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckRoom(const std::string& submitter) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Fails the queued and paused jobs that come after `job`, and those after them; adds them to `changed`.
  absl::Status FailDependents(const std::string& job, const std::string& reason, std::vector<std::string>* changed)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // after, queue_position and what a queued job waits for.
  absl::Status FillPlace(StoredJob* job) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // running_, order_ and position_of_, made anew where something has changed.
  absl::Status OrderLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable Mutex mutex_;
  sqlite3* const database_;
  const Limits limits_;
  std::map<std::int64_t, Entry> entries_ ABSL_GUARDED_BY(mutex_);  // by ordinal
  std::map<std::string, Usage> usage_ ABSL_GUARDED_BY(mutex_);     // by submitter
  mutable bool is_order_known_ ABSL_GUARDED_BY(mutex_) = false;
  mutable std::optional<std::int64_t> running_ ABSL_GUARDED_BY(mutex_);                          // the oldest that runs
  mutable std::vector<std::int64_t> order_ ABSL_GUARDED_BY(mutex_);                              // of those that could start
  mutable std::unordered_map<std::int64_t, std::uint32_t> position_of_ ABSL_GUARDED_BY(mutex_);  // from 1, by ordinal
};

}  // namespace tandem
