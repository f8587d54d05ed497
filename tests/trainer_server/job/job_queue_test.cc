// Who goes next: the order as a pure function, and the store's queue over it.
#include "trainer_server/job/job_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "absl/time/clock.h"
#include "common/base/clock.h"
#include "tests/trainer_server/support/fake_model.h"
#include "trainer_server/job/job_store.h"

namespace tandem {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(OrderQueue, OldestFirstWhereNothingElseDiffers) {
  const std::vector<QueuedJob> jobs = {{3, 0, "ada"}, {1, 0, "ada"}, {2, 0, "ada"}};
  EXPECT_THAT(OrderQueue(jobs, {}, 60), ElementsAre(1, 2, 3));
  EXPECT_THAT(OrderQueue({}, {{"ada", 5}}, 60), IsEmpty());
}

TEST(OrderQueue, PriorityGoesBeforeShareAndAge) {
  const std::vector<QueuedJob> jobs = {{1, -1, "ada"}, {2, 0, "ada"}, {3, kMaxPriority, "bob"}, {4, -kMaxPriority, "cy"}};
  EXPECT_THAT(OrderQueue(jobs, {{"bob", 1e6}}, 60), ElementsAre(3, 2, 1, 4));
}

TEST(OrderQueue, WhoUsedLeastGoesFirstAtEqualPriority) {
  const std::vector<QueuedJob> jobs = {{1, 0, "ada"}, {2, 0, "bob"}, {3, 0, "cy"}};
  EXPECT_THAT(OrderQueue(jobs, {{"ada", 10}, {"bob", 5}, {"nobody", 0}}, 1), ElementsAre(3, 2, 1));
}

TEST(OrderQueue, ManyJobsOfOneDoNotHoldUpAnother) {
  std::vector<QueuedJob> jobs;
  for (std::int64_t i = 1; i <= 6; ++i) jobs.push_back({i, 0, "ada"});
  jobs.push_back({7, 0, "bob"});
  jobs.push_back({8, 0, "bob"});
  EXPECT_THAT(OrderQueue(jobs, {}, 60), ElementsAre(1, 7, 2, 8, 3, 4, 5, 6));
  EXPECT_THAT(OrderQueue(jobs, {{"ada", 130}}, 60), ElementsAre(7, 8, 1, 2, 3, 4, 5, 6));
  EXPECT_THAT(OrderQueue(jobs, {{"bob", 90}}, 60), ElementsAre(1, 2, 7, 3, 8, 4, 5, 6));
}

// What one priority's jobs will have used counts in the next.
TEST(OrderQueue, ShareGoesOnThroughPriorities) {
  const std::vector<QueuedJob> jobs = {{1, 0, "ada"}, {2, 0, "bob"}, {3, 5, "ada"}};
  EXPECT_THAT(OrderQueue(jobs, {}, 60), ElementsAre(3, 2, 1));
}

TEST(OrderQueue, IsWhatTakingTheBestOneByOneGives) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    std::uint64_t counter = 0;
    const auto below = [&](std::uint64_t bound) { return static_cast<int>(RandomBelow(seed, counter++, bound)); };
    std::vector<QueuedJob> jobs;
    for (int i = 0; i < 40; ++i) jobs.push_back({i, below(3) - 1, std::string(1, static_cast<char>('a' + below(5)))});
    DeviceSeconds used = {{"a", below(200)}, {"b", below(200)}, {"c", below(200)}};
    const std::vector<std::int64_t> order = OrderQueue(jobs, used, 60);
    ASSERT_EQ(order.size(), jobs.size());
    for (const std::int64_t next : order) {
      const auto best = std::ranges::min_element(
          jobs, {}, [&](const QueuedJob& job) { return std::tuple(-job.priority, used[job.submitter], job.ordinal); });
      ASSERT_EQ(best->ordinal, next);
      used[best->submitter] += 60;
      jobs.erase(best);
    }
  }
}

