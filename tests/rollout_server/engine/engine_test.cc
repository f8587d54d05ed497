#include "rollout_server/engine/engine.h"
#include "common/base/clock.h"

#include <algorithm>
#include <functional>
#include <future>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/rollout_server/support/fake_model.h"
#include "tests/rollout_server/support/recording_sink.h"

namespace tandem {
namespace {

using testing::Completion;
using testing::FakeModel;
using testing::FakeTokenizer;
using testing::Gate;
using ::testing::HasSubstr;
using testing::LogitsOf;
using testing::NextHash;
using testing::RecordingSink;

constexpr int kVocabSize = 40;
constexpr int kBlockTokens = 4;

struct TestEngineOptions {
  int num_blocks = 100;
  int max_sequences = 16;
  int max_waiting_sequences = 100;
  bool is_paused = false;
  bool is_gated = false;
};

class TestEngine {
 public:
  explicit TestEngine(bool runs_ahead, TestEngineOptions options = {}) : model(options.num_blocks, kBlockTokens, kVocabSize) {
    if (options.is_gated) model.gate = &gate;
    metrics = *Metrics::Create("");
    EngineOptions engine_options;
    engine_options.num_blocks = options.num_blocks;
    engine_options.block_tokens = kBlockTokens;
    engine_options.max_batch_tokens = 64;
    engine_options.max_sequences = options.max_sequences;
    engine_options.max_waiting_sequences = options.max_waiting_sequences;
    engine_options.vocab_size = kVocabSize;
    engine_options.is_paused = options.is_paused;
    engine_options.runs_ahead = runs_ahead;
    engine = *Engine::Create(engine_options, &model, sampler.get(), FakeTokenizer::Numbered(kVocabSize), metrics.get());
  }
  ~TestEngine() {
    gate.Open();
    engine->Stop();
  }

  std::shared_ptr<RecordingSink> Submit(BatchRequest batch) {
    auto sink = std::make_shared<RecordingSink>();
    const absl::Status status = engine->Submit(std::move(batch), sink);
    EXPECT_TRUE(status.ok()) << status;
    return sink;
  }
  // Calls `command` on a thread of its own and returns when the engine has it in its queue as the n-th (engine at the gate).
  std::future<absl::Status> Queue(std::size_t n, std::function<absl::Status()> command) {
    std::future<absl::Status> result = std::async(std::launch::async, std::move(command));
    for (int tries = 0; engine->status().queued_commands < n && tries < 20000; ++tries) absl::SleepFor(absl::Milliseconds(1));
    EXPECT_EQ(engine->status().queued_commands, n);
    return result;
  }
  // The engine tells its load after each step: waits until no block is held.
  bool AwaitNoBlocks() const {
    for (int tries = 0; engine->status().kv_blocks_used > 0 && tries < 20000; ++tries) absl::SleepFor(absl::Milliseconds(1));
    return engine->status().kv_blocks_used == 0;
  }
  double Counter(const std::string& name) const {
    const std::string text = metrics->Text();
    const std::size_t place = text.find("\n" + name + " ");
    return place == std::string::npos ? -1 : std::stod(text.substr(place + name.size() + 2));
  }
  absl::Status Activate(const std::string& job, std::uint64_t version, bool drain = false,
                        absl::Duration timeout = absl::Seconds(20)) {
    Adapter adapter;
    adapter.job = job;
    adapter.weight_version = version;
    adapter.layout = std::make_shared<AdapterLayout>();
    adapter.scale = static_cast<float>(version);
    return engine->Activate(adapter, drain, MonotonicTime::Now() + timeout);
  }
  absl::Status Yield(v1::StreamMode mode, absl::Duration timeout = absl::Seconds(20)) {
    return engine->YieldElastic(mode, MonotonicTime::Now() + timeout);
  }

