// Job stores of other builds: older ones are brought forward with their jobs, newer ones refused as they are.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sqlite3.h>

#include "tests/trainer_server/support/fake_model.h"
#include "trainer_server/job/job_store.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;

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
  Database(path).Run(R"(
    CREATE TABLE jobs (ordinal INTEGER PRIMARY KEY AUTOINCREMENT, job TEXT NOT NULL UNIQUE, name TEXT NOT NULL,
      state INTEGER NOT NULL, request INTEGER NOT NULL DEFAULT 0, step INTEGER NOT NULL DEFAULT 0, num_steps INTEGER NOT NULL,
      error TEXT NOT NULL DEFAULT '', submitted_at TEXT NOT NULL, job_text TEXT NOT NULL);
    CREATE INDEX jobs_by_state ON jobs (state, ordinal);
    CREATE TABLE resident (slot INTEGER PRIMARY KEY CHECK (slot = 0), job TEXT NOT NULL);
    INSERT INTO jobs (job, name, state, step, num_steps, submitted_at, job_text)
      VALUES ('a-1', 'a', 2, 5, 7, '2026-01-01T00:00:00Z', 'text');
    INSERT INTO resident VALUES (0, 'a-1');)");
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

TEST(JobStoreUpgradeTest, TruncatedFileIsRefusedByName) {
  const std::string path = FreshDirectory("job_store_truncated") + "/jobs.sqlite";
  ASSERT_TRUE(JobStore::Open(path).ok());
  std::filesystem::resize_file(path, 3000);
  const absl::Status refused = JobStore::Open(path).status();
  EXPECT_FALSE(refused.ok());
  EXPECT_THAT(std::string(refused.message()), HasSubstr(path));
}

}  // namespace
}  // namespace tandem