TEST(OrderQueue, DeviceTimeIsForgottenByHalvesAndNeverGrows) {
  EXPECT_DOUBLE_EQ(DecayedSeconds(80, absl::ZeroDuration()), 80);
  EXPECT_DOUBLE_EQ(DecayedSeconds(80, kDeviceTimeHalfLife), 40);
  EXPECT_DOUBLE_EQ(DecayedSeconds(80, 3 * kDeviceTimeHalfLife), 10);
  EXPECT_DOUBLE_EQ(DecayedSeconds(80, -absl::Hours(1000)), 80);
  EXPECT_EQ(DecayedSeconds(80, absl::InfiniteDuration()), 0);
}

class JobQueueTest : public ::testing::Test {
 protected:
  JobQueueTest() : path_(FreshDirectory("job_queue") + "/jobs.sqlite") { Reopen(); }
  void Reopen(JobStore::Limits limits = {}) {
    store_.reset();
    store_ = *JobStore::Open(path_, limits);
  }
  static v1::JobSpec Spec(const std::string& name, int priority = 0, const std::vector<std::string>& after = {}) {
    v1::JobSpec spec;
    spec.set_name(name);
    spec.set_num_steps(7);
    spec.set_priority(priority);
    for (const std::string& job : after) spec.add_after(job);
    return spec;
  }
  std::string Add(const std::string& name, const std::string& submitter = "ada", int priority = 0,
                  const std::vector<std::string>& after = {}) {
    const auto job = store_->Add(Spec(name, priority, after), "text of " + name, submitter);
    EXPECT_TRUE(job.ok()) << job.status();
    return job.value_or("");
  }
  void Run(const std::string& job, v1::JobState end, const std::string& error = "") {
    ASSERT_EQ(store_->Transition(job, v1::JOB_STATE_RUNNING, ""), absl::OkStatus());
    ASSERT_EQ(store_->Transition(job, end, error), absl::OkStatus());
  }
  v1::JobStatus Status(const std::string& job) { return store_->Get(job)->status; }
  std::string Next() {
    const auto next = *store_->Next();
    return next.has_value() ? next->status.job() : "";
  }
  // The queue's jobs by place.
  std::vector<std::string> Queue() {
    std::map<std::uint32_t, std::string> by_place;
    const std::vector<StoredJob> jobs = *store_->List(1000, std::nullopt, {});
    for (const StoredJob& job : jobs) {
      if (job.status.queue_position() > 0) by_place[job.status.queue_position()] = job.status.job();
    }
    std::vector<std::string> queue;
    for (const auto& [place, job] : by_place) queue.push_back(job);
    return queue;
  }

  const std::string path_;
  std::unique_ptr<JobStore> store_;
};

TEST_F(JobQueueTest, PlacesPrioritiesAndReasonsAreToldAndSurviveARestart) {
  const std::string a = Add("a"), b = Add("b", "ada", 7), c = Add("c", "bob"), d = Add("d", "bob", 0, {a, c});
  for (int life = 0; life < 2; ++life) {
    EXPECT_THAT(Queue(), ElementsAre(b, c, a));
    EXPECT_EQ(Status(b).priority(), 7);
    EXPECT_EQ(Status(c).submitter(), "bob");
    EXPECT_EQ(Status(b).waiting_for(), "");
    EXPECT_EQ(Status(c).waiting_for(), "1 job before it");
    EXPECT_EQ(Status(a).waiting_for(), "2 jobs before it");
    EXPECT_THAT(Status(d).after(), ElementsAre(a, c));
    EXPECT_EQ(Status(d).queue_position(), 0u);
    EXPECT_EQ(Status(d).waiting_for(), absl::StrCat("job ", a, " (queued), job ", c, " (queued)"));
    Reopen();
  }
  ASSERT_TRUE(store_->Transition(b, v1::JOB_STATE_RUNNING, "").ok());
  EXPECT_EQ(Status(c).waiting_for(), "1 job before it") << "that which runs";
  EXPECT_EQ(Status(c).queue_position(), 1u);
  const QueueDepth depth = store_->depth();
  EXPECT_EQ(depth.ready, 2);
  EXPECT_EQ(depth.blocked, 1);
  EXPECT_EQ(depth.running, 1);
  EXPECT_EQ(depth.paused, 0);
}

