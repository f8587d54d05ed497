// Job stores of other builds: older ones are brought forward with their jobs, newer ones refused as they are.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sqlite3.h>

#include <fstream>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "common/base/clock.h"
#include "tests/trainer_server/support/fake_model.h"
#include "trainer_server/job/job_store.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;

std::string ReadText(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// Stores without a version had them too.
constexpr char kTablesOfSchemaOne[] = R"(
    CREATE TABLE jobs (ordinal INTEGER PRIMARY KEY AUTOINCREMENT, job TEXT NOT NULL UNIQUE, name TEXT NOT NULL,
      state INTEGER NOT NULL, request INTEGER NOT NULL DEFAULT 0, step INTEGER NOT NULL DEFAULT 0, num_steps INTEGER NOT NULL,
      error TEXT NOT NULL DEFAULT '', submitted_at TEXT NOT NULL, job_text TEXT NOT NULL);
    CREATE INDEX jobs_by_state ON jobs (state, ordinal);
    CREATE TABLE resident (slot INTEGER PRIMARY KEY CHECK (slot = 0), job TEXT NOT NULL);
)";

class Database {
 public:
  explicit Database(const std::string& path) { EXPECT_EQ(sqlite3_open(path.c_str(), &database_), SQLITE_OK); }
  ~Database() { sqlite3_close(database_); }
  void Run(const std::string& sql) {
    EXPECT_EQ(sqlite3_exec(database_, sql.c_str(), nullptr, nullptr, nullptr), SQLITE_OK) << sqlite3_errmsg(database_);
  }
  int Version() {
    sqlite3_stmt* statement = nullptr;
    EXPECT_EQ(sqlite3_prepare_v2(database_, "PRAGMA user_version", -1, &statement, nullptr), SQLITE_OK);
    EXPECT_EQ(sqlite3_step(statement), SQLITE_ROW);
    const int version = sqlite3_column_int(statement, 0);
    sqlite3_finalize(statement);
    return version;
  }

 private:
  sqlite3* database_ = nullptr;
};