  FakeModel model;
  std::unique_ptr<Sampler> sampler = *Sampler::Create({.vocab_size = kVocabSize});
  Gate gate;
  std::unique_ptr<Metrics> metrics;
  std::unique_ptr<Engine> engine;
};

BatchRequest OneGroup(std::vector<std::uint32_t> prompt, std::uint32_t group_size, std::uint32_t max_tokens,
                      const std::string& job = "", v1::ScheduleMode mode = v1::SCHEDULE_MODE_SHARED) {
  BatchRequest batch;
  batch.job = job;
  batch.mode = mode;
  GroupRequest group;
  group.group_size = group_size;
  group.sampling.max_tokens = max_tokens;
  group.sampling.seed = 77;
  group.prompt = std::make_shared<const std::vector<std::uint32_t>>(std::move(prompt));
  group.prompt_kind = "ids";
  batch.groups.push_back(std::move(group));
  return batch;
}

std::vector<std::uint32_t> Prompt(std::uint32_t size, std::uint32_t salt) {
  std::vector<std::uint32_t> ids(size);
  for (std::uint32_t i = 0; i < size; ++i) ids[i] = (i * 7 + salt) % kVocabSize;
  return ids;
}

// The completion that model and sampler give without engine and cache; the version of each token by `version_of(position)`.
Completion Reference(const GroupRequest& group, std::uint32_t member,
                     const std::function<std::uint64_t(std::size_t)>& version_of) {
  const auto sampler = *Sampler::Create({.vocab_size = kVocabSize});
  Completion completion;
  std::uint64_t hash = 0;
  for (std::uint32_t token : *group.prompt) hash = NextHash(hash, token, static_cast<float>(version_of(0)));
  while (completion.ids.size() < group.sampling.max_tokens) {
    const std::size_t position = completion.ids.size();
    const std::vector<float> logits = LogitsOf(hash, kVocabSize);
    const DrawInput input = {.params = &group.sampling,
                             .seed = DeriveSeed(group.sampling.seed, member),
                             .position = static_cast<std::uint32_t>(position),
                             .prompt = *group.prompt,
                             .completion = completion.ids};
    const DrawnToken token =
        *sampler->Draw({.data = logits.data(), .num_rows = 1, .vocab_size = kVocabSize}, {&input, 1}).front();
    completion.ids.push_back(token.id);
    completion.rollout_logprobs.push_back(token.rollout_logprob);
    completion.versions.push_back(version_of(position));
    // Computed by the step that draws the next token, so under that one's version.
    hash = NextHash(hash, token.id, static_cast<float>(version_of(position + 1)));
  }
  completion.reason = v1::FINISH_REASON_LENGTH;
  completion.reported_tokens = group.sampling.max_tokens;
  return completion;
}
Completion Reference(const GroupRequest& group, std::uint32_t member) {
  return Reference(group, member, [](std::size_t) { return 0; });
}

// Whether steps are handed over before the tokens of the one before are known: nothing that a caller sees may tell.
class EngineTest : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(InTurnAndAhead, EngineTest, ::testing::Bool(),
                         [](const auto& run) { return run.param ? "Ahead" : "InTurn"; });

TEST_P(EngineTest, GivesWhatModelAndSamplerGiveWithoutACache) {
  TestEngine test(GetParam());
  const BatchRequest batch = OneGroup(Prompt(10, 1), 5, 30);
  const auto sink = test.Submit(batch);
  ASSERT_TRUE(sink->Await().ok());
  const auto completions = sink->completions();
  ASSERT_EQ(completions.size(), 5u);
  for (std::uint32_t member = 0; member < 5; ++member) {
    EXPECT_EQ(completions.at({0, member}), Reference(batch.groups[0], member));
  }
  EXPECT_NE(completions.at({0, 0}).ids, completions.at({0, 1}).ids) << "each member has its own seed";
  EXPECT_TRUE(test.AwaitNoBlocks());
  EXPECT_EQ(test.Counter("tandem_generation_tokens_total"), 150);
  EXPECT_EQ(test.Counter("tandem_prompt_tokens_total"), 10);
}

TEST_P(EngineTest, PreemptedSequencesContinueWithTheSameTokens) {
  TestEngine test(GetParam(), {.num_blocks = 20});
  std::vector<BatchRequest> batches;
  std::vector<std::shared_ptr<RecordingSink>> sinks;
  for (std::uint32_t i = 0; i < 4; ++i) {
    batches.push_back(OneGroup(Prompt(10, i), 3, 40));
    sinks.push_back(test.Submit(batches.back()));
  }
  for (std::size_t i = 0; i < sinks.size(); ++i) {
    ASSERT_TRUE(sinks[i]->Await().ok());
    for (const auto& [key, completion] : sinks[i]->completions()) {
      EXPECT_EQ(completion, Reference(batches[i].groups[0], key.second));
    }
  }
  EXPECT_GE(test.Counter("tandem_num_preemptions_total"), 1);
}

// CASES C09
TEST_P(EngineTest, TokensCarryTheVersionTheyWereDrawnUnder) {
  TestEngine test(GetParam(), {.is_gated = true});
  ASSERT_TRUE(test.Activate("j", 1).ok());
  const BatchRequest batch = OneGroup(Prompt(10, 1), 1, 10, "j");
  const auto sink = test.Submit(batch);
  test.gate.Grant(3);
  ASSERT_TRUE(test.gate.AwaitEntry(4));  // three tokens are drawn, the step of the fourth runs
  auto activated = test.Queue(1, [&] { return test.Activate("j", 2); });
  test.gate.Open();
  ASSERT_TRUE(activated.get().ok());
  ASSERT_TRUE(sink->Await().ok());
  const auto version_of = [](std::size_t position) { return position < 4 ? 1 : 2; };
  EXPECT_EQ(sink->completions().at({0, 0}), Reference(batch.groups[0], 0, version_of)) << "version 2 over the cache as it was";

  const auto again = test.Submit(batch);
  ASSERT_TRUE(again->Await().ok());
  EXPECT_EQ(again->cached_tokens(0), 0u) << "no block made under version 1";
  EXPECT_EQ(again->completions().at({0, 0}), Reference(batch.groups[0], 0, [](std::size_t) { return 2; }));
  const auto third = test.Submit(batch);
  ASSERT_TRUE(third->Await().ok());
  EXPECT_EQ(third->cached_tokens(0), 8u) << "blocks of version 2 are found";
}

// CASES C09
TEST_P(EngineTest, TwoPublishesBeforeAStepGiveOneSpanOfTheNewer) {
  TestEngine test(GetParam(), {.is_gated = true});
  ASSERT_TRUE(test.Activate("j", 1).ok());
  const auto sink = test.Submit(OneGroup(Prompt(10, 1), 1, 10, "j"));
  test.gate.Grant(3);
  ASSERT_TRUE(test.gate.AwaitEntry(4));
  auto second = test.Queue(1, [&] { return test.Activate("j", 2); });
  auto third = test.Queue(2, [&] { return test.Activate("j", 3); });
  test.gate.Open();
  EXPECT_TRUE(second.get().ok());
  EXPECT_TRUE(third.get().ok());
  ASSERT_TRUE(sink->Await().ok());
  EXPECT_EQ(sink->completions().at({0, 0}).versions, (std::vector<std::uint64_t>{1, 1, 1, 1, 3, 3, 3, 3, 3, 3}));
}

// CASES C09
TEST_P(EngineTest, DrainingActivationWaitsForTheOlderVersionAndHoldsTheNew) {
  TestEngine test(GetParam(), {.is_gated = true});
  ASSERT_TRUE(test.Activate("j", 1).ok());
  const auto running = test.Submit(OneGroup(Prompt(10, 1), 1, 10, "j"));
  test.gate.Grant(3);
  ASSERT_TRUE(test.gate.AwaitEntry(4));
  auto activated = test.Queue(1, [&] { return test.Activate("j", 2, /*drain=*/true); });
  auto late = std::make_shared<RecordingSink>();
  ASSERT_TRUE(test.engine->Submit(OneGroup(Prompt(10, 2), 1, 10, "j"), late).ok());
  test.gate.Open();
  EXPECT_TRUE(activated.get().ok());
  ASSERT_TRUE(running->Await().ok());
  ASSERT_TRUE(late->Await().ok());
  EXPECT_EQ(running->completions().at({0, 0}).versions, std::vector<std::uint64_t>(10, 1));
  EXPECT_EQ(late->completions().at({0, 0}).versions, std::vector<std::uint64_t>(10, 2));
}

// CASES C44
TEST_P(EngineTest, AnActivationThatTimesOutHasNotHappened) {
  TestEngine test(GetParam(), {.is_gated = true});
  ASSERT_TRUE(test.Activate("j", 1).ok());
  const auto sink = test.Submit(OneGroup(Prompt(10, 1), 1, 10, "j"));
  ASSERT_TRUE(test.gate.AwaitEntry(1));
  EXPECT_EQ(test.Activate("j", 2, /*drain=*/false, absl::Milliseconds(30)).code(), absl::StatusCode::kDeadlineExceeded);
  test.gate.Open();
  ASSERT_TRUE(sink->Await().ok());
  EXPECT_EQ(sink->completions().at({0, 0}).versions, std::vector<std::uint64_t>(10, 1));
  EXPECT_TRUE(test.Activate("j", 2).ok()) << "the version was not used up";
  EXPECT_EQ(test.Activate("j", 2).code(), absl::StatusCode::kAborted);
}

TEST_P(EngineTest, RequestsForUnknownJobsAndVersionsAreRefused) {
  TestEngine test(GetParam());
  EXPECT_EQ(test.Submit(OneGroup({1}, 1, 1, "j"))->Await().code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(test.Activate("j", 3).ok());
  BatchRequest batch = OneGroup({1}, 1, 1, "j");
  batch.weight_version = 2;
  const absl::Status status = test.Submit(batch)->Await();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), ::testing::AllOf(HasSubstr("2"), HasSubstr("3")));
  batch.weight_version = 3;
  EXPECT_TRUE(test.Submit(batch)->Await().ok());
}

// CASES C35
TEST_P(EngineTest, PauseAnswersAfterTheLastStepAndResumesWithTheSameTokens) {
  TestEngine test(GetParam(), {.is_gated = true});
  std::vector<BatchRequest> batches;
  std::vector<std::shared_ptr<RecordingSink>> sinks;
  for (std::uint32_t i = 0; i < 8; ++i) {
    batches.push_back(OneGroup(Prompt(10, i), 1, 20));
    sinks.push_back(test.Submit(batches.back()));
  }
  test.gate.Grant(5);
  ASSERT_TRUE(test.gate.AwaitEntry(6));
  auto yielded = test.Queue(1, [&] { return test.Yield(v1::STREAM_MODE_PAUSE); });
  sinks[3]->Cancel();
  EXPECT_EQ(yielded.wait_for(std::chrono::milliseconds(30)), std::future_status::timeout) << "a step still uses the memory";
  test.gate.Open();
  ASSERT_TRUE(yielded.get().ok());
  EXPECT_TRUE(test.engine->status().is_paused);
  EXPECT_TRUE(test.AwaitNoBlocks());
  EXPECT_TRUE(test.Yield(v1::STREAM_MODE_DRAIN).ok()) << "idempotent";
  batches.push_back(OneGroup(Prompt(10, 9), 1, 20));
  sinks.push_back(test.Submit(batches.back()));
  EXPECT_EQ(sinks[3]->Await().code(), absl::StatusCode::kCancelled) << "cancelled while paused";
  EXPECT_EQ(test.gate.num_entered(), 6) << "no step while paused";
  ASSERT_TRUE(test.engine->ReturnElastic(2).ok());
  for (std::size_t i = 0; i < sinks.size(); ++i) {
    if (i == 3) continue;
    ASSERT_TRUE(sinks[i]->Await().ok());
    EXPECT_EQ(sinks[i]->completions().at({0, 0}), Reference(batches[i].groups[0], 0)) << i;
    EXPECT_EQ(sinks[i]->cached_tokens(0), 0u);
  }
}

// CASES C35
TEST_P(EngineTest, DrainFinishesWhatRunsAndKeepsWhatWaits) {
  TestEngine test(GetParam(), {.is_gated = true});
  const BatchRequest batch = OneGroup(Prompt(10, 1), 2, 20);
  const auto running = test.Submit(batch);
  test.gate.Grant(5);
  ASSERT_TRUE(test.gate.AwaitEntry(6));
  auto yielded = test.Queue(1, [&] { return test.Yield(v1::STREAM_MODE_DRAIN); });
  auto waiting = std::make_shared<RecordingSink>();
  ASSERT_TRUE(test.engine->Submit(batch, waiting).ok());
  test.gate.Open();
  ASSERT_TRUE(yielded.get().ok());
  ASSERT_TRUE(running->Await().ok());
  EXPECT_TRUE(waiting->completions().empty());
  EXPECT_EQ(test.engine->status().waiting_sequences, 2);
  ASSERT_TRUE(test.engine->ReturnElastic(2).ok());
  ASSERT_TRUE(waiting->Await().ok());
  EXPECT_EQ(waiting->completions(), running->completions());
  EXPECT_EQ(waiting->cached_tokens(0), 0u) << "nothing is found over a phase switch";
}

TEST_P(EngineTest, ADrainThatTimesOutLeavesTheEngineServing) {
  TestEngine test(GetParam(), {.is_gated = true});
  const auto sink = test.Submit(OneGroup(Prompt(10, 1), 1, 20));
  ASSERT_TRUE(test.gate.AwaitEntry(1));
  EXPECT_EQ(test.Yield(v1::STREAM_MODE_DRAIN, absl::Milliseconds(30)).code(), absl::StatusCode::kDeadlineExceeded);
  test.gate.Open();
  ASSERT_TRUE(sink->Await().ok());
  EXPECT_TRUE(test.Submit(OneGroup(Prompt(10, 1), 1, 20))->Await().ok());
  EXPECT_FALSE(test.engine->status().is_paused);
}

TEST_P(EngineTest, StartsPausedWhileTheTrainerHoldsTheMemory) {
  TestEngine test(GetParam(), {.is_paused = true});
  const auto sink = test.Submit(OneGroup(Prompt(10, 1), 1, 5));
  EXPECT_EQ(test.Activate("j", 1).code(), absl::StatusCode::kOk) << "commands are heard while paused";
  EXPECT_FALSE(sink->has_ended());
  EXPECT_EQ(test.model.num_runs, 0);
  ASSERT_TRUE(test.engine->ReturnElastic(1).ok());
  EXPECT_TRUE(sink->Await().ok());
}

TEST_P(EngineTest, CancelFreesTheBatchesBlocks) {
  TestEngine test(GetParam(), {.is_gated = true});
  const auto sink = test.Submit(OneGroup(Prompt(10, 1), 4, 100));
  test.gate.Grant(5);
  ASSERT_TRUE(test.gate.AwaitEntry(6));
  sink->Cancel();
  test.gate.Open();
  EXPECT_EQ(sink->Await().code(), absl::StatusCode::kCancelled);
  for (std::uint32_t member = 0; member < 4; ++member) {
    const auto& completion = sink->completions().at({0, member});
    EXPECT_EQ(completion.reason, v1::FINISH_REASON_CANCELLED);
    EXPECT_EQ(completion.reported_tokens, completion.ids.size()) << "what is being drawn is not delivered";
  }
  EXPECT_TRUE(test.AwaitNoBlocks());
}

TEST_P(EngineTest, AFullWaitingQueueRefuses) {
  TestEngine test(GetParam(), {.max_sequences = 1, .max_waiting_sequences = 4, .is_gated = true});
  const auto first = test.Submit(OneGroup(Prompt(10, 1), 4, 3));
  ASSERT_TRUE(test.gate.AwaitEntry(1));  // one runs, three wait
  const auto second = test.Submit(OneGroup(Prompt(10, 2), 1, 3));
  const auto third = test.Submit(OneGroup(Prompt(10, 3), 1, 3));
  test.gate.Open();
  const absl::Status status = third->Await();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("4"));
  EXPECT_TRUE(first->Await().ok());
  EXPECT_TRUE(second->Await().ok());
}

