#include "trainer_server/job/job_store.h"

#include <sqlite3.h>

#include <algorithm>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <random>
#include <string_view>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"

namespace tandem {
namespace {

constexpr char kSettings[] = "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;";
// The i-th brings a file from schema i to i + 1; one that was released never changes. A file of schema 0 is empty, or from before
// schemas were counted.
constexpr const char* kMigrations[] = {R"(
  CREATE TABLE IF NOT EXISTS jobs (
    ordinal INTEGER PRIMARY KEY AUTOINCREMENT,
    job TEXT NOT NULL UNIQUE,
    name TEXT NOT NULL,
    state INTEGER NOT NULL,
    request INTEGER NOT NULL DEFAULT 0,
    step INTEGER NOT NULL DEFAULT 0,
    num_steps INTEGER NOT NULL,
    error TEXT NOT NULL DEFAULT '',
    submitted_at TEXT NOT NULL,
    job_text TEXT NOT NULL);
  CREATE INDEX IF NOT EXISTS jobs_by_state ON jobs (state, ordinal);
  CREATE TABLE IF NOT EXISTS resident (slot INTEGER PRIMARY KEY CHECK (slot = 0), job TEXT NOT NULL);
)"};
static_assert(std::size(kMigrations) == JobStore::kSchemaVersion);
constexpr char kColumns[] = "ordinal, job, name, state, request, step, num_steps, error, submitted_at, job_text";

absl::Status SqlError(sqlite3* database, const std::string& what) {
  return absl::InternalError(absl::StrCat("job store: ", what, ": ", sqlite3_errmsg(database)));
}

// One prepared statement, finalised with its scope.
class Statement {
 public:
  Statement(sqlite3* database, const std::string& sql) : database_(database), sql_(sql) {
    result_ = sqlite3_prepare_v2(database, sql.c_str(), -1, &statement_, nullptr);
  }
  ~Statement() { sqlite3_finalize(statement_); }
  Statement(const Statement&) = delete;
  Statement& operator=(const Statement&) = delete;

  Statement& Bind(std::int64_t value) {
    if (result_ == SQLITE_OK) result_ = sqlite3_bind_int64(statement_, ++bound_, value);
    return *this;
  }
  Statement& Bind(const std::string& value) {
    if (result_ == SQLITE_OK) {
      result_ = sqlite3_bind_text(statement_, ++bound_, value.data(), static_cast<int>(value.size()), SQLITE_TRANSIENT);
    }
    return *this;
  }
  // True when there is a row; false at the end.
  absl::StatusOr<bool> Step() {
    if (result_ == SQLITE_OK) {
      const int step = sqlite3_step(statement_);
      if (step == SQLITE_ROW) return true;
      if (step == SQLITE_DONE) return false;
    }
    return SqlError(database_, sql_);
  }
  absl::Status Run() { return Step().status(); }
  std::int64_t Integer(int column) const { return sqlite3_column_int64(statement_, column); }
  std::string Text(int column) const {
    const unsigned char* const text = sqlite3_column_text(statement_, column);
    const auto size = static_cast<std::size_t>(sqlite3_column_bytes(statement_, column));
    return text == nullptr ? std::string() : std::string(static_cast<const char*>(static_cast<const void*>(text)), size);
  }

