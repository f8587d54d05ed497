#include "trainer_server/job/job_store.h"

#include <sqlite3.h>

#include <algorithm>
#include <cerrno>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <random>
#include <string_view>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "common/model/utf8.h"
#include "common/rpc/job_state.h"

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
)",
                                       // num_unmet: prerequisites that have not succeeded. Times are Unix seconds.
                                       R"(
  ALTER TABLE jobs ADD COLUMN priority INTEGER NOT NULL DEFAULT 0;
  ALTER TABLE jobs ADD COLUMN submitter TEXT NOT NULL DEFAULT '';
  ALTER TABLE jobs ADD COLUMN num_unmet INTEGER NOT NULL DEFAULT 0;
  ALTER TABLE jobs ADD COLUMN ready_at REAL NOT NULL DEFAULT 0;
  ALTER TABLE jobs ADD COLUMN device_seconds REAL NOT NULL DEFAULT 0;
  CREATE INDEX jobs_by_name ON jobs (name, submitter, ordinal);
  CREATE TABLE prerequisites (job TEXT NOT NULL, prerequisite TEXT NOT NULL, PRIMARY KEY (job, prerequisite)) WITHOUT ROWID;
  CREATE INDEX dependents ON prerequisites (prerequisite, job);
  CREATE TABLE device_time (submitter TEXT PRIMARY KEY, seconds REAL NOT NULL, at REAL NOT NULL) WITHOUT ROWID;
)"};
static_assert(std::size(kMigrations) == JobStore::kSchemaVersion);
constexpr char kColumns[] =
    "ordinal, job, name, state, request, step, num_steps, error, submitted_at, priority, submitter, ready_at, device_seconds";
constexpr int kNumColumns = 13;
constexpr char kQueueColumns[] = "ordinal, state, num_unmet, priority, submitter";
constexpr int kIdAttempts = 16;
constexpr std::size_t kNamedPrerequisites = 3;   // that a job is said to wait for
constexpr std::size_t kMaxReasonBytes = 512;     // of an error that others fail with
constexpr int kRecentJobs = 20;                  // whose device time the next one's is expected to be like
constexpr double kExpectedJobSeconds = 60;       // before any has succeeded
constexpr double kForgottenDeviceSeconds = 0.5;  // of a submitter, decayed

constexpr char kDamagedAdvice[] =
    ": bring a copy back, or move it and its -wal and -shm away to begin with an empty one; what the jobs have made is not in it";

absl::Status SqlError(sqlite3* database, const std::string& what) {
  const char* const path = sqlite3_db_filename(database, "main");
  const std::string fault = absl::StrCat("job store ", path == nullptr ? "" : path, ": ", what, ": ", sqlite3_errmsg(database));
  const int system_error = sqlite3_system_errno(database);
  int code = sqlite3_errcode(database) & 0xff;
  if (code == SQLITE_IOERR && (system_error == ENOSPC || system_error == EDQUOT)) code = SQLITE_FULL;
  switch (code) {
    case SQLITE_FULL:
      return absl::ResourceExhaustedError(fault + ": make room");
    case SQLITE_CORRUPT:
    case SQLITE_NOTADB:
      return absl::DataLossError(fault + kDamagedAdvice);
    default:
      return absl::InternalError(fault);
  }
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
  Statement& BindReal(double value) {
    if (result_ == SQLITE_OK) result_ = sqlite3_bind_double(statement_, ++bound_, value);
    return *this;
  }
  // True when there is a row; false at the end. Errors: ALREADY_EXISTS (a value that must be unique), INTERNAL.
  absl::StatusOr<bool> Step() {
    if (result_ == SQLITE_OK) {
      const int step = sqlite3_step(statement_);
      if (step == SQLITE_ROW) return true;
      if (step == SQLITE_DONE) return false;
      if (step == SQLITE_CONSTRAINT_UNIQUE) return absl::AlreadyExistsError(sqlite3_errmsg(database_));
    }
    return SqlError(database_, sql_);
  }
  absl::Status Run() { return Step().status(); }
  std::int64_t Integer(int column) const { return sqlite3_column_int64(statement_, column); }
  double Real(int column) const { return sqlite3_column_double(statement_, column); }
  // UTF-8, as messages must be.
  std::string Text(int column) const {
    const unsigned char* const text = sqlite3_column_text(statement_, column);
    const auto size = static_cast<std::size_t>(sqlite3_column_bytes(statement_, column));
    return text == nullptr ? std::string() : ReplaceIllFormed({static_cast<const char*>(static_cast<const void*>(text)), size});
  }

 private:
  sqlite3* const database_;
  const std::string sql_;
  sqlite3_stmt* statement_ = nullptr;
  int bound_ = 0;
  int result_ = SQLITE_OK;
};