// CASES C06
TEST_P(EngineTest, NanLogitsEndTheirSequenceAlone) {
  const auto run = [](std::optional<std::uint32_t> nan_after_token) {
    TestEngine test(GetParam());
    test.model.nan_after_token = nan_after_token;
    BatchRequest batch;
    batch.mode = v1::SCHEDULE_MODE_UNIT;
    for (std::uint32_t i = 0; i < 8; ++i) {
      GroupRequest group = OneGroup({i == 5 ? 39u : i}, 1, 1).groups[0];
      group.group_index = i;
      group.sampling.temperature = 0;
      batch.groups.push_back(group);
    }
    const auto sink = test.Submit(batch);
    EXPECT_TRUE(sink->Await().ok());
    EXPECT_EQ(test.Counter("tandem_rollout_bad_logits_total"), nan_after_token.has_value() ? 1 : 0);
    return sink->completions();
  };
  const auto good = run(std::nullopt);
  const auto bad = run(39);
  for (std::uint32_t i = 0; i < 8; ++i) {
    if (i == 5) {
      EXPECT_EQ(bad.at({i, 0}).reason, v1::FINISH_REASON_ERROR);
      EXPECT_THAT(bad.at({i, 0}).error, ::testing::AllOf(HasSubstr("NaN logits"), HasSubstr("engine step 1")));
      EXPECT_TRUE(bad.at({i, 0}).ids.empty());
      EXPECT_EQ(bad.at({i, 0}).reported_tokens, 0u);
    } else {
      EXPECT_EQ(bad.at({i, 0}), good.at({i, 0}));
    }
  }
}

