#include "trainer_server/checkpoint/checkpoint_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <numeric>

#include "tests/trainer_server/support/fake_model.h"

namespace tandem {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr const char* kFiles[] = {"adapter.bin", "first_moments.bin", "second_moments.bin",
                                  "state.json",  "job.textproto",     "manifest.json"};

struct Arrays {
  explicit Arrays(int first = 0) : adapter(64), first_moments(64), second_moments(64) {
    int value = first;
    for (auto* array : {&adapter, &first_moments, &second_moments}) {
      for (std::byte& byte : *array) byte = static_cast<std::byte>(value++ & 0xff);
    }
  }
  CheckpointArrays view() {
    return {.adapter = adapter, .first_moments = first_moments, .second_moments = second_moments, .reference = {}};
  }
  bool operator==(const Arrays&) const = default;
  std::vector<std::byte> adapter, first_moments, second_moments;
};

CheckpointState StateAt(std::uint64_t step) {
  return {.step = step,
          .weight_version = step + 1,
          .optimizer_steps = 2 * step,
          .prompt_cursor = 8 * step,
          .seed = 5,
          .num_tokens = 1000 * step,
          .history_bytes = 70 * step,
          .groups_in_flight = 0,
          .evaluation = {}};
}

class CheckpointStoreTest : public ::testing::Test {
 protected:
  CheckpointStoreTest() : directory_(FreshDirectory("checkpoints")) {}
  CheckpointStore Open() {
    auto store = CheckpointStore::Open(directory_);
    EXPECT_TRUE(store.ok()) << store.status();
    return *std::move(store);
  }
  std::string At(int step, const std::string& file) { return absl::StrFormat("%s/step-%06d/%s", directory_, step, file); }
  const std::string directory_;
};

// CASES C45: what is loaded is what was saved, bit for bit.
TEST_F(CheckpointStoreTest, NewestIsLoadedWholeAndOlderOnesGo) {
  CheckpointStore store = Open();
  Arrays empty(99), loaded(99);
  EXPECT_EQ(*store.LoadNewest("job", loaded.view()), std::nullopt);
  for (int step = 0; step < 4; ++step) {
    Arrays arrays(step);
    ASSERT_TRUE(store.Write(StateAt(static_cast<std::uint64_t>(step)), "job", arrays.view(), 2).ok());
  }
  EXPECT_THAT(store.Steps(), ElementsAre(2, 3));
  const auto state = Open().LoadNewest("job", loaded.view());
  ASSERT_TRUE(state.ok()) << state.status();
  EXPECT_EQ(**state, StateAt(3));
  EXPECT_EQ(loaded, Arrays(3));
  EXPECT_EQ(store.ReadNewestAdapter()->size(), 64u);
}

TEST_F(CheckpointStoreTest, BestEvaluationsCheckpointOutlivesThoseThatAreKept) {
  CheckpointStore store = Open();
  EXPECT_TRUE(absl::IsNotFound(store.ReadBestAdapter().status()));
  for (int step = 0; step < 6; ++step) {
    CheckpointState state = StateAt(static_cast<std::uint64_t>(step));
    if (step >= 1) state.evaluation = {.evaluated_step = step, .best_step = 1, .best_value = 0.1, .risen_value = 0.1 + 0.2};
    state.evaluation.evaluations_without_rise = static_cast<std::uint64_t>(step);
    ASSERT_TRUE(store.Write(state, "job", Arrays(step).view(), 2).ok());
    if (step == 0) EXPECT_THAT(std::string(store.ReadBestAdapter().status().message()), HasSubstr("no evaluation"));
  }
  EXPECT_THAT(store.Steps(), ElementsAre(1, 4, 5));
  Arrays loaded;
  const auto state = Open().LoadNewest("job", loaded.view());
  ASSERT_TRUE(state.ok()) << state.status();
  EXPECT_EQ((*state)->evaluation.evaluated_step, 5u);
  EXPECT_EQ((*state)->evaluation.risen_value, 0.1 + 0.2) << "bit for bit";
  EXPECT_EQ((*state)->evaluation.evaluations_without_rise, 5u);
  const std::vector<std::byte> expected = Arrays(1).adapter;
  EXPECT_EQ(*store.ReadBestAdapter(), std::string(reinterpret_cast<const char*>(expected.data()), expected.size()));
}

TEST_F(CheckpointStoreTest, ReferenceThatMovesIsKeptAndMissedWhenItIsAbsent) {
  CheckpointStore store = Open();
  Arrays written(3), loaded;
  std::vector<std::byte> reference(64, std::byte{9}), read(64);
  CheckpointArrays with_reference = written.view();
  with_reference.reference = reference;
  ASSERT_TRUE(store.Write(StateAt(1), "job", with_reference, 2).ok());
  CheckpointArrays into = loaded.view();
  into.reference = read;
  ASSERT_TRUE(store.LoadNewest("job", into).ok());
  EXPECT_EQ(read, reference);
  ASSERT_TRUE(store.Write(StateAt(2), "job", written.view(), 1).ok());
  const auto missing = store.LoadNewest("job", into);
  EXPECT_TRUE(absl::IsDataLoss(missing.status())) << missing.status();
  EXPECT_THAT(std::string(missing.status().message()), HasSubstr("reference.bin"));
}

// The array's pages are never touched: only its size counts.
TEST_F(CheckpointStoreTest, CheckpointThatWouldFillTheDiskIsRefusedAndCostsOlderOnesAlone) {
  CheckpointStore store = Open();
  Arrays arrays;
  for (const std::uint64_t step : {1, 2, 3, 4}) {
    CheckpointState state = StateAt(step);
    state.evaluation.best_step = 2;
    ASSERT_TRUE(store.Write(state, "job", arrays.view(), 4).ok());
  }
  const std::size_t too_large = std::filesystem::space(directory_).available + (std::size_t{1} << 30);
  void* const pages = ::mmap(nullptr, too_large, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(pages, MAP_FAILED) << too_large;
  CheckpointArrays large = arrays.view();
  large.adapter = {static_cast<std::byte*>(pages), too_large};
  CheckpointState state = StateAt(5);
  state.evaluation.best_step = 2;
  const absl::Status refused = store.Write(state, "job", large, 4);
  EXPECT_EQ(::munmap(pages, too_large), 0);
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr(directory_));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("64.0 MiB must stay free"));
  EXPECT_THAT(store.Steps(), ElementsAre(2, 4));
  EXPECT_EQ(store.LoadNewest("job", arrays.view())->value().step, 4u);
  ASSERT_TRUE(store.Write(state, "job", arrays.view(), 4).ok()) << "a smaller one has room";
}