double UnixSeconds(absl::Time time) { return absl::ToDoubleSeconds(time - absl::UnixEpoch()); }
absl::Time FromUnixSeconds(double seconds) { return absl::UnixEpoch() + absl::Seconds(seconds); }

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
  job.status.set_priority(static_cast<std::int32_t>(row.Integer(9)));
  job.status.set_submitter(row.Text(10));
  if (row.Real(11) > 0) job.ready_at = FromUnixSeconds(row.Real(11));
  job.status.set_device_seconds(row.Real(12));
  return job;
}

absl::Status Execute(sqlite3* database, const std::string& sql, const std::string& what) {
  return sqlite3_exec(database, sql.c_str(), nullptr, nullptr, nullptr) == SQLITE_OK ? absl::OkStatus()
                                                                                     : SqlError(database, what);
}

// What was written since Begin is undone, unless Commit says OK.
class Transaction {
 public:
  static absl::StatusOr<Transaction> Begin(sqlite3* database) {
    TANDEM_RETURN_IF_ERROR(Execute(database, "BEGIN IMMEDIATE", "beginning a transaction"));
    return Transaction(database);
  }
  Transaction(Transaction&& other) noexcept : database_(std::exchange(other.database_, nullptr)) {}
  Transaction& operator=(Transaction&&) = delete;
  ~Transaction() {
    if (database_ != nullptr) sqlite3_exec(database_, "ROLLBACK", nullptr, nullptr, nullptr);
  }
  absl::Status Commit() {
    TANDEM_RETURN_IF_ERROR(Execute(database_, "COMMIT", "committing"));
    database_ = nullptr;
    return absl::OkStatus();
  }

 private:
  explicit Transaction(sqlite3* database) : database_(database) {}
  sqlite3* database_;
};

// A page that is damaged is found here, not when a job is about to need it.
absl::Status CheckWhole(sqlite3* database, const std::string& path) {
  Statement check(database, "PRAGMA quick_check(1)");
  TANDEM_RETURN_IF_ERROR(Annotate(check.Run(), "checking " + path));
  if (check.Text(0) == "ok") return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("job store ", path, " is damaged: ", check.Text(0), kDamagedAdvice));
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

bool IsActive(v1::JobState state) {
  return state == v1::JOB_STATE_QUEUED || state == v1::JOB_STATE_RUNNING || state == v1::JOB_STATE_PAUSED;
}

absl::Status Refuse(const StoredJob& job, const std::string& why) {
  return absl::FailedPreconditionError(absl::StrCat("job ", job.status.job(), " is ", StateWord(job.status.state()), why));
}

struct Prerequisite {
  std::string job;
  v1::JobState state;
};

absl::StatusOr<std::vector<Prerequisite>> ReadPrerequisites(sqlite3* database, const std::string& job) {
  Statement select(database,
                   "SELECT jobs.job, jobs.state FROM prerequisites JOIN jobs ON jobs.job = prerequisites.prerequisite "
                   "WHERE prerequisites.job = ? ORDER BY jobs.ordinal");
  select.Bind(job);
  std::vector<Prerequisite> found;
  while (true) {
    TANDEM_ASSIGN_OR_RETURN(const bool is_found, select.Step());
    if (!is_found) return found;
    found.push_back({select.Text(0), static_cast<v1::JobState>(select.Integer(1))});
  }
}

absl::StatusOr<std::vector<std::string>> ReadDependents(sqlite3* database, const std::string& job) {
  Statement select(database, "SELECT job FROM prerequisites WHERE prerequisite = ?");
  select.Bind(job);
  std::vector<std::string> found;
  while (true) {
    TANDEM_ASSIGN_OR_RETURN(const bool is_found, select.Step());
    if (!is_found) return found;
    found.push_back(select.Text(0));
  }
}

}  // namespace

std::vector<std::string> PrerequisitesOf(const v1::JobSpec& spec) {
  std::vector<std::string> jobs(spec.after().begin(), spec.after().end());
  if (!spec.adapter().start_job().empty()) jobs.push_back(spec.adapter().start_job());
  std::ranges::sort(jobs);
  jobs.erase(std::unique(jobs.begin(), jobs.end()), jobs.end());
  return jobs;
}