TEST_P(EngineTest, AFailedStepEndsItsSequencesAndTheEngineGoesOn) {
  TestEngine test(GetParam());
  test.model.fail_next = true;
  const auto sink = test.Submit(OneGroup(Prompt(10, 1), 1, 5));
  ASSERT_TRUE(sink->Await().ok());
  EXPECT_EQ(sink->completions().at({0, 0}).reason, v1::FINISH_REASON_ERROR);
  EXPECT_THAT(sink->completions().at({0, 0}).error, HasSubstr("told to fail"));
  const auto after = test.Submit(OneGroup(Prompt(10, 1), 1, 5));
  ASSERT_TRUE(after->Await().ok());
  EXPECT_EQ(after->completions().at({0, 0}).reason, v1::FINISH_REASON_LENGTH);
  EXPECT_TRUE(test.engine->error().ok());
}

// Weights or adapters that give no numbers are their callers' affair; a model that cannot run ends the daemon.
TEST_P(EngineTest, StepsWhoseNumbersAreOutOfRangeDoNotEndTheEngine) {
  for (const bool is_out_of_range : {true, false}) {
    TestEngine test(GetParam());
    test.model.fails_with = is_out_of_range ? absl::OutOfRangeError("no numbers") : absl::InternalError("no device");
    for (int i = 0; i < 10; ++i) {
      const auto sink = test.Submit(OneGroup(Prompt(10, 1), 1, 5));
      ASSERT_TRUE(sink->Await().ok());
      EXPECT_EQ(sink->completions().at({0, 0}).reason, v1::FINISH_REASON_ERROR);
      EXPECT_THAT(sink->completions().at({0, 0}).error, HasSubstr(is_out_of_range ? "no numbers" : "no device"));
    }
    EXPECT_EQ(test.engine->error().ok(), is_out_of_range) << test.engine->error();
  }
}