TEST(JobStoreUpgradeTest, StoreWithoutASchemaVersionKeepsItsJobs) {
  const std::string path = FreshDirectory("job_store_unversioned") + "/jobs.sqlite";
  Database(path).Run(absl::StrCat(kTablesOfSchemaOne, R"(
    INSERT INTO jobs (job, name, state, step, num_steps, submitted_at, job_text)
      VALUES ('a-1', 'a', 2, 5, 7, '2026-01-01T00:00:00Z', 'text');
    INSERT INTO resident VALUES (0, 'a-1');)"));
  EXPECT_EQ(Database(path).Version(), 0);
  for (int life = 0; life < 2; ++life) {
    const auto store = JobStore::Open(path);
    ASSERT_TRUE(store.ok()) << store.status();
    const StoredJob job = *(*store)->Get("a-1");
    EXPECT_EQ(job.status.step(), 5u);
    EXPECT_EQ(job.job_text, "text");
    EXPECT_EQ(*(*store)->resident(), "a-1");
  }
  EXPECT_EQ(Database(path).Version(), JobStore::kSchemaVersion);
}

// As the build before queues had priorities and submitters left it.
TEST(JobStoreUpgradeTest, StoreOfSchemaOneGoesOnWithItsQueue) {
  const std::string path = FreshDirectory("job_store_one") + "/jobs.sqlite";
  Database(path).Run(absl::StrCat(kTablesOfSchemaOne, R"(
    INSERT INTO jobs (job, name, state, request, step, num_steps, error, submitted_at, job_text) VALUES
      ('a-1', 'a', 4, 0, 7, 7, '', '2026-01-01T00:00:00Z', 'text a'),
      ('b-1', 'b', 5, 0, 3, 7, 'why', '2026-01-01T00:00:01Z', 'text b'),
      ('c-1', 'c', 2, 1, 2, 7, '', '2026-01-01T00:00:02Z', 'text c'),
      ('d-1', 'd', 3, 0, 1, 7, '', '2026-01-01T00:00:03Z', 'text d'),
      ('e-1', 'e', 1, 0, 0, 7, '', '2026-01-01T00:00:04Z', 'text e'),
      ('f-1', 'f', 1, 0, 0, 7, '', '2026-01-01T00:00:05Z', 'text f');
    PRAGMA user_version = 1;)"));
  const auto store = JobStore::Open(path);
  ASSERT_TRUE(store.ok()) << store.status();
  EXPECT_EQ(Database(path).Version(), 2);
  const StoredJob running = **(*store)->Next();
  EXPECT_EQ(running.status.job(), "c-1");
  EXPECT_EQ(running.request, JobRequest::kPause);
  ASSERT_TRUE((*store)->Transition("c-1", v1::JOB_STATE_PAUSED, "").ok());
  const StoredJob queued = **(*store)->Next();
  EXPECT_EQ(queued.status.job(), "e-1");
  EXPECT_EQ(queued.status.queue_position(), 1u);
  EXPECT_EQ(queued.status.priority(), 0);
  EXPECT_EQ(queued.status.submitter(), "");
  EXPECT_EQ(queued.ready_at, absl::InfinitePast());
  EXPECT_EQ(queued.job_text, "text e");
  EXPECT_EQ((*store)->Get("b-1")->status.error(), "why");
  ASSERT_TRUE((*store)->Resume("b-1").ok());
  ASSERT_TRUE((*store)->SetPriority("f-1", 3).ok());
  EXPECT_EQ((**(*store)->Next()).status.job(), "f-1");
  v1::JobSpec after;
  after.set_name("g");
  after.set_num_steps(1);
  after.add_after("e-1");
  const auto behind = (*store)->Add(after, "text g", "ada");
  ASSERT_TRUE(behind.ok()) << behind.status();
  EXPECT_EQ((*store)->Get(*behind)->status.waiting_for(), "job e-1 (queued)");
  const auto all = (*store)->List(10, std::nullopt, {});
  EXPECT_EQ(all->size(), 7u);
}

TEST(JobStoreUpgradeTest, NewerSchemaIsRefusedByNumberAndLeftAsItIs) {
  const std::string path = FreshDirectory("job_store_newer") + "/jobs.sqlite";
  ASSERT_TRUE(JobStore::Open(path).ok());
  Database(path).Run("PRAGMA user_version = 99");
  const absl::Status refused = JobStore::Open(path).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr(path + " has schema 99"));
  EXPECT_EQ(Database(path).Version(), 99);
}

TEST(JobStoreUpgradeTest, MigrationThatFailsLeavesTheFileAtItsSchema) {
  const std::string path = FreshDirectory("job_store_halfway") + "/jobs.sqlite";
  Database(path).Run("CREATE TABLE jobs (ordinal INTEGER)");  // another's: it has no column to index
  const absl::Status refused = JobStore::Open(path).status();
  EXPECT_TRUE(absl::IsInternal(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("to schema 1"));
  EXPECT_EQ(Database(path).Version(), 0);
}

TEST(JobStoreUpgradeTest, DamagedFileIsRefusedByNameAndLeftAsItIs) {
  const std::string path = FreshDirectory("job_store_damaged") + "/jobs.sqlite";
  v1::JobSpec spec;
  spec.set_num_steps(1);
  {
    const auto store = *JobStore::Open(path);
    for (int i = 0; i < 200; ++i) {
      spec.set_name(absl::StrCat("job", i));
      ASSERT_TRUE(store->Add(spec, std::string(2000, 'x'), "ada").ok());
    }
  }
  std::string whole = ReadText(path);
  for (const std::size_t page : {whole.size() / 4096 / 3, whole.size() / 4096 / 2}) {
    std::string damaged = whole;
    damaged.replace(page * 4096, 512, 512, '\xff');
    std::ofstream(path, std::ios::binary) << damaged;
    const absl::Status refused = JobStore::Open(path).status();
    EXPECT_TRUE(absl::IsDataLoss(refused)) << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr(path));
    EXPECT_THAT(std::string(refused.message()), HasSubstr("bring a copy back"));
    EXPECT_EQ(ReadText(path), damaged);
  }
  std::ofstream(path, std::ios::binary) << whole;
  EXPECT_TRUE(JobStore::Open(path).ok());
}

TEST(JobStoreUpgradeTest, TruncatedFileIsRefusedByName) {
  const std::string path = FreshDirectory("job_store_truncated") + "/jobs.sqlite";
  ASSERT_TRUE(JobStore::Open(path).ok());
  std::filesystem::resize_file(path, 3000);
  const absl::Status refused = JobStore::Open(path).status();
  EXPECT_FALSE(refused.ok());
  EXPECT_THAT(std::string(refused.message()), HasSubstr(path));
}

// Device time was not counted then.
TEST(JobStoreUpgradeTest, ManyJobsOfAnOlderBuildDoNotSlowTheQueue) {
  const std::string path = FreshDirectory("job_store_many") + "/jobs.sqlite";
  ASSERT_TRUE(JobStore::Open(path).ok());
  Database(path).Run(R"(
    WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 100000)
    INSERT INTO jobs (job, name, state, num_steps, submitted_at, job_text) SELECT 'a-' || i, 'a', 4, 7, '', '' FROM n;)");
  const auto store = *JobStore::Open(path);
  v1::JobSpec spec;
  spec.set_name("b");
  spec.set_num_steps(1);
  const std::string job = *store->Add(spec, "", "ada");
  absl::Duration ordered;
  for (int i = 0; i < 50; ++i) {
    ASSERT_TRUE(store->SetPriority(job, i).ok());
    const MonotonicTime begin = MonotonicTime::Now();
    EXPECT_EQ((*store->Next())->status.job(), job);
    ordered += MonotonicTime::Now() - begin;
  }
  EXPECT_LT(ordered, absl::Milliseconds(500));
}

}  // namespace
}  // namespace tandem
