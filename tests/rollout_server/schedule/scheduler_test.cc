#include "rollout_server/schedule/scheduler.h"

#include <algorithm>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "rollout_server/batch/step_batch_builder.h"
#include "rollout_server/cache/cache_key.h"
#include "tests/rollout_server/support/fake_model.h"
#include "tests/rollout_server/support/seeded_random.h"

namespace tandem {
namespace {

using testing::FakeModel;
using testing::LogitsOf;
using testing::NextHash;

constexpr int kVocabSize = 50;

std::vector<std::uint32_t> Prompt(std::uint32_t size, std::uint32_t salt) {
  std::vector<std::uint32_t> ids(size);
  for (std::uint32_t i = 0; i < size; ++i) ids[i] = (i * 7 + salt * 13 + i * salt) % kVocabSize;
  return ids;
}

// The loop around the scheduler with nothing random in it: the next token is the largest logit, a sequence ends at its
// max_tokens.
class Driver {
 public:
  Driver(int num_blocks, SchedulerOptions options)
      : block_tokens_(options.block_tokens),
        allocator_(num_blocks),
        model_(num_blocks, options.block_tokens, kVocabSize),
        scheduler_(options, &allocator_, [this](const Sequence& sequence) {
          return RootKey({.weight_version = versions_[jobs_.at(sequence.id)], .prompt_kind = jobs_.at(sequence.id)});
        }) {}

  SequenceId Add(std::vector<std::uint32_t> prompt, std::uint32_t group_size, std::uint32_t max_tokens, Lane lane = Lane::kShared,
                 std::uint64_t unit_id = 0, const std::string& job = "") {
    const SequenceId first = scheduler_.AddGroup({.lane = lane,
                                                  .unit_id = unit_id,
                                                  .job = job,
                                                  .prompt = std::make_shared<const std::vector<std::uint32_t>>(std::move(prompt)),
                                                  .group_size = group_size});
    for (SequenceId id = first; id < first + group_size; ++id) {
      max_tokens_[id] = max_tokens;
      jobs_[id] = job;
      live_.insert(id);
    }
    return first;
  }

  // False when the lane had nothing to run.
  bool Step(Lane lane) {
    const StepPlan plan = scheduler_.Schedule(lane);
    for (SequenceId id : plan.preempted) preempted_.push_back(id);
    if (plan.sequences.empty()) return false;
    for (const BlockCopy& copy : plan.copies) EXPECT_TRUE(model_.CopyBlock(copy.from, copy.to).ok());
    const StepBatch batch = BuildStepBatch(plan, scheduler_, block_tokens_, [&](const Sequence& sequence) {
      return SequenceInputs{.adapter = AdapterView{.scale = static_cast<float>(versions_[jobs_.at(sequence.id)])}};
    });
    const absl::StatusOr<Logits> logits = model_.Run(batch);
    EXPECT_TRUE(logits.ok()) << logits.status();
    if (!logits.ok()) return false;
    scheduler_.Computed(plan);
    plans_.push_back(plan);
    std::int64_t row = 0;
    for (const PlannedSequence& planned : plan.sequences) {
      if (!planned.draws) continue;
      const std::span<const float> values = logits->row(row++);
      scheduler_.Append(planned.id, static_cast<std::uint32_t>(std::max_element(values.begin(), values.end()) - values.begin()));
      const Sequence& sequence = scheduler_.sequence(planned.id);
      if (sequence.completion.size() == max_tokens_.at(planned.id)) End(planned.id, &completions_);
    }
    return true;
  }
  void RunAll() {
    for (int steps = 0; !live_.empty(); ++steps) {
      ASSERT_LT(steps, 100000) << "no progress";
      const bool is_unit_run = Step(Lane::kUnit);
      const bool is_shared_run = Step(Lane::kShared);
      ASSERT_TRUE(is_unit_run || is_shared_run || !preempted_.empty());
    }
  }
  void Cancel(SequenceId id) { End(id, &cancelled_); }