TEST_P(EngineTest, EndsAtStopIdsAndStopStrings) {
  TestEngine test(GetParam());
  BatchRequest batch = OneGroup(Prompt(10, 1), 1, 30);
  const Completion whole = Reference(batch.groups[0], 0);
  // A token that does not stand before its place, so that the stop is where we expect it.
  std::size_t place = 5;
  while (std::find(whole.ids.begin(), whole.ids.begin() + place, whole.ids[place]) != whole.ids.begin() + place) ++place;
  ASSERT_LT(place, 29u);
  const std::vector<std::uint32_t> expected(whole.ids.begin(), whole.ids.begin() + place + 1);

  batch.groups[0].sampling.stop_token_ids = {whole.ids[place]};
  auto sink = test.Submit(batch);
  ASSERT_TRUE(sink->Await().ok());
  EXPECT_EQ(sink->completions().at({0, 0}).ids, expected);
  EXPECT_EQ(sink->completions().at({0, 0}).reason, v1::FINISH_REASON_STOP);

  // CASES C05: text ends before the match, ids with the token that completed it.
  batch.groups[0].sampling.stop_token_ids.clear();
  batch.groups[0].sampling.stop_strings = {" a" + std::to_string(whole.ids[place]) + " "};
  batch.return_text = true;
  sink = test.Submit(batch);
  ASSERT_TRUE(sink->Await().ok());
  const Completion completion = sink->completions().at({0, 0});
  EXPECT_EQ(completion.ids, expected);
  EXPECT_EQ(completion.reported_tokens, expected.size());
  EXPECT_EQ(completion.rollout_logprobs.size(), expected.size());
  EXPECT_EQ(completion.reason, v1::FINISH_REASON_STOP);
  std::string text;
  for (std::size_t i = 0; i < place; ++i) text += "a" + std::to_string(whole.ids[i]) + " ";
  text.pop_back();
  EXPECT_EQ(completion.text, text);
}