 private:
  sqlite3* const database_;
  const std::string sql_;
  sqlite3_stmt* statement_ = nullptr;
  int bound_ = 0;
  int result_ = SQLITE_OK;
};

StoredJob ReadJob(const Statement& row) {
  StoredJob job;
  job.ordinal = row.Integer(0);
  job.status.set_job(row.Text(1));
  job.status.set_name(row.Text(2));
  job.status.set_state(static_cast<v1::JobState>(row.Integer(3)));
  job.request = static_cast<JobRequest>(row.Integer(4));
  job.status.set_step(static_cast<std::uint32_t>(row.Integer(5)));
  job.status.set_num_steps(static_cast<std::uint32_t>(row.Integer(6)));
  job.status.set_error(row.Text(7));
  job.status.set_submitted_at(row.Text(8));
  job.job_text = row.Text(9);
  return job;
}

absl::Status Execute(sqlite3* database, const std::string& sql, const std::string& what) {
  return sqlite3_exec(database, sql.c_str(), nullptr, nullptr, nullptr) == SQLITE_OK ? absl::OkStatus()
                                                                                     : SqlError(database, what);
}

// Each migration is a transaction with the version that it leaves: a death in between leaves the file at one of the two.
absl::Status Migrate(sqlite3* database, const std::string& path) {
  Statement select(database, "PRAGMA user_version");
  TANDEM_RETURN_IF_ERROR(select.Run());
  const std::int64_t found = select.Integer(0);
  if (found < 0 || found > JobStore::kSchemaVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat("job store ", path, " has schema ", found, ", of a newer build; this one knows schemas up to ",
                     JobStore::kSchemaVersion, ": start a build that knows it, or give another --data_dir"));
  }
  for (std::int64_t version = found; version < JobStore::kSchemaVersion; ++version) {
    const std::string sql =
        absl::StrCat("BEGIN IMMEDIATE;", kMigrations[version], "PRAGMA user_version = ", version + 1, "; COMMIT;");
    TANDEM_RETURN_IF_ERROR(Execute(database, sql, absl::StrCat("bringing ", path, " to schema ", version + 1)));
  }
  return absl::OkStatus();
}

std::string StateName(v1::JobState state) { return v1::JobState_Name(state); }

bool IsAllowed(v1::JobState from, v1::JobState to) {
  const auto any = [&](std::initializer_list<v1::JobState> states) { return std::ranges::find(states, from) != states.end(); };
  switch (to) {
    case v1::JOB_STATE_QUEUED:
      return any({v1::JOB_STATE_PAUSED, v1::JOB_STATE_FAILED});
    case v1::JOB_STATE_RUNNING:
      return any({v1::JOB_STATE_QUEUED, v1::JOB_STATE_RUNNING});  // again: a life before left it so
    case v1::JOB_STATE_PAUSED:
      return any({v1::JOB_STATE_QUEUED, v1::JOB_STATE_RUNNING});
    case v1::JOB_STATE_CANCELLED:
      return any({v1::JOB_STATE_QUEUED, v1::JOB_STATE_RUNNING, v1::JOB_STATE_PAUSED});
    case v1::JOB_STATE_SUCCEEDED:
    case v1::JOB_STATE_FAILED:
      return any({v1::JOB_STATE_RUNNING});
    default:
      return false;
  }
}

absl::Status Refuse(const StoredJob& job, std::string_view what) {
  return absl::FailedPreconditionError(
      absl::StrCat("job ", job.status.job(), " is ", StateName(job.status.state()), " and cannot be ", ToAbsl(what)));
}

}  // namespace

absl::StatusOr<std::unique_ptr<JobStore>> JobStore::Open(const std::string& path) {
  sqlite3* database = nullptr;
  const int opened = sqlite3_open_v2(
      path.c_str(), &database, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_NOMUTEX | SQLITE_OPEN_EXRESCODE, nullptr);
  std::unique_ptr<JobStore> store(new JobStore(database));
  if (opened != SQLITE_OK) return SqlError(database, "opening " + path);
  sqlite3_busy_timeout(database, 5000);
  TANDEM_RETURN_IF_ERROR(Execute(database, kSettings, "preparing " + path));
  TANDEM_RETURN_IF_ERROR(Migrate(database, path));
  return store;
}

JobStore::~JobStore() { sqlite3_close(database_); }