TEST_F(JobQueueTest, PriorityOfAQueuedJobIsChangedAndOfOthersNot) {
  const std::string a = Add("a"), b = Add("b");
  ASSERT_TRUE(store_->SetPriority(b, 1).ok());
  Reopen();
  EXPECT_THAT(Queue(), ElementsAre(b, a));
  ASSERT_TRUE(store_->Pause(a).ok());
  ASSERT_TRUE(store_->SetPriority(a, 2).ok());
  ASSERT_TRUE(store_->Resume(a).ok());
  EXPECT_THAT(Queue(), ElementsAre(a, b));
  for (const int priority : {-kMaxPriority - 1, kMaxPriority + 1}) {
    const absl::Status refused = store_->SetPriority(a, priority);
    EXPECT_TRUE(absl::IsInvalidArgument(refused));
    EXPECT_EQ(refused.message(), absl::StrCat("priority: ", priority, "; must be -100 to 100"));
  }
  ASSERT_TRUE(store_->Transition(a, v1::JOB_STATE_RUNNING, "").ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(store_->SetPriority(a, 0)));
  EXPECT_TRUE(absl::IsNotFound(store_->SetPriority("nobody", 0)));
}

TEST_F(JobQueueTest, DeviceTimeOfASubmitterCountsAlsoAfterARestart) {
  const std::string a = Add("a"), b = Add("b"), c = Add("c", "bob");
  Run(a, v1::JOB_STATE_SUCCEEDED);
  EXPECT_EQ(Next(), b) << "nobody has used any";
  ASSERT_TRUE(store_->Charge(a, absl::Seconds(100)).ok());
  ASSERT_TRUE(store_->Charge(a, absl::Seconds(-50)).ok()) << "a clock that went back takes nothing away";
  EXPECT_EQ(Next(), c);
  Reopen();
  EXPECT_EQ(Next(), c);
  EXPECT_EQ(Status(a).device_seconds(), 100);
  const std::string d = Add("d", "bob");
  EXPECT_THAT(Queue(), ElementsAre(c, b, d)) << "a job is expected to take as long as those before";
  ASSERT_TRUE(store_->Charge(c, absl::Seconds(101)).ok());
  EXPECT_THAT(Queue(), ElementsAre(b, c, d));
}

TEST_F(JobQueueTest, JobStartsWhenAllThatItComesAfterHaveSucceeded) {
  const std::string a = Add("a"), b = Add("b"), c = Add("c", "ada", 100, {a, b}), d = Add("d", "ada", 100, {c});
  Run(a, v1::JOB_STATE_SUCCEEDED);
  EXPECT_EQ(Next(), b);
  Reopen();
  Run(b, v1::JOB_STATE_SUCCEEDED);
  EXPECT_EQ(Next(), c);
  EXPECT_NE(store_->Get(c)->ready_at, absl::InfinitePast());
  EXPECT_EQ(store_->Get(d)->ready_at, absl::InfinitePast());
  Reopen();
  Run(c, v1::JOB_STATE_SUCCEEDED);
  EXPECT_EQ(Next(), d);
  const std::string e = Add("e", "ada", 101, {a});  // which has succeeded long ago
  EXPECT_EQ(Next(), e);
}