TEST_P(EngineTest, AStopIsSeenOneStepLateAheadAndTheLastTokenInTime) {
  BatchRequest batch = OneGroup(Prompt(10, 1), 1, 30);
  const Completion whole = Reference(batch.groups[0], 0);
  {
    TestEngine test(GetParam());
    ASSERT_TRUE(test.Submit(batch)->Await().ok());
    test.engine->Stop();
    EXPECT_EQ(test.model.num_runs, 30) << "one a token";
  }
  std::size_t place = 5;
  while (std::find(whole.ids.begin(), whole.ids.begin() + place, whole.ids[place]) != whole.ids.begin() + place) ++place;
  ASSERT_LT(place, 29u);
  batch.groups[0].sampling.stop_token_ids = {whole.ids[place]};
  TestEngine test(GetParam());
  const auto sink = test.Submit(batch);
  ASSERT_TRUE(sink->Await().ok());
  EXPECT_EQ(sink->completions().at({0, 0}).ids.size(), place + 1);
  test.engine->Stop();
  EXPECT_EQ(test.model.num_runs, static_cast<int>(place) + (GetParam() ? 2 : 1));
  EXPECT_EQ(test.Counter("tandem_generation_tokens_total"), place + 1) << "what is thrown away is not counted";
}

TEST_P(EngineTest, PenaltiesSeeEveryTokenAndAreNeverRunAheadOf) {
  BatchRequest batch = OneGroup(Prompt(10, 1), 2, 30);
  batch.groups[0].sampling.repetition_penalty = 1.5;
  batch.groups[0].sampling.presence_penalty = 0.5;
  TestEngine test(GetParam());
  const auto others = test.Submit(OneGroup(Prompt(12, 2), 3, 20));
  const auto sink = test.Submit(batch);
  ASSERT_TRUE(sink->Await().ok());
  ASSERT_TRUE(others->Await().ok());
  for (std::uint32_t member = 0; member < 2; ++member) {
    EXPECT_EQ(sink->completions().at({0, member}), Reference(batch.groups[0], member));
  }
  for (std::uint32_t member = 0; member < 3; ++member) {
    EXPECT_EQ(others->completions().at({0, member}), Reference(OneGroup(Prompt(12, 2), 3, 20).groups[0], member));
  }
}

