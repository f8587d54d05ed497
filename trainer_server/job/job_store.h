// Jobs in SQLite: what was submitted, where it stands, what was asked of it. Survives the trainer. Thread-safe.
//
//   QUEUED -> RUNNING -> SUCCEEDED | FAILED | CANCELLED
//   QUEUED | RUNNING -> PAUSED -> QUEUED;  QUEUED | PAUSED -> CANCELLED;  FAILED -> QUEUED: resumed, from its checkpoint
// A running job is asked to cancel or pause and does so at its next step boundary. The queue is first in, first out; a job that
// was paused, or failed and is resumed, keeps its place.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/base/mutex.h"
#include "common/base/status.h"
#include "proto/job.pb.h"

struct sqlite3;

namespace tandem {

enum class JobRequest { kNone = 0, kPause = 1, kCancel = 2 };

struct StoredJob {
  std::int64_t ordinal = 0;  // place in the queue
  v1::JobStatus status;      // without waiting_for
  std::string job_text;      // as submitted
  JobRequest request = JobRequest::kNone;
};

class JobStore {
 public:
  static constexpr int kMaxQueued = 1000;
  static constexpr int kSchemaVersion = 1;
  // Opens or makes the database; one of an older schema is brought to kSchemaVersion. Errors: INTERNAL with SQLite's words;
  // FAILED_PRECONDITION (a newer schema, which is left as it is).
  static absl::StatusOr<std::unique_ptr<JobStore>> Open(const std::string& path);
  ~JobStore();

  // A new job, QUEUED; its id is the name and a short unique suffix. Errors: RESOURCE_EXHAUSTED (kMaxQueued).
  absl::StatusOr<std::string> Add(const v1::JobSpec& spec, const std::string& job_text);
  // Errors: NOT_FOUND naming the job.
  absl::StatusOr<StoredJob> Get(const std::string& job) const;
  // Newest first, from below `before_ordinal` (nullopt: the newest).
  absl::StatusOr<std::vector<StoredJob>> List(int limit, std::optional<std::int64_t> before_ordinal) const;
  // The job left RUNNING by a life before, else the oldest QUEUED one; nullopt when there is none.
  absl::StatusOr<std::optional<StoredJob>> Next() const;
  absl::StatusOr<int> CountQueued() const;

  // Errors: NOT_FOUND; FAILED_PRECONDITION naming the state that does not allow it.
  absl::Status Transition(const std::string& job, v1::JobState to, const std::string& error);
  absl::Status SetStep(const std::string& job, std::uint32_t step);
  // What cancel, pause and resume do at once or ask of the running job.
  absl::Status Cancel(const std::string& job);
  absl::Status Pause(const std::string& job);
  absl::Status Resume(const std::string& job);

  // The job whose adapter may lie in the standing region; empty: none. Survives the trainer, as the region does.
  absl::Status SetResident(const std::string& job);
  absl::StatusOr<std::string> resident() const;

 private:
  explicit JobStore(sqlite3* database) : database_(database) {}
  absl::Status TransitionLocked(const std::string& job, v1::JobState to, const std::string& error)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<StoredJob> GetLocked(const std::string& job) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status AskLocked(const std::string& job, JobRequest request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable Mutex mutex_;
  sqlite3* const database_;
};

}  // namespace tandem