absl::StatusOr<std::unique_ptr<JobStore>> JobStore::Open(const std::string& path, const Limits& limits) {
  sqlite3* database = nullptr;
  const int opened = sqlite3_open_v2(
      path.c_str(), &database, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_NOMUTEX | SQLITE_OPEN_EXRESCODE, nullptr);
  std::unique_ptr<JobStore> store(new JobStore(database, limits));
  if (opened != SQLITE_OK) return SqlError(database, "opening " + path);
  sqlite3_busy_timeout(database, 5000);
  TANDEM_RETURN_IF_ERROR(Execute(database, kSettings, "preparing " + path));
  TANDEM_RETURN_IF_ERROR(CheckWhole(database, path));
  TANDEM_RETURN_IF_ERROR(Migrate(database, path));
  MutexLock lock(&store->mutex_);
  TANDEM_RETURN_IF_ERROR(store->Load());
  return store;
}

JobStore::~JobStore() { sqlite3_close(database_); }

absl::Status JobStore::Load() {
  std::vector<std::string> active;
  Statement select(database_, "SELECT job FROM jobs WHERE state IN (?, ?, ?)");
  select.Bind(v1::JOB_STATE_QUEUED).Bind(v1::JOB_STATE_RUNNING).Bind(v1::JOB_STATE_PAUSED);
  while (true) {
    TANDEM_ASSIGN_OR_RETURN(const bool is_found, select.Step());
    if (!is_found) break;
    active.push_back(select.Text(0));
  }
  TANDEM_RETURN_IF_ERROR(Refresh(active));
  Statement usage(database_, "SELECT submitter, seconds, at FROM device_time");
  while (true) {
    TANDEM_ASSIGN_OR_RETURN(const bool is_found, usage.Step());
    if (!is_found) return absl::OkStatus();
    usage_[usage.Text(0)] = {usage.Real(1), FromUnixSeconds(usage.Real(2))};
  }
}

absl::Status JobStore::Refresh(std::span<const std::string> jobs) {
  is_order_known_ = false;
  for (const std::string& job : jobs) {
    Statement select(database_, absl::StrCat("SELECT ", kQueueColumns, " FROM jobs WHERE job = ?"));
    TANDEM_RETURN_IF_ERROR(select.Bind(job).Run());
    const std::int64_t ordinal = select.Integer(0);
    const auto state = static_cast<v1::JobState>(select.Integer(1));
    if (!IsActive(state)) {
      entries_.erase(ordinal);
      continue;
    }
    entries_[ordinal] = {.state = state,
                         .is_blocked = select.Integer(2) > 0,
                         .queued = {ordinal, static_cast<std::int32_t>(select.Integer(3)), select.Text(4)}};
  }
  return absl::OkStatus();
}