TEST_F(CheckpointStoreTest, QuotaOfAllJobsCostsOwnOlderOnesAndThenRefuses) {
  const std::string jobs = FreshDirectory("jobs");
  const auto open = [&](const std::string& job, std::uint64_t limit_bytes) {
    auto store = CheckpointStore::Open(absl::StrCat(jobs, "/", job, "/checkpoints"), {jobs, limit_bytes});
    EXPECT_TRUE(store.ok()) << store.status();
    return *std::move(store);
  };
  constexpr std::size_t kArrayBytes = 1 << 20;  // beside which manifest, state and job file are small
  Arrays arrays;
  for (auto* array : {&arrays.adapter, &arrays.first_moments, &arrays.second_moments}) array->resize(kArrayBytes);
  constexpr std::uint64_t kOneBytes = 3 * kArrayBytes + (64 << 10);
  CheckpointStore other = open("other", 0);
  for (const std::uint64_t step : {1, 2}) ASSERT_TRUE(other.Write(StateAt(step), "job", arrays.view(), 2).ok());

  CheckpointStore store = open("own", 5 * kOneBytes);
  for (const std::uint64_t step : {1, 2, 3, 4}) {
    CheckpointState state = StateAt(step);
    state.evaluation.best_step = 1;
    const absl::Status written = store.Write(state, "job", arrays.view(), 9);
    ASSERT_TRUE(written.ok()) << written;
  }
  EXPECT_THAT(store.Steps(), ElementsAre(1, 3, 4)) << "2 made room for 4; the best and the newest stay";
  EXPECT_THAT(other.Steps(), ElementsAre(1, 2));

  CheckpointStore full = open("own", 4 * kOneBytes);
  CheckpointState state = StateAt(5);
  state.evaluation.best_step = 1;
  const absl::Status refused = full.Write(state, "job", arrays.view(), 9);
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("takes 3.0 MiB and those of all jobs have 12.0 MiB of the 12.2 MiB"));
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr(absl::StrCat("--checkpoint_bytes: remove folders of ended jobs in ", jobs)));
  EXPECT_THAT(full.Steps(), ElementsAre(1, 4));
  std::filesystem::remove_all(jobs + "/other");
  EXPECT_TRUE(full.Write(state, "job", arrays.view(), 9).ok()) << "the ended job's folder is gone";
  EXPECT_THAT(full.Steps(), ElementsAre(1, 4, 5));
}