// Each completion ends where its stop token first comes; units of both kinds of ends, preempted by nobody and preempting others.
TEST_P(EngineTest, AUnitsStepsAreTheSameWhateverElseRuns) {
  BatchRequest unit;
  unit.mode = v1::SCHEDULE_MODE_UNIT;
  unit.job = "j";
  for (std::uint32_t i = 0; i < 5; ++i) {
    GroupRequest group = OneGroup(Prompt(6 + i, i), 3, 25).groups[0];
    group.group_index = i;
    group.sampling.seed = i;
    group.sampling.stop_token_ids = {i, i + 7, i + 14};
    unit.groups.push_back(group);
  }
  const auto run = [&](int num_others) {
    TestEngine test(GetParam(), {.num_blocks = 30});
    EXPECT_TRUE(test.Activate("j", 1).ok());
    std::vector<std::shared_ptr<RecordingSink>> others;
    for (int i = 0; i < num_others; ++i) others.push_back(test.Submit(OneGroup(Prompt(9 + i % 5, i % 3), 2, 30)));
    const auto sink = test.Submit(unit);
    EXPECT_TRUE(sink->Await().ok());
    for (const auto& other : others) EXPECT_TRUE(other->Await().ok());
    test.engine->Stop();
    return test.model.contexts_under_adapters;
  };
  const auto alone = run(0);
  EXPECT_GT(alone.size(), 10u);
  EXPECT_EQ(run(10), alone);
}

TEST_P(EngineTest, AUnitGivesTheSameWhateverElseRuns) {
  BatchRequest unit;
  unit.mode = v1::SCHEDULE_MODE_UNIT;
  for (std::uint32_t i = 0; i < 5; ++i) {
    GroupRequest group = OneGroup(Prompt(6 + i, i), 3, 25).groups[0];
    group.group_index = i;
    group.sampling.seed = i;
    unit.groups.push_back(group);
  }
  const auto run = [&](int num_others) {
    TestEngine test(GetParam(), {.num_blocks = 30});
    std::vector<std::shared_ptr<RecordingSink>> others;
    for (int i = 0; i < num_others; ++i) others.push_back(test.Submit(OneGroup(Prompt(9 + i % 5, i % 3), 2, 30)));
    const auto sink = test.Submit(unit);
    EXPECT_TRUE(sink->Await().ok());
    for (int i = 0; i < num_others; ++i) {  // some were preempted with a token on its way
      EXPECT_TRUE(others[i]->Await().ok());
      const GroupRequest group = OneGroup(Prompt(9 + i % 5, i % 3), 2, 30).groups[0];
      for (std::uint32_t member = 0; member < 2; ++member) {
        EXPECT_EQ(others[i]->completions().at({0, member}), Reference(group, member)) << i;
      }
    }
    if (num_others > 0) { EXPECT_GE(test.Counter("tandem_num_preemptions_total"), 1); }
    return sink->completions();
  };
  const auto alone = run(0);
  EXPECT_EQ(run(10), alone);
}