TEST_F(JobQueueTest, JobThatFailsTakesWithItWhatComesAfterAndNothingElse) {
  const std::string a = Add("a"), b = Add("b", "ada", 0, {a}), c = Add("c", "bob", 0, {b}), d = Add("d"),
                    e = Add("e", "ada", 0, {a, d});
  ASSERT_TRUE(store_->Pause(e).ok());
  Run(a, v1::JOB_STATE_FAILED, "the disk is full");
  Reopen();
  for (const std::string& job : {b, c, e}) EXPECT_EQ(Status(job).state(), v1::JOB_STATE_FAILED) << job;
  EXPECT_EQ(Status(b).error(), absl::StrCat("it comes after others: job ", a, " failed: the disk is full"));
  EXPECT_EQ(Status(c).error(),
            absl::StrCat("it comes after others: job ", b, " failed because job ", a, " failed: the disk is full"));
  EXPECT_EQ(Next(), d);
  EXPECT_EQ(store_->depth().ready, 1);
  EXPECT_EQ(store_->depth().paused, 0);
  // In order they can be taken up again, and not before.
  const absl::Status refused = store_->Resume(b);
  EXPECT_TRUE(absl::IsFailedPrecondition(refused));
  EXPECT_THAT(std::string(refused.message()), HasSubstr(absl::StrCat("it comes after job ", a, ", which is failed")));
  for (const std::string& job : {a, b, c}) EXPECT_EQ(store_->Resume(job), absl::OkStatus());
  EXPECT_EQ(Status(c).waiting_for(), absl::StrCat("job ", b, " (queued)"));
  Run(a, v1::JOB_STATE_SUCCEEDED);
  Run(b, v1::JOB_STATE_SUCCEEDED);
  EXPECT_EQ(Status(c).queue_position(), 1u);
  ASSERT_TRUE(store_->Resume(e).ok());
  EXPECT_EQ(Status(e).waiting_for(), absl::StrCat("job ", d, " (queued)")) << "a has succeeded meanwhile";
}

TEST_F(JobQueueTest, JobThatIsCancelledQueuedOrPausedTakesWithItWhatComesAfter) {
  const std::string a = Add("a"), b = Add("b", "ada", 0, {a}), c = Add("c"), d = Add("d", "ada", 0, {c});
  ASSERT_TRUE(store_->Cancel(a).ok());
  EXPECT_EQ(Status(b).error(), absl::StrCat("it comes after others: job ", a, " was cancelled"));
  EXPECT_TRUE(absl::IsFailedPrecondition(store_->Resume(b)));
  ASSERT_TRUE(store_->Pause(c).ok());
  EXPECT_EQ(Status(d).waiting_for(), absl::StrCat("job ", c, " (paused)"));
  ASSERT_TRUE(store_->Cancel(c).ok());
  EXPECT_EQ(Status(d).state(), v1::JOB_STATE_FAILED);
  EXPECT_EQ(Next(), "");
}

TEST_F(JobQueueTest, LongReasonsAreCutAndLongChainsEndTogether) {
  std::string last = Add("first");
  const std::string first = last;
  for (int i = 0; i < 300; ++i) last = Add("next", "ada", 0, {last});
  Run(first, v1::JOB_STATE_FAILED, std::string(100000, 'x'));
  EXPECT_EQ(Status(last).state(), v1::JOB_STATE_FAILED);
  EXPECT_LT(Status(last).error().size(), 1000u);
  EXPECT_EQ(store_->depth().blocked, 0);
}

// Between the check of a job file and its taking, what it comes after may have ended.
TEST_F(JobQueueTest, JobBehindOneThatNeverSucceedsOrIsUnknownIsRefusedAndLeavesNothing) {
  const std::string a = Add("a");
  ASSERT_TRUE(store_->Cancel(a).ok());
  const absl::Status refused = store_->Add(Spec("b", 0, {a}), "text", "ada").status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr(absl::StrCat("job ", a, " is cancelled: no job can come after it")));
  EXPECT_TRUE(absl::IsNotFound(store_->Add(Spec("b", 0, {"nobody-1"}), "text", "ada").status()));
  EXPECT_EQ(store_->List(10, std::nullopt, {})->size(), 1u);
}

TEST_F(JobQueueTest, FindsByIdOrTheNewestOfOnesOwnByName) {
  const std::string a = Add("a"), newer = Add("a"), others = Add("a", "bob");
  EXPECT_EQ(store_->Find("a", "ada")->status.job(), newer);
  EXPECT_EQ(store_->Find("a", "bob")->status.job(), others);
  EXPECT_EQ(store_->Find(a, "bob")->status.job(), a);
  EXPECT_TRUE(absl::IsNotFound(store_->Find("a", "cy").status()));
}