  // What the model gives without any cache.
  std::vector<std::uint32_t> Reference(const std::vector<std::uint32_t>& prompt, std::uint32_t max_tokens,
                                       float scale = 0) const {
    std::uint64_t hash = 0;
    for (std::uint32_t token : prompt) hash = NextHash(hash, token, scale);
    std::vector<std::uint32_t> completion;
    while (completion.size() < max_tokens) {
      const std::vector<float> logits = LogitsOf(hash, kVocabSize);
      completion.push_back(static_cast<std::uint32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin()));
      hash = NextHash(hash, completion.back(), scale);
    }
    return completion;
  }

  Scheduler& scheduler() { return scheduler_; }
  BlockAllocator& allocator() { return allocator_; }
  const FakeModel& model() const { return model_; }
  const std::vector<StepPlan>& plans() const { return plans_; }
  const std::vector<SequenceId>& preempted() const { return preempted_; }
  const std::map<SequenceId, std::vector<std::uint32_t>>& completions() const { return completions_; }
  const std::set<SequenceId>& live() const { return live_; }
  std::map<std::string, std::uint64_t>& versions() { return versions_; }

 private:
  void End(SequenceId id, std::map<SequenceId, std::vector<std::uint32_t>>* into) {
    (*into)[id] = scheduler_.sequence(id).completion;
    live_.erase(id);
    scheduler_.End(id);
  }