TEST_F(CheckpointStoreTest, SameStepMayBeWrittenAgain) {
  CheckpointStore store = Open();
  Arrays first(1), second(2), loaded;
  ASSERT_TRUE(store.Write(StateAt(5), "job", first.view(), 1).ok());
  ASSERT_TRUE(store.Write(StateAt(5), "job", first.view(), 1).ok());
  ASSERT_TRUE(store.Write(StateAt(5), "job", second.view(), 1).ok());
  ASSERT_TRUE(store.LoadNewest("job", loaded.view()).ok());
  EXPECT_EQ(loaded, second);
}

// With keep 1 it may be all that there is of a job.
TEST_F(CheckpointStoreTest, SameStepWrittenAgainIsTheOldOrTheNewWhereverTheWriterDied) {
  const std::string replaced = directory_ + "/replaced-step-000005", partial = directory_ + "/partial-000005";
  Arrays first(1), second(2), loaded;
  ASSERT_TRUE(Open().Write(StateAt(5), "job", first.view(), 1).ok());
  std::filesystem::create_directories(partial);
  std::filesystem::rename(directory_ + "/step-000005", replaced);
  CheckpointStore store = Open();
  EXPECT_FALSE(std::filesystem::exists(partial));
  ASSERT_TRUE(store.LoadNewest("job", loaded.view()).value().has_value());
  EXPECT_EQ(loaded, first);

  ASSERT_TRUE(store.Write(StateAt(5), "job", second.view(), 1).ok());
  EXPECT_FALSE(std::filesystem::exists(replaced));
  std::filesystem::create_directories(replaced);
  ASSERT_TRUE(Open().LoadNewest("job", loaded.view()).value().has_value());
  EXPECT_FALSE(std::filesystem::exists(replaced));
  EXPECT_EQ(loaded, second);
}

// A crash while writing leaves another name behind: files one after the other, never a checkpoint.
TEST_F(CheckpointStoreTest, HalfWrittenCheckpointIsNeverSeenWhereverTheWriterDied) {
  for (std::size_t num_written = 0; num_written <= std::size(kFiles); ++num_written) {
    std::filesystem::remove_all(directory_);
    Arrays arrays(1), loaded;
    {
      CheckpointStore store = Open();
      ASSERT_TRUE(store.Write(StateAt(1), "job", arrays.view(), 2).ok());
    }
    const std::string partial = directory_ + "/partial-000002";
    std::filesystem::create_directories(partial);
    for (std::size_t i = 0; i < num_written; ++i) WriteText(partial + "/" + kFiles[i], "half");
    CheckpointStore store = Open();
    EXPECT_FALSE(std::filesystem::exists(partial));
    const auto state = store.LoadNewest("job", loaded.view());
    ASSERT_TRUE(state.ok()) << state.status();
    EXPECT_EQ((*state)->step, 1u);
    EXPECT_EQ(loaded, arrays);
    ASSERT_TRUE(store.Write(StateAt(2), "job", arrays.view(), 2).ok());
  }
}

// CASES C45: a checkpoint that lost something is refused by the name of what it lost; the resume never starts cold.
TEST_F(CheckpointStoreTest, MissingTruncatedOrChangedFileIsRefusedByName) {
  for (const std::string file : kFiles) {
    for (const std::string damage : {"missing", "truncated", "changed"}) {
      SCOPED_TRACE(file + " " + damage);
      std::filesystem::remove_all(directory_);
      CheckpointStore store = Open();
      Arrays arrays(1), loaded;
      ASSERT_TRUE(store.Write(StateAt(1), "job", arrays.view(), 2).ok());
      const std::string path = At(1, file);
      std::string bytes = ReadText(path);
      if (damage == "missing") {
        std::filesystem::remove(path);
      } else if (damage == "truncated") {
        WriteText(path, bytes.substr(0, bytes.size() / 2));
      } else {
        bytes[bytes.size() / 2] ^= 1;
        WriteText(path, bytes);
      }
      const auto state = store.LoadNewest("job", loaded.view());
      EXPECT_FALSE(state.ok());
      EXPECT_TRUE(absl::IsDataLoss(state.status()) || (file == "manifest.json" && damage == "changed")) << state.status();
      EXPECT_THAT(std::string(state.status().message()), HasSubstr("step-000001/"));
    }
  }
}