absl::StatusOr<std::string> JobStore::Add(const v1::JobSpec& spec, const std::string& job_text) {
  TANDEM_ASSIGN_OR_RETURN(const int num_queued, CountQueued());
  if (num_queued >= kMaxQueued) {
    return absl::ResourceExhaustedError(absl::StrCat("the queue holds ", num_queued, " jobs; the limit is ", kMaxQueued));
  }
  std::random_device random;
  MutexLock lock(&mutex_);
  const std::string job = absl::StrFormat("%s-%06x", spec.name(), random() & 0xffffff);
  Statement insert(database_, "INSERT INTO jobs (job, name, state, num_steps, submitted_at, job_text) VALUES (?, ?, ?, ?, ?, ?)");
  insert.Bind(job).Bind(spec.name()).Bind(v1::JOB_STATE_QUEUED).Bind(spec.num_steps());
  insert.Bind(absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", absl::Now(), absl::UTCTimeZone())).Bind(job_text);
  TANDEM_RETURN_IF_ERROR(insert.Run());
  return job;
}

absl::StatusOr<StoredJob> JobStore::Get(const std::string& job) const {
  MutexLock lock(&mutex_);
  return GetLocked(job);
}

absl::StatusOr<StoredJob> JobStore::GetLocked(const std::string& job) const {
  Statement select(database_, absl::StrCat("SELECT ", kColumns, " FROM jobs WHERE job = ?"));
  TANDEM_ASSIGN_OR_RETURN(const bool is_found, select.Bind(job).Step());
  if (!is_found) return absl::NotFoundError(absl::StrCat("no job '", job, "'"));
  return ReadJob(select);
}

absl::StatusOr<std::vector<StoredJob>> JobStore::List(int limit, std::optional<std::int64_t> before_ordinal) const {
  MutexLock lock(&mutex_);
  Statement select(database_, absl::StrCat("SELECT ", kColumns, " FROM jobs WHERE ordinal < ? ORDER BY ordinal DESC LIMIT ?"));
  select.Bind(before_ordinal.value_or(std::numeric_limits<std::int64_t>::max())).Bind(limit);
  std::vector<StoredJob> jobs;
  while (true) {
    TANDEM_ASSIGN_OR_RETURN(const bool is_found, select.Step());
    if (!is_found) return jobs;
    jobs.push_back(ReadJob(select));
  }
}

absl::StatusOr<std::optional<StoredJob>> JobStore::Next() const {
  MutexLock lock(&mutex_);
  Statement select(database_, absl::StrCat("SELECT ", kColumns, " FROM jobs WHERE state IN (?, ?) ",
                                           "ORDER BY state = ? DESC, ordinal LIMIT 1"));
  select.Bind(v1::JOB_STATE_RUNNING).Bind(v1::JOB_STATE_QUEUED).Bind(v1::JOB_STATE_RUNNING);
  TANDEM_ASSIGN_OR_RETURN(const bool is_found, select.Step());
  if (!is_found) return std::nullopt;
  return ReadJob(select);
}

absl::StatusOr<int> JobStore::CountQueued() const {
  MutexLock lock(&mutex_);
  Statement select(database_, "SELECT COUNT(*) FROM jobs WHERE state = ?");
  TANDEM_RETURN_IF_ERROR(select.Bind(v1::JOB_STATE_QUEUED).Run());
  return static_cast<int>(select.Integer(0));
}

absl::Status JobStore::Transition(const std::string& job, v1::JobState to, const std::string& error) {
  MutexLock lock(&mutex_);
  return TransitionLocked(job, to, error);
}

absl::Status JobStore::TransitionLocked(const std::string& job, v1::JobState to, const std::string& error) {
  TANDEM_ASSIGN_OR_RETURN(const StoredJob before, GetLocked(job));
  if (!IsAllowed(before.status.state(), to)) return Refuse(before, "made " + StateName(to));
  // What was asked of the job has been done, or no longer matters; a life that goes on must still hear it.
  const bool keeps_request = to == v1::JOB_STATE_RUNNING;
  Statement update(database_, "UPDATE jobs SET state = ?, error = ?, request = ? WHERE job = ?");
  update.Bind(to).Bind(error).Bind(keeps_request ? static_cast<std::int64_t>(before.request) : 0).Bind(job);
  return update.Run();
}

absl::Status JobStore::SetStep(const std::string& job, std::uint32_t step) {
  MutexLock lock(&mutex_);
  return Statement(database_, "UPDATE jobs SET step = ? WHERE job = ?").Bind(step).Bind(job).Run();
}

absl::Status JobStore::AskLocked(const std::string& job, JobRequest request) {
  return Statement(database_, "UPDATE jobs SET request = ? WHERE job = ?")
      .Bind(static_cast<std::int64_t>(request))
      .Bind(job)
      .Run();
}

absl::Status JobStore::Cancel(const std::string& job) {
  MutexLock lock(&mutex_);
  TANDEM_ASSIGN_OR_RETURN(const StoredJob before, GetLocked(job));
  switch (before.status.state()) {
    case v1::JOB_STATE_RUNNING:
      return AskLocked(job, JobRequest::kCancel);
    case v1::JOB_STATE_QUEUED:
    case v1::JOB_STATE_PAUSED:
      return TransitionLocked(job, v1::JOB_STATE_CANCELLED, "");
    default:
      return Refuse(before, "cancelled");
  }
}

absl::Status JobStore::Pause(const std::string& job) {
  MutexLock lock(&mutex_);
  TANDEM_ASSIGN_OR_RETURN(const StoredJob before, GetLocked(job));
  switch (before.status.state()) {
    case v1::JOB_STATE_RUNNING:
      if (before.request == JobRequest::kCancel) return Refuse(before, "paused: it is being cancelled");
      return AskLocked(job, JobRequest::kPause);
    case v1::JOB_STATE_QUEUED:
      return TransitionLocked(job, v1::JOB_STATE_PAUSED, "");
    case v1::JOB_STATE_PAUSED:
      return absl::OkStatus();
    default:
      return Refuse(before, "paused");
  }
}

absl::Status JobStore::Resume(const std::string& job) {
  MutexLock lock(&mutex_);
  TANDEM_ASSIGN_OR_RETURN(const StoredJob before, GetLocked(job));
  switch (before.status.state()) {
    case v1::JOB_STATE_RUNNING:
      if (before.request == JobRequest::kCancel) return Refuse(before, "resumed: it is being cancelled");
      return AskLocked(job, JobRequest::kNone);
    case v1::JOB_STATE_QUEUED:
      return absl::OkStatus();
    case v1::JOB_STATE_PAUSED:
    case v1::JOB_STATE_FAILED:
      return TransitionLocked(job, v1::JOB_STATE_QUEUED, "");
    default:
      return Refuse(before, "resumed");
  }
}

absl::Status JobStore::SetResident(const std::string& job) {
  MutexLock lock(&mutex_);
  return Statement(database_, "INSERT OR REPLACE INTO resident (slot, job) VALUES (0, ?)").Bind(job).Run();
}

absl::StatusOr<std::string> JobStore::resident() const {
  MutexLock lock(&mutex_);
  Statement select(database_, "SELECT job FROM resident WHERE slot = 0");
  TANDEM_ASSIGN_OR_RETURN(const bool is_found, select.Step());
  return is_found ? select.Text(0) : std::string();
}

}  // namespace tandem