  const int block_tokens_;
  BlockAllocator allocator_;
  FakeModel model_;
  std::map<std::string, std::uint64_t> versions_;
  std::map<SequenceId, std::string> jobs_;
  Scheduler scheduler_;
  std::map<SequenceId, std::uint32_t> max_tokens_;
  std::set<SequenceId> live_;
  std::vector<StepPlan> plans_;
  std::vector<SequenceId> preempted_;
  std::map<SequenceId, std::vector<std::uint32_t>> completions_, cancelled_;
};

TEST(SchedulerTest, ComputesAGroupsPromptOnceAndCopiesItsOpenBlock) {
  Driver driver(100, {.block_tokens = 16});
  const std::vector<std::uint32_t> prompt = Prompt(40, 1);
  const SequenceId first = driver.Add(prompt, 8, 5);
  driver.RunAll();
  for (SequenceId id = first; id < first + 8; ++id) EXPECT_EQ(driver.completions().at(id), driver.Reference(prompt, 5));
  EXPECT_EQ(driver.plans()[0].num_tokens, 40u);
  EXPECT_EQ(driver.plans()[0].sequences.size(), 1u);
  EXPECT_EQ(driver.plans()[1].sequences.size(), 8u);
  EXPECT_EQ(driver.plans()[1].num_tokens, 8u) << "the others begin at the prompt's last token";
  EXPECT_EQ(driver.model().num_copies, 7) << "the last one to write keeps the block";
  EXPECT_EQ(driver.allocator().num_free(), 100);
}

TEST(SchedulerTest, PromptsEndingOnABlockBoundaryAndOfOneToken) {
  for (std::uint32_t size : {1u, 2u, 15u, 16u, 17u, 32u}) {
    Driver driver(50, {.block_tokens = 16});
    const std::vector<std::uint32_t> prompt = Prompt(size, 3);
    driver.Add(prompt, 3, 40);
    driver.RunAll();
    for (const auto& [id, completion] : driver.completions()) EXPECT_EQ(completion, driver.Reference(prompt, 40)) << size;
    EXPECT_EQ(driver.allocator().num_free(), 50);
  }
}

TEST(SchedulerTest, LongPromptsArePrefilledInChunksBesideDecodes) {
  Driver driver(100, {.block_tokens = 16, .max_batch_tokens = 64, .max_sequences = 8});
  const std::vector<std::uint32_t> shorter = Prompt(10, 1), longer = Prompt(300, 2);
  const SequenceId a = driver.Add(shorter, 1, 30);
  const SequenceId b = driver.Add(longer, 1, 4);
  driver.RunAll();
  for (const StepPlan& plan : driver.plans()) EXPECT_LE(plan.num_tokens, 64u);
  EXPECT_EQ(driver.plans()[1].sequences.size(), 2u) << "the decode runs beside the chunk";
  EXPECT_EQ(driver.plans()[1].num_tokens, 64u);
  EXPECT_EQ(driver.completions().at(a), driver.Reference(shorter, 30));
  EXPECT_EQ(driver.completions().at(b), driver.Reference(longer, 4));
}

// CASES C07
TEST(SchedulerTest, PreemptsNewestWhenBlocksRunOutAndBothFinish) {
  const std::vector<std::uint32_t> prompt_a = Prompt(100, 1), prompt_b = Prompt(100, 2);
  std::size_t steps[2];
  for (int large : {0, 1}) {
    Driver driver(large ? 5000 : 50, {.block_tokens = 16});
    const SequenceId oldest = driver.Add(prompt_a, 1, 400);
    const SequenceId newest = driver.Add(prompt_b, 1, 400);
    driver.RunAll();
    EXPECT_EQ(driver.completions().at(oldest), driver.Reference(prompt_a, 400));
    EXPECT_EQ(driver.completions().at(newest), driver.Reference(prompt_b, 400));
    EXPECT_EQ(std::count(driver.preempted().begin(), driver.preempted().end(), oldest), 0);
    EXPECT_EQ(driver.preempted().empty(), large != 0);
    steps[large] = driver.plans().size();
    // A token drawn before a preemption is not drawn again: 400 draws each, no more.
    std::size_t num_draws = 0;
    for (const StepPlan& plan : driver.plans()) {
      num_draws += std::count_if(plan.sequences.begin(), plan.sequences.end(), [](const PlannedSequence& p) { return p.draws; });
    }
    EXPECT_EQ(num_draws, 800u);
  }
  EXPECT_LE(steps[0], 2 * steps[1]);
}

// CASES C07
TEST(SchedulerTest, APreemptionFreesBlocksAtOnce) {
  Driver driver(50, {.block_tokens = 16});
  driver.Add(Prompt(100, 1), 1, 400);
  driver.Add(Prompt(100, 2), 1, 400);
  while (driver.preempted().empty()) ASSERT_TRUE(driver.Step(Lane::kShared));
  EXPECT_EQ(driver.scheduler().num_running(), 1);
  EXPECT_EQ(driver.allocator().num_used(Lane::kShared), 26) << "the oldest's 25 blocks and the one it wanted";
}

TEST(SchedulerTest, SecondRequestReusesFullBlocksOfTheFirst) {
  Driver driver(100, {.block_tokens = 16});
  const std::vector<std::uint32_t> prompt = Prompt(70, 1);
  driver.Add(prompt, 1, 3);
  driver.RunAll();
  const SequenceId again = driver.Add(prompt, 1, 3);
  driver.RunAll();
  const StepPlan& plan = driver.plans()[3];
  ASSERT_EQ(plan.admissions.size(), 1u);
  EXPECT_EQ(plan.admissions[0].hit_tokens, 64u);
  EXPECT_EQ(plan.num_tokens, 6u);
  EXPECT_EQ(driver.completions().at(again), driver.Reference(prompt, 3));
}

// CASES C43
TEST(SchedulerTest, NothingComputedUnderAnOlderVersionIsFound) {
  Driver driver(100, {.block_tokens = 16});
  const std::vector<std::uint32_t> prompt = Prompt(70, 1);
  driver.versions()["a"] = 1;
  driver.versions()["b"] = 1;
  driver.Add(prompt, 1, 20, Lane::kShared, 0, "a");
  for (int i = 0; i < 5; ++i) driver.Step(Lane::kShared);
  driver.versions()["a"] = 2;
  driver.scheduler().WeightsChanged("a");
  driver.RunAll();  // its later blocks are of two versions and must not be published under version 2
  const SequenceId after = driver.Add(prompt, 1, 20, Lane::kShared, 0, "a");
  const SequenceId other = driver.Add(prompt, 1, 20, Lane::kShared, 0, "b");
  driver.RunAll();
  for (const StepPlan& plan : driver.plans()) {
    for (const Admission& admission : plan.admissions) EXPECT_EQ(admission.hit_tokens, 0u);
  }
  EXPECT_EQ(driver.completions().at(after), driver.Reference(prompt, 20, 2));
  EXPECT_EQ(driver.completions().at(other), driver.Reference(prompt, 20, 1));
}

TEST(SchedulerTest, AVersionChangeStopsAGroupFromSharingItsPrompt) {
  Driver driver(100, {.block_tokens = 16, .max_batch_tokens = 32, .max_sequences = 2});
  const std::vector<std::uint32_t> prompt = Prompt(70, 1);
  driver.versions()["a"] = 1;
  const SequenceId first = driver.Add(prompt, 4, 6, Lane::kShared, 0, "a");
  driver.Step(Lane::kShared);
  driver.Step(Lane::kShared);  // 64 of 70 prompt tokens under version 1
  driver.versions()["a"] = 2;
  driver.scheduler().WeightsChanged("a");
  driver.RunAll();
  for (SequenceId id = first + 1; id < first + 4; ++id) EXPECT_EQ(driver.completions().at(id), driver.Reference(prompt, 6, 2));
}

TEST(SchedulerTest, HeldJobsStartNothingNewButFinishWhatRuns) {
  Driver driver(100, {.block_tokens = 16});
  const SequenceId running = driver.Add(Prompt(20, 1), 1, 5, Lane::kShared, 0, "a");
  driver.Step(Lane::kShared);
  driver.scheduler().HoldJob("a", true);
  const SequenceId held = driver.Add(Prompt(20, 2), 1, 5, Lane::kShared, 0, "a");
  const SequenceId other = driver.Add(Prompt(20, 2), 1, 5, Lane::kShared, 0, "b");
  while (driver.Step(Lane::kShared)) {}
  EXPECT_TRUE(driver.completions().contains(running));
  EXPECT_TRUE(driver.completions().contains(other));
  EXPECT_FALSE(driver.completions().contains(held));
  driver.scheduler().HoldJob("a", false);
  driver.RunAll();
  EXPECT_TRUE(driver.completions().contains(held));
}

TEST(SchedulerTest, PreemptAllKeepsTokensAndFindsNothingAgain) {
  Driver driver(100, {.block_tokens = 16});
  const std::vector<std::uint32_t> prompt = Prompt(40, 1);
  const SequenceId first = driver.Add(prompt, 4, 30);
  for (int i = 0; i < 10; ++i) driver.Step(Lane::kShared);
  driver.scheduler().PreemptAll();
  EXPECT_EQ(driver.allocator().num_free(), 100);
  driver.RunAll();
  for (SequenceId id = first; id < first + 4; ++id) EXPECT_EQ(driver.completions().at(id), driver.Reference(prompt, 30));
  EXPECT_EQ(driver.plans()[10].admissions[0].hit_tokens, 0u);
}

// What a plan says of a unit, with ids counted from the unit's first.
std::vector<std::vector<std::uint64_t>> Shape(const std::vector<StepPlan>& plans, SequenceId first) {
  std::vector<std::vector<std::uint64_t>> shape;
  for (const StepPlan& plan : plans) {
    if (plan.lane != Lane::kUnit) continue;
    std::vector<std::uint64_t> step;
    for (const PlannedSequence& p : plan.sequences) step.insert(step.end(), {p.id - first, p.begin, p.num_tokens, p.draws});
    shape.push_back(std::move(step));
  }
  return shape;
}

TEST(SchedulerTest, AUnitsStepsDoNotDependOnOtherRequests) {
  // 40 blocks of 4: the unit alone needs up to 6 groups x 3 members x 12 blocks and is preempted often.
  const SchedulerOptions options = {.block_tokens = 4, .max_batch_tokens = 24, .max_sequences = 12};
  std::vector<std::vector<std::uint64_t>> alone;
  for (unsigned seed = 0; seed < 12; ++seed) {
    SCOPED_TRACE(seed);
    testing::SeededRandom random(seed);
    Driver driver(40, options);
    const auto disturb = [&] {
      if (seed == 0) return;
      if (random() % 3 == 0) driver.Add(Prompt(1 + random() % 40, random() % 4), 1 + random() % 3, 1 + random() % 30);
      for (unsigned i = random() % 3; i > 0; --i) driver.Step(Lane::kShared);
      if (random() % 10 == 0) {
        std::vector<SequenceId> shared;
        for (SequenceId id : driver.live()) {
          if (!driver.scheduler().sequence(id).prompt->empty() && driver.scheduler().sequence(id).prompt->front() != 49) {
            shared.push_back(id);
          }
        }
        if (!shared.empty()) driver.Cancel(shared[random() % shared.size()]);
      }
    };
    for (int i = 0; i < 20; ++i) disturb();
    std::vector<std::vector<std::uint32_t>> prompts;
    SequenceId first = 0;
    for (std::uint32_t group = 0; group < 6; ++group) {
      prompts.push_back(Prompt(5 + 3 * group, group));
      prompts.back().front() = 49;  // the mark of the unit's prompts
      const SequenceId id = driver.Add(prompts.back(), 3, 20 + group, Lane::kUnit, 1);
      if (group == 0) first = id;
    }
    while (driver.live().contains(first + 17) || driver.scheduler().HasSequences(Lane::kUnit)) {
      disturb();
      ASSERT_TRUE(driver.Step(Lane::kUnit)) << "a unit never waits for others";
    }
    if (seed == 0) {
      alone = Shape(driver.plans(), first);
      EXPECT_FALSE(driver.preempted().empty()) << "the pool is large enough to hide what this test is about";
    } else {
      EXPECT_EQ(Shape(driver.plans(), first), alone);
    }
    for (std::uint32_t i = 0; i < 18; ++i) {
      EXPECT_EQ(driver.completions().at(first + i), driver.Reference(prompts[i / 3], 20 + i / 3));
    }
    driver.RunAll();
    EXPECT_EQ(driver.allocator().num_free(), 40);
  }
}

TEST(SchedulerTest, UnitsRunOneAfterTheOther) {
  Driver driver(100, {.block_tokens = 16});
  driver.Add(Prompt(20, 1), 2, 10, Lane::kUnit, 1);
  const SequenceId second = driver.Add(Prompt(20, 2), 2, 10, Lane::kUnit, 2);
  driver.RunAll();
  bool has_second_begun = false;
  for (const StepPlan& plan : driver.plans()) {
    for (const PlannedSequence& planned : plan.sequences) {
      if (planned.id >= second) has_second_begun = true;
      EXPECT_EQ(planned.id >= second, has_second_begun);
    }
  }
}

TEST(SchedulerTest, RandomOperationsNeverLoseRepeatOrCorruptAToken) {
  for (unsigned seed = 0; seed < 30; ++seed) {
    SCOPED_TRACE(seed);
    testing::SeededRandom random(1000 + seed);
    const int block_tokens = 1 + static_cast<int>(random() % 7);
    const int num_blocks = 100 / block_tokens + 5;  // > 60 tokens: every request fits alone
    Driver driver(num_blocks, {.block_tokens = block_tokens,
                               .max_batch_tokens = 8 + static_cast<int>(random() % 40),
                               .max_sequences = 1 + static_cast<int>(random() % 8)});
    struct Expected {
      std::vector<std::uint32_t> prompt;
      std::uint32_t max_tokens;
      float version;
      std::string job;
    };
    std::map<SequenceId, Expected> expected;
    driver.versions() = {{"", 0}, {"a", 1}, {"b", 1}};
    std::uint64_t unit_id = 0;
    for (int operation = 0; operation < 400; ++operation) {
      const unsigned kind = random() % 20;
      if (kind < 3) {
        const std::string job = std::vector<std::string>{"", "a", "b"}[random() % 3];
        const bool is_unit = random() % 4 == 0;
        const Expected request = {.prompt = Prompt(1 + random() % 40, random() % 3),
                                  .max_tokens = 1 + random() % 20,
                                  .version = static_cast<float>(driver.versions()[job]),
                                  .job = job};
        const std::uint32_t group_size = 1 + random() % 5;
        const SequenceId first = driver.Add(request.prompt, group_size, request.max_tokens, is_unit ? Lane::kUnit : Lane::kShared,
                                            is_unit ? ++unit_id : 0, job);
        for (SequenceId id = first; id < first + group_size; ++id) expected[id] = request;
      } else if (kind == 3 && !driver.live().empty()) {
        const SequenceId id = *std::next(driver.live().begin(), random() % driver.live().size());
        driver.Cancel(id);
        expected.erase(id);
      } else if (kind == 4 && random() % 4 == 0) {
        driver.scheduler().PreemptAll();
      } else if (kind == 5 && random() % 3 == 0) {
        const std::string job = random() % 2 ? "a" : "b";
        ++driver.versions()[job];
        driver.scheduler().WeightsChanged(job);
        // Those that live now may hold tokens of either version; the next ones must not.
        std::erase_if(expected,
                      [&](const auto& entry) { return entry.second.job == job && driver.live().contains(entry.first); });
      } else {
        driver.Step(random() % 2 ? Lane::kUnit : Lane::kShared);
      }
      if (::testing::Test::HasFailure()) return;
    }
    driver.RunAll();
    for (const auto& [id, request] : expected) {
      ASSERT_EQ(driver.completions().at(id), driver.Reference(request.prompt, request.max_tokens, request.version)) << id;
    }
    EXPECT_EQ(driver.allocator().num_free(), num_blocks);
    EXPECT_EQ(driver.scheduler().num_running() + driver.scheduler().num_waiting(), 0);
  }
}

// Five jobs, two adapters a step: every job's sequences end with what the model gives, no step names more than two jobs, and no
// job waits longer than it takes the others to have their turn.
TEST(SchedulerTest, JobsTakeTurnsWhereAStepHoldsFewerAdapters) {
  for (const int max_adapters : {1, 2}) {
    Driver driver(40, {.block_tokens = 4, .max_adapters = max_adapters});
    std::map<SequenceId, std::string> job_of;
    std::map<SequenceId, std::vector<std::uint32_t>> expected;
    for (std::uint32_t i = 0; i < 6; ++i) {
      const std::string job = i == 5 ? "" : absl::StrCat("job", i);
      driver.versions()[job] = i;
      const SequenceId first = driver.Add(Prompt(6 + i, i), 2, 12, Lane::kShared, 0, job);
      for (SequenceId id = first; id < first + 2; ++id) {
        job_of[id] = job;
        expected[id] = driver.Reference(Prompt(6 + i, i), 12, static_cast<float>(i));
      }
    }
    driver.RunAll();
    EXPECT_EQ(driver.completions(), expected);
    std::map<std::string, std::size_t> last_step;
    std::size_t longest = 0;
    bool has_base_in_between = false;
    for (std::size_t step = 0; step < driver.plans().size(); ++step) {
      std::set<std::string> jobs;
      for (const PlannedSequence& planned : driver.plans()[step].sequences) jobs.insert(job_of.at(planned.id));
      has_base_in_between = has_base_in_between || (jobs.contains("") && jobs.size() > 1);
      jobs.erase("");
      EXPECT_LE(jobs.size(), static_cast<std::size_t>(max_adapters)) << step;
      for (const std::string& job : jobs) {
        longest = std::max(longest, step - last_step[job]);
        last_step[job] = step;
      }
    }
    EXPECT_LE(longest, max_adapters == 1 ? 5u : 3u);
    EXPECT_GT(longest, 1u);
    EXPECT_TRUE(has_base_in_between) << "the base model needs no adapter";
  }
}

// The job whose turn it is has no blocks to begin with: the other one goes on.
TEST(SchedulerTest, ATurnThatCannotBeTakenIsAnothersTurn) {
  Driver driver(8, {.block_tokens = 4, .max_adapters = 1});
  driver.versions()["a"] = 1;
  driver.versions()["b"] = 2;
  const SequenceId first = driver.Add(Prompt(20, 1), 1, 10, Lane::kShared, 0, "a");
  const SequenceId second = driver.Add(Prompt(20, 2), 1, 10, Lane::kShared, 0, "b");
  for (int step = 0; step < 10; ++step) EXPECT_TRUE(driver.Step(Lane::kShared)) << step;
  EXPECT_EQ(driver.completions().at(first), driver.Reference(Prompt(20, 1), 10, 1));
  driver.RunAll();
  EXPECT_EQ(driver.completions().at(second), driver.Reference(Prompt(20, 2), 10, 2));
}

}  // namespace
}  // namespace tandem