absl::Status JobStore::CheckRoom(const std::string& submitter) const {
  int num_queued = 0, num_own = 0;
  for (const auto& [ordinal, entry] : entries_) {
    if (entry.state == v1::JOB_STATE_RUNNING) continue;
    ++num_queued;
    num_own += entry.queued.submitter == submitter ? 1 : 0;
  }
  const auto refuse = [](const std::string& whose, int count, const char* flag, int limit) {
    return absl::ResourceExhaustedError(absl::StrCat("the queue holds ", count, " jobs", whose,
                                                     " that are queued or paused; the limit is ", limit, " (", flag,
                                                     "): wait for some to end, or cancel some"));
  };
  if (num_queued >= limits_.max_queued) return refuse("", num_queued, "--max_queued_jobs", limits_.max_queued);
  if (num_own >= limits_.max_queued_of_submitter) {
    return refuse(absl::StrCat(" of ", submitter), num_own, "--max_queued_jobs_of_submitter", limits_.max_queued_of_submitter);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> JobStore::Add(const v1::JobSpec& spec, const std::string& job_text, const std::string& submitter) {
  const std::vector<std::string> prerequisites = PrerequisitesOf(spec);
  std::random_device random;
  MutexLock lock(&mutex_);
  TANDEM_RETURN_IF_ERROR(CheckRoom(submitter));
  int num_unmet = 0;
  for (const std::string& prerequisite : prerequisites) {
    TANDEM_ASSIGN_OR_RETURN(const StoredJob before, GetLocked(prerequisite));
    if (EndedWithoutSuccess(before.status.state())) return Refuse(before, ": no job can come after it");
    num_unmet += before.status.state() == v1::JOB_STATE_SUCCEEDED ? 0 : 1;
  }
  TANDEM_ASSIGN_OR_RETURN(Transaction transaction, Transaction::Begin(database_));
  const absl::Time now = absl::Now();
  std::string job;
  absl::Status inserted;
  for (int attempt = 0; attempt < kIdAttempts; ++attempt) {  // among thousands of one name some suffix is there already
    job = absl::StrFormat("%s-%06x", spec.name(), random() & 0xffffff);
    Statement insert(
        database_,
        "INSERT INTO jobs (job, name, state, num_steps, submitted_at, job_text, priority, submitter, num_unmet, ready_at) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)");
    insert.Bind(job).Bind(spec.name()).Bind(v1::JOB_STATE_QUEUED).Bind(spec.num_steps());
    insert.Bind(absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", now, absl::UTCTimeZone())).Bind(job_text);
    insert.Bind(spec.priority()).Bind(submitter).Bind(num_unmet).BindReal(num_unmet == 0 ? UnixSeconds(now) : 0);
    inserted = insert.Run();
    if (!absl::IsAlreadyExists(inserted)) break;
  }
  TANDEM_RETURN_IF_ERROR(inserted);
  for (const std::string& prerequisite : prerequisites) {
    Statement insert(database_, "INSERT INTO prerequisites (job, prerequisite) VALUES (?, ?)");
    TANDEM_RETURN_IF_ERROR(insert.Bind(job).Bind(prerequisite).Run());
  }
  TANDEM_RETURN_IF_ERROR(transaction.Commit());
  TANDEM_RETURN_IF_ERROR(Refresh({&job, 1}));
  return job;
}

absl::StatusOr<StoredJob> JobStore::Get(const std::string& job) const {
  MutexLock lock(&mutex_);
  return GetLocked(job);
}

absl::StatusOr<StoredJob> JobStore::GetLocked(const std::string& job) const {
  Statement select(database_, absl::StrCat("SELECT ", kColumns, ", job_text FROM jobs WHERE job = ?"));
  TANDEM_ASSIGN_OR_RETURN(const bool is_found, select.Bind(job).Step());
  if (!is_found) return absl::NotFoundError(absl::StrCat("no job '", job, "'"));
  StoredJob found = ReadJob(select);
  found.job_text = select.Text(kNumColumns);
  TANDEM_RETURN_IF_ERROR(FillPlace(&found));
  return found;
}

absl::StatusOr<StoredJob> JobStore::Find(const std::string& id_or_name, const std::string& submitter) const {
  MutexLock lock(&mutex_);
  absl::StatusOr<StoredJob> by_id = GetLocked(id_or_name);
  if (!absl::IsNotFound(by_id.status())) return by_id;
  Statement select(database_, "SELECT job FROM jobs WHERE name = ? AND submitter = ? ORDER BY ordinal DESC LIMIT 1");
  TANDEM_ASSIGN_OR_RETURN(const bool is_found, select.Bind(id_or_name).Bind(submitter).Step());
  if (!is_found) return by_id;
  return GetLocked(select.Text(0));
}

absl::StatusOr<std::vector<StoredJob>> JobStore::List(int limit, std::optional<std::int64_t> before_ordinal,
                                                      std::span<const v1::JobState> states) const {
  const std::string any_of =
      absl::StrJoin(states, ", ", [](std::string* out, v1::JobState state) { absl::StrAppend(out, static_cast<int>(state)); });
  const std::string filter = states.empty() ? "" : absl::StrCat(" AND state IN (", any_of, ")");
  MutexLock lock(&mutex_);
  Statement select(database_,
                   absl::StrCat("SELECT ", kColumns, " FROM jobs WHERE ordinal < ?", filter, " ORDER BY ordinal DESC LIMIT ?"));
  select.Bind(before_ordinal.value_or(std::numeric_limits<std::int64_t>::max())).Bind(limit);
  std::vector<StoredJob> jobs;
  while (true) {
    TANDEM_ASSIGN_OR_RETURN(const bool is_found, select.Step());
    if (!is_found) return jobs;
    jobs.push_back(ReadJob(select));
    TANDEM_RETURN_IF_ERROR(FillPlace(&jobs.back()));
  }
}

absl::Status JobStore::OrderLocked() const {
  if (is_order_known_) return absl::OkStatus();
  Statement select(database_,
                   "SELECT AVG(device_seconds) FROM "
                   "(SELECT device_seconds FROM jobs WHERE state = ? ORDER BY ordinal DESC LIMIT ?) WHERE device_seconds > 0");
  TANDEM_RETURN_IF_ERROR(select.Bind(v1::JOB_STATE_SUCCEEDED).Bind(kRecentJobs).Run());
  const double expected = select.Real(0) > 0 ? select.Real(0) : kExpectedJobSeconds;
  std::vector<QueuedJob> ready;
  running_.reset();
  for (const auto& [ordinal, entry] : entries_) {
    if (entry.state == v1::JOB_STATE_QUEUED && !entry.is_blocked) ready.push_back(entry.queued);
    if (entry.state == v1::JOB_STATE_RUNNING && !running_.has_value()) running_ = ordinal;
  }
  DeviceSeconds used;
  const absl::Time now = absl::Now();
  for (const auto& [submitter, usage] : usage_) used[submitter] = DecayedSeconds(usage.seconds, now - usage.at);
  if (running_.has_value()) {  // what it will yet use
    Statement held(database_, "SELECT device_seconds FROM jobs WHERE ordinal = ?");
    TANDEM_RETURN_IF_ERROR(held.Bind(*running_).Run());
    used[entries_.at(*running_).queued.submitter] += std::max(expected - held.Real(0), 0.0);
  }
  order_ = OrderQueue(ready, std::move(used), expected);
  position_of_.clear();
  for (std::size_t i = 0; i < order_.size(); ++i) position_of_[order_[i]] = static_cast<std::uint32_t>(i + 1);
  is_order_known_ = true;
  return absl::OkStatus();
}

absl::Status JobStore::FillPlace(StoredJob* job) const {
  TANDEM_ASSIGN_OR_RETURN(const std::vector<Prerequisite> prerequisites, ReadPrerequisites(database_, job->status.job()));
  std::vector<std::string> unmet;
  for (const Prerequisite& prerequisite : prerequisites) {
    job->status.add_after(prerequisite.job);
    if (prerequisite.state != v1::JOB_STATE_SUCCEEDED)
      unmet.push_back(absl::StrCat("job ", prerequisite.job, " (", StateWord(prerequisite.state), ")"));
  }
  if (job->status.state() != v1::JOB_STATE_QUEUED) return absl::OkStatus();
  if (!unmet.empty()) {
    const std::size_t num_further = unmet.size() - std::min(unmet.size(), kNamedPrerequisites);
    unmet.resize(unmet.size() - num_further);
    job->status.set_waiting_for(
        absl::StrCat(absl::StrJoin(unmet, ", "), num_further > 0 ? absl::StrCat(" and ", num_further, " further jobs") : ""));
    return absl::OkStatus();
  }
  TANDEM_RETURN_IF_ERROR(OrderLocked());
  const auto position = position_of_.find(job->ordinal);
  if (position == position_of_.end()) return absl::OkStatus();
  job->status.set_queue_position(position->second);
  const int num_before = static_cast<int>(position->second) - 1 + (running_.has_value() ? 1 : 0);
  if (num_before > 0) job->status.set_waiting_for(absl::StrCat(num_before, num_before == 1 ? " job" : " jobs", " before it"));
  return absl::OkStatus();
}

absl::StatusOr<std::optional<StoredJob>> JobStore::Next() const {
  MutexLock lock(&mutex_);
  TANDEM_RETURN_IF_ERROR(OrderLocked());
  if (!running_.has_value() && order_.empty()) return std::nullopt;
  Statement select(database_, "SELECT job FROM jobs WHERE ordinal = ?");
  TANDEM_RETURN_IF_ERROR(select.Bind(running_.has_value() ? *running_ : order_.front()).Run());
  return GetLocked(select.Text(0));
}

QueueDepth JobStore::depth() const {
  MutexLock lock(&mutex_);
  QueueDepth depth;
  for (const auto& [ordinal, entry] : entries_) {
    if (entry.state == v1::JOB_STATE_RUNNING) ++depth.running;
    if (entry.state == v1::JOB_STATE_PAUSED) ++depth.paused;
    if (entry.state == v1::JOB_STATE_QUEUED) ++(entry.is_blocked ? depth.blocked : depth.ready);
  }
  return depth;
}

absl::Status JobStore::Transition(const std::string& job, v1::JobState to, const std::string& error) {
  MutexLock lock(&mutex_);
  return TransitionLocked(job, to, error);
}

absl::Status JobStore::FailDependents(const std::string& job, const std::string& reason, std::vector<std::string>* changed) {
  std::vector<std::string> failed = {job};
  for (std::size_t i = 0; i < failed.size(); ++i) {  // grows: each may have dependents of its own
    TANDEM_ASSIGN_OR_RETURN(const std::vector<std::string> dependents, ReadDependents(database_, failed[i]));
    for (const std::string& dependent : dependents) {
      const std::string chain = i == 0 ? "" : absl::StrCat("job ", failed[i], " failed because ");
      Statement update(database_, "UPDATE jobs SET state = ?, error = ?, request = 0 WHERE job = ? AND state IN (?, ?)");
      update.Bind(v1::JOB_STATE_FAILED).Bind(absl::StrCat("it comes after others: ", chain, reason)).Bind(dependent);
      TANDEM_RETURN_IF_ERROR(update.Bind(v1::JOB_STATE_QUEUED).Bind(v1::JOB_STATE_PAUSED).Run());
      if (sqlite3_changes(database_) == 0) continue;
      failed.push_back(dependent);
      changed->push_back(dependent);
    }
  }
  return absl::OkStatus();
}

absl::Status JobStore::TransitionLocked(const std::string& job, v1::JobState to, const std::string& error) {
  TANDEM_ASSIGN_OR_RETURN(const StoredJob before, GetLocked(job));
  if (!IsAllowed(before.status.state(), to)) return Refuse(before, " and cannot be made " + StateWord(to));
  std::vector<std::string> changed = {job};
  const double now = UnixSeconds(absl::Now());
  TANDEM_ASSIGN_OR_RETURN(Transaction transaction, Transaction::Begin(database_));
  // What was asked of the job has been done, or no longer matters; a life that goes on must still hear it.
  const bool keeps_request = to == v1::JOB_STATE_RUNNING;
  Statement update(database_,
                   "UPDATE jobs SET state = ?, error = ?, request = ?, "
                   "ready_at = CASE WHEN ? AND num_unmet = 0 THEN ? ELSE ready_at END WHERE job = ?");
  update.Bind(to).Bind(error).Bind(keeps_request ? static_cast<std::int64_t>(before.request) : 0);
  TANDEM_RETURN_IF_ERROR(update.Bind(to == v1::JOB_STATE_QUEUED ? 1 : 0).BindReal(now).Bind(job).Run());
  if (to == v1::JOB_STATE_SUCCEEDED) {
    TANDEM_ASSIGN_OR_RETURN(const std::vector<std::string> dependents, ReadDependents(database_, job));
    for (const std::string& dependent : dependents) {
      Statement meet(database_,
                     "UPDATE jobs SET num_unmet = num_unmet - 1, ready_at = CASE WHEN num_unmet = 1 THEN ? ELSE ready_at END "
                     "WHERE job = ?");
      TANDEM_RETURN_IF_ERROR(meet.BindReal(now).Bind(dependent).Run());
      changed.push_back(dependent);
    }
  } else if (EndedWithoutSuccess(to)) {
    const std::string why =
        to == v1::JOB_STATE_CANCELLED ? " was cancelled" : absl::StrCat(" failed: ", error.substr(0, kMaxReasonBytes));
    TANDEM_RETURN_IF_ERROR(FailDependents(job, absl::StrCat("job ", job, why), &changed));
  }
  TANDEM_RETURN_IF_ERROR(transaction.Commit());
  return Refresh(changed);
}

absl::Status JobStore::SetStep(const std::string& job, std::uint32_t step) {
  MutexLock lock(&mutex_);
  return Statement(database_, "UPDATE jobs SET step = ? WHERE job = ?").Bind(step).Bind(job).Run();
}

absl::Status JobStore::Charge(const std::string& job, absl::Duration held) {
  const double seconds = std::max(absl::ToDoubleSeconds(held), 0.0);
  MutexLock lock(&mutex_);
  TANDEM_ASSIGN_OR_RETURN(const StoredJob charged, GetLocked(job));
  const std::string& submitter = charged.status.submitter();
  const absl::Time now = absl::Now();
  Usage usage{seconds, now};
  if (const auto found = usage_.find(submitter); found != usage_.end())
    usage.seconds += DecayedSeconds(found->second.seconds, now - found->second.at);
  TANDEM_ASSIGN_OR_RETURN(Transaction transaction, Transaction::Begin(database_));
  Statement update(database_, "UPDATE jobs SET device_seconds = device_seconds + ? WHERE job = ?");
  TANDEM_RETURN_IF_ERROR(update.BindReal(seconds).Bind(job).Run());
  Statement replace(database_, "INSERT OR REPLACE INTO device_time (submitter, seconds, at) VALUES (?, ?, ?)");
  TANDEM_RETURN_IF_ERROR(replace.Bind(submitter).BindReal(usage.seconds).BindReal(UnixSeconds(now)).Run());
  // Of all names that ever were, those that no longer count go.
  std::vector<std::string> forgotten;
  for (const auto& [name, other] : usage_) {
    if (name == submitter || DecayedSeconds(other.seconds, now - other.at) >= kForgottenDeviceSeconds) continue;
    TANDEM_RETURN_IF_ERROR(Statement(database_, "DELETE FROM device_time WHERE submitter = ?").Bind(name).Run());
    forgotten.push_back(name);
  }
  TANDEM_RETURN_IF_ERROR(transaction.Commit());
  for (const std::string& name : forgotten) usage_.erase(name);
  usage_[submitter] = usage;
  is_order_known_ = false;
  return absl::OkStatus();
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
      return Refuse(before, " and cannot be cancelled");
  }
}

absl::Status JobStore::Pause(const std::string& job) {
  MutexLock lock(&mutex_);
  TANDEM_ASSIGN_OR_RETURN(const StoredJob before, GetLocked(job));
  switch (before.status.state()) {
    case v1::JOB_STATE_RUNNING:
      if (before.request == JobRequest::kCancel) return Refuse(before, " and cannot be paused: it is being cancelled");
      return AskLocked(job, JobRequest::kPause);
    case v1::JOB_STATE_QUEUED:
      return TransitionLocked(job, v1::JOB_STATE_PAUSED, "");
    case v1::JOB_STATE_PAUSED:
      return absl::OkStatus();
    default:
      return Refuse(before, " and cannot be paused");
  }
}

absl::Status JobStore::Resume(const std::string& job) {
  MutexLock lock(&mutex_);
  TANDEM_ASSIGN_OR_RETURN(const StoredJob before, GetLocked(job));
  switch (before.status.state()) {
    case v1::JOB_STATE_RUNNING:
      if (before.request == JobRequest::kCancel) return Refuse(before, " and cannot be resumed: it is being cancelled");
      return AskLocked(job, JobRequest::kNone);
    case v1::JOB_STATE_QUEUED:
      return absl::OkStatus();
    case v1::JOB_STATE_FAILED: {
      TANDEM_RETURN_IF_ERROR(CheckRoom(before.status.submitter()));
      TANDEM_ASSIGN_OR_RETURN(const std::vector<Prerequisite> prerequisites, ReadPrerequisites(database_, job));
      for (const Prerequisite& prerequisite : prerequisites) {
        if (EndedWithoutSuccess(prerequisite.state))
          return Refuse(before, absl::StrCat(" and cannot be resumed: it comes after job ", prerequisite.job, ", which is ",
                                             StateWord(prerequisite.state)));
      }
      return TransitionLocked(job, v1::JOB_STATE_QUEUED, "");
    }
    case v1::JOB_STATE_PAUSED:
      return TransitionLocked(job, v1::JOB_STATE_QUEUED, "");
    default:
      return Refuse(before, " and cannot be resumed");
  }
}

absl::Status JobStore::SetPriority(const std::string& job, std::int32_t priority) {
  if (priority < -kMaxPriority || priority > kMaxPriority) {
    return absl::InvalidArgumentError(absl::StrCat("priority: ", priority, "; must be ", -kMaxPriority, " to ", kMaxPriority));
  }
  MutexLock lock(&mutex_);
  TANDEM_ASSIGN_OR_RETURN(const StoredJob before, GetLocked(job));
  const v1::JobState state = before.status.state();
  if (state != v1::JOB_STATE_QUEUED && state != v1::JOB_STATE_PAUSED)
    return Refuse(before, " and cannot be given another priority");
  TANDEM_RETURN_IF_ERROR(Statement(database_, "UPDATE jobs SET priority = ? WHERE job = ?").Bind(priority).Bind(job).Run());
  return Refresh({&job, 1});
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