TEST_P(EngineTest, LosingTheTrainerEndsUnitsAndRetiresItsAdapters) {
  TestEngine test(GetParam(), {.is_gated = true});
  ASSERT_TRUE(test.Activate("j", 1).ok());
  const auto unit = test.Submit(OneGroup(Prompt(10, 1), 2, 100, "j", v1::SCHEDULE_MODE_UNIT));
  const auto shared = test.Submit(OneGroup(Prompt(10, 1), 1, 10));
  const auto tuned = test.Submit(OneGroup(Prompt(10, 1), 1, 100, "j"));
  test.gate.Grant(4);
  ASSERT_TRUE(test.gate.AwaitEntry(5));
  auto lost = test.Queue(1, [&] { return test.engine->PeerLost(); });
  test.gate.Open();
  EXPECT_TRUE(lost.get().ok());
  EXPECT_EQ(unit->Await().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(tuned->Await().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(shared->Await().ok());
  EXPECT_EQ(test.Submit(OneGroup({1}, 1, 1, "j"))->Await().code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(test.Activate("j", 1).ok()) << "the job comes back with the version it had";
}

// Whose memory it is may be overwritten as soon as the adapter is retired.
TEST_P(EngineTest, NoActivationThatWaitsOutlivesItsAdapterOrTheTrainer) {
  for (const bool is_lost : {false, true}) {
    SCOPED_TRACE(is_lost);
    TestEngine test(GetParam(), {.is_gated = true});
    ASSERT_TRUE(test.Activate("j", 1).ok());
    const auto running = test.Submit(OneGroup(Prompt(10, 1), 1, 100, "j"));
    test.gate.Grant(3);
    ASSERT_TRUE(test.gate.AwaitEntry(4));
    auto activated = test.Queue(1, [&] { return test.Activate("j", 2, /*drain=*/true); });
    auto retired = test.Queue(2, [&] {
      return is_lost ? test.engine->PeerLost() : test.engine->Retire("j", MonotonicTime::Now() + absl::Seconds(20));
    });
    test.gate.Open();
    EXPECT_TRUE(retired.get().ok());
    EXPECT_EQ(activated.get().code(), absl::StatusCode::kAborted);
    EXPECT_EQ(running->Await().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(test.Submit(OneGroup({1}, 1, 1, "j"))->Await().code(), absl::StatusCode::kNotFound);
    EXPECT_TRUE(test.Activate("j", 1).ok());
    EXPECT_TRUE(test.Submit(OneGroup({1}, 1, 1, "j"))->Await().ok()) << "nothing is held back";
  }
}

TEST_P(EngineTest, StopEndsEveryBatch) {
  TestEngine test(GetParam(), {.is_paused = true});
  const auto sink = test.Submit(OneGroup(Prompt(10, 1), 1, 5));
  test.engine->Stop();
  EXPECT_EQ(sink->Await().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(test.engine->Submit(OneGroup({1}, 1, 1), sink).code(), absl::StatusCode::kUnavailable);
}

TEST(EngineOptionsTest, RefusesOptionsThatCannotWork) {
  EngineOptions options;
  options.num_blocks = 10;
  options.vocab_size = 10;
  options.max_batch_tokens = 8;
  options.max_sequences = 9;
  const auto engine = Engine::Create(options, nullptr, nullptr, nullptr, nullptr);
  EXPECT_EQ(engine.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(engine.status().message()),
              ::testing::AllOf(HasSubstr("max_batch_tokens"), HasSubstr("8"), HasSubstr("9")));
  options.max_sequences = 8;
  options.max_adapters = 0;
  EXPECT_THAT(std::string(Engine::Create(options, nullptr, nullptr, nullptr, nullptr).status().message()),
              ::testing::AllOf(HasSubstr("max_adapters"), HasSubstr("at least 1")));
}

}  // namespace
}  // namespace tandem