TEST_F(JobQueueTest, QueueIsBoundedForAllAndForEach) {
  Reopen({.max_queued = 3, .max_queued_of_submitter = 2});
  const std::string a = Add("a"), b = Add("b");
  const absl::Status own = store_->Add(Spec("c"), "text", "ada").status();
  EXPECT_TRUE(absl::IsResourceExhausted(own));
  EXPECT_EQ(
      own.message(),
      "the queue holds 2 jobs of ada that are queued or paused; the limit is 2 (--max_queued_jobs_of_submitter): wait for some "
      "to end, or cancel some");
  ASSERT_TRUE(store_->Pause(a).ok());
  EXPECT_FALSE(store_->Add(Spec("c"), "text", "ada").ok()) << "a paused job has its place";
  const std::string c = Add("c", "bob");
  EXPECT_THAT(std::string(store_->Add(Spec("d"), "text", "cy").status().message()),
              HasSubstr("the limit is 3 (--max_queued_jobs)"));
  Run(b, v1::JOB_STATE_FAILED, "why");
  const std::string d = Add("d", "cy");
  EXPECT_TRUE(absl::IsResourceExhausted(store_->Resume(b))) << "one that failed has given its place up";
  ASSERT_TRUE(store_->Cancel(d).ok());
  EXPECT_TRUE(store_->Resume(b).ok());
}

TEST_F(JobQueueTest, ListsByState) {
  const std::string a = Add("a"), b = Add("b"), c = Add("c");
  ASSERT_TRUE(store_->Cancel(a).ok());
  ASSERT_TRUE(store_->Pause(b).ok());
  const auto list = [&](const std::vector<v1::JobState>& states) {
    std::vector<std::string> jobs;
    const std::vector<StoredJob> listed = *store_->List(10, std::nullopt, states);
    for (const StoredJob& job : listed) jobs.push_back(job.status.job());
    return jobs;
  };
  EXPECT_THAT(list({v1::JOB_STATE_QUEUED}), ElementsAre(c));
  EXPECT_THAT(list({v1::JOB_STATE_PAUSED, v1::JOB_STATE_CANCELLED}), ElementsAre(b, a));
  EXPECT_THAT(list({v1::JOB_STATE_RUNNING}), IsEmpty());
}

// Of one name, so that some six-digit suffix comes twice.
TEST(JobQueueSize, TenThousandJobsAreTakenListedAndOrderedInTime) {
  const auto store = *JobStore::Open(":memory:");
  const std::string text(2000, 'x');
  v1::JobSpec spec;
  spec.set_name("many");
  spec.set_num_steps(1);
  std::set<std::string> jobs;
  const MonotonicTime begin = MonotonicTime::Now();
  for (int i = 0; i < 10000; ++i) {
    spec.set_priority(i % 7);
    jobs.insert(*store->Add(spec, text, absl::StrCat("s", i % 100)));
  }
  EXPECT_EQ(jobs.size(), 10000u);
  const MonotonicTime added = MonotonicTime::Now();
  std::size_t num_listed = 0;
  std::uint64_t sum_of_places = 0;
  std::optional<std::int64_t> before;
  for (auto page = *store->List(100, before, {}); !page.empty(); page = *store->List(100, before, {})) {
    num_listed += page.size();
    for (const StoredJob& job : page) sum_of_places += job.status.queue_position();
    before = page.back().ordinal;
  }
  EXPECT_EQ(num_listed, 10000u);
  EXPECT_EQ(sum_of_places, 10000u * 10001u / 2) << "each has a place of its own";
  const MonotonicTime listed = MonotonicTime::Now();
  for (int i = 0; i < 20; ++i) {  // as a job's steps do
    const std::string next = (*store->Next())->status.job();
    ASSERT_TRUE(store->Charge(next, absl::Seconds(1)).ok());
  }
  const MonotonicTime ordered = MonotonicTime::Now();
  // About twenty times what it takes.
  EXPECT_LT(added - begin, absl::Seconds(20));
  EXPECT_LT(listed - added, absl::Seconds(10));
  EXPECT_LT(ordered - listed, absl::Seconds(5));
  std::printf("added %g s, listed %g s, 20 charged and ordered %g s\n", absl::ToDoubleSeconds(added - begin),
              absl::ToDoubleSeconds(listed - added), absl::ToDoubleSeconds(ordered - listed));
}

}  // namespace
}  // namespace tandem