TEST_F(CheckpointStoreTest, DamagedNewestIsSetAsideForTheOneBeforeAndWrittenAgain) {
  for (const std::string file : kFiles) {
    SCOPED_TRACE(file);
    std::filesystem::remove_all(directory_);
    CheckpointStore store = Open();
    Arrays first(1), second(2), loaded;
    ASSERT_TRUE(store.Write(StateAt(1), "job", first.view(), 2).ok());
    ASSERT_TRUE(store.Write(StateAt(2), "job", second.view(), 2).ok());
    const std::string bytes = ReadText(At(2, file));
    WriteText(At(2, file), bytes.substr(0, bytes.size() / 2));
    const auto state = store.LoadNewest("job", loaded.view());
    ASSERT_TRUE(state.ok()) << state.status();
    EXPECT_EQ((*state)->step, 1u);
    EXPECT_EQ(loaded.adapter, first.adapter);
    EXPECT_EQ(store.Steps(), std::vector<std::uint64_t>{1});
    EXPECT_TRUE(std::filesystem::exists(directory_ + "/damaged-step-000002"));
    // The same step is the same again, manifest and all.
    ASSERT_TRUE(Open().Write(StateAt(2), "job", second.view(), 2).ok());
    EXPECT_EQ(Open().LoadNewest("job", loaded.view())->value().step, 2u);
    EXPECT_EQ(loaded.adapter, second.adapter);
  }
}

TEST_F(CheckpointStoreTest, OneThatCannotBeReadNowIsLeftWhereItIs) {
  CheckpointStore store = Open();
  Arrays first(1), second(2), loaded;
  ASSERT_TRUE(store.Write(StateAt(1), "job", first.view(), 2).ok());
  ASSERT_TRUE(store.Write(StateAt(2), "job", second.view(), 2).ok());
  std::filesystem::remove(At(2, kFiles[0]));
  std::filesystem::create_directory(At(2, kFiles[0]));  // reading fails, though nothing is absent or cut
  const auto state = store.LoadNewest("job", loaded.view());
  EXPECT_FALSE(state.ok());
  EXPECT_FALSE(absl::IsDataLoss(state.status())) << state.status();
  EXPECT_EQ(store.Steps(), (std::vector<std::uint64_t>{1, 2}));
}

TEST_F(CheckpointStoreTest, OnlyTheLastDamagedOnesAreKept) {
  CheckpointStore store = Open();
  Arrays arrays(1), loaded;
  for (const std::uint64_t step : {2, 3}) {
    ASSERT_TRUE(store.Write(StateAt(1), "job", arrays.view(), 2).ok());
    ASSERT_TRUE(store.Write(StateAt(step), "job", arrays.view(), 2).ok());
    WriteText(At(step, kFiles[0]), "cut");
    ASSERT_TRUE(store.LoadNewest("job", loaded.view()).ok());
  }
  EXPECT_FALSE(std::filesystem::exists(directory_ + "/damaged-step-000002"));
  EXPECT_TRUE(std::filesystem::exists(directory_ + "/damaged-step-000003"));
}

// CASES C45: optimizer state erased, with a manifest to match the erased files, has another size than the adapter needs.
TEST_F(CheckpointStoreTest, ErasedOptimizerStateIsRefused) {
  CheckpointStore store = Open();
  Arrays arrays(1), loaded;
  CheckpointArrays erased = arrays.view();
  erased.first_moments = {};
  ASSERT_TRUE(store.Write(StateAt(1), "job", erased, 2).ok());
  const auto state = store.LoadNewest("job", loaded.view());
  EXPECT_TRUE(absl::IsFailedPrecondition(state.status())) << state.status();
  EXPECT_THAT(std::string(state.status().message()), HasSubstr("first_moments.bin has 0 bytes"));
}

TEST_F(CheckpointStoreTest, CheckpointOfAnotherJobIsRefused) {
  CheckpointStore store = Open();
  Arrays arrays(1);
  ASSERT_TRUE(store.Write(StateAt(1), "job", arrays.view(), 2).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(store.LoadNewest("another", arrays.view()).status()));
}

}  // namespace
}  // namespace tandem
