// The whole loop of a job over a fake policy and a fake rollout server: it learns, survives the death of either half, and its
// trajectory does not tell.
#include "trainer_server/job/job_runner.h"
#include "common/base/clock.h"
#include "common/rpc/channel.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sqlite3.h>

#include <future>
#include <set>
#include <thread>

#include "absl/strings/escaping.h"
#include "google/protobuf/text_format.h"
#include "nlohmann/json.hpp"
#include "tests/trainer_server/support/fake_rollout.h"
#include "trainer_server/job/job_metrics.h"
#include "trainer_server/service/job_service.h"

namespace tandem {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

std::string Rows() {
  std::string rows;
  for (int i = 0; i < 10; ++i)
    rows += absl::StrCat("{\"prompt\": \"say ", i, "\", \"answer\": ", i % 3 == 0 ? "null" : "3", "}\n");
  return rows;
}

std::string JobText(int num_steps, const std::string& more = "") {
  const std::string sha256 = Sha256Hex(Rows());
  return absl::StrCat(R"(name: "tiny" seed: 5 num_steps: )", num_steps, R"(
    rollout { prompts_per_step: 3 group_size: 4 sampling { temperature: 1 max_tokens: 6 } }
    rewards { name: "ended" weight: 1 ended_by_itself {} }
    rewards { name: "near" weight: 0.1 numeric_distance { answer_field: "answer" scale: 10 } }
    loss { preset: LOSS_PRESET_GRPO } adapter { rank: 2 alpha: 4 } optimizer { learning_rate: 0.2 }
    checkpoint { interval_steps: 3 keep: 2 } data { content: ")",
                      sha256, R"(" }
    evaluation { content: ")",
                      sha256, R"(" interval_steps: 4 } )", more);
}

// Metrics that tell when a checkpoint has just been written.
class WatchedMetrics final : public Metrics {
 public:
  WatchedMetrics() : metrics_(*Metrics::Create("")) {}
  void SetGauge(const Metric& metric, const LabelValues& labels, double value) override {
    if (at && metric.name == kCheckpointTimestampSeconds.name) at("checkpoint");
    metrics_->SetGauge(metric, labels, value);
  }
  void ReplaceGauges(const Metric& metric, const std::vector<std::pair<LabelValues, double>>& values) override {
    metrics_->ReplaceGauges(metric, values);
  }
  void AddCounter(const Metric& metric, const LabelValues& labels, double value) override {
    metrics_->AddCounter(metric, labels, value);
  }
  void Observe(const Metric& metric, const LabelValues& labels, double value) override {
    metrics_->Observe(metric, labels, value);
  }
  void RemoveLabel(const std::string& label, const std::string& value) override { metrics_->RemoveLabel(label, value); }
  int port() const override { return metrics_->port(); }
  std::string Text() const override { return metrics_->Text(); }

  std::function<void(const char* moment)> at;  // may be empty

 private:
  const std::unique_ptr<Metrics> metrics_;
};

// A trainer: everything but the pool and the rollout server dies with it, as a process would.
class Trainer {
 public:
  Trainer(const std::string& directory, FakePool* pool, FakeRollout* rollout)
      : store_(*JobStore::Open(directory + "/jobs.sqlite")),
        content_(*ContentStore::Open(directory + "/content", 8 << 20)),
        standing_(pool->region(v1::REGION_KIND_TRAINER_STANDING)),
        metrics_(std::make_unique<WatchedMetrics>()),
        peer_({.address = rollout->address(),
               .is_attached = [this] { return is_attached_.load(); },
               .patience = absl::Minutes(2)}) {
    LoopEnvironment environment;
    environment.model = SmallModel();
    environment.tokenizer = std::make_shared<ByteTokenizer>();
    environment.encoder = std::make_shared<ByteEncoder>();
    environment.member = pool;
    environment.standing = &standing_;
    environment.node_memory = [this] { return node_; };
    environment.peer = &peer_;
    environment.content = content_.get();
    environment.metrics = metrics_.get();
    environment.make_policy = [this](const AdapterMemory& memory,
                                     const PolicyOptions& options) -> absl::StatusOr<std::unique_ptr<PolicyModel>> {
      auto policy = std::make_unique<FakePolicy>(memory, AdapterLayout::Create(SmallModel(), options.rank, options.targets));
      policy->nan_at_forward = nan_at_forward_;
      policy->max_rows = max_rows_;
      policy->at = at_;
      logit_chunks_.push_back(options.logit_chunk);
      if (logit_chunks_.size() == no_memory_at_policy_) return absl::ResourceExhaustedError("no memory for the policy");
      return policy;
    };
    runner_ = std::make_unique<JobRunner>(
        store_.get(), environment,
        JobRunner::Options{
            .directory = directory, .idle_poll = absl::Milliseconds(10), .ended_job_served = absl::Milliseconds(200)});
    JobService::Options options;
    options.surroundings = {SmallModel(), environment.encoder, content_.get(), environment.node_memory};
    options.model.config = SmallModel();
    options.device = "cpu";
    options.member = pool;
    options.access = Access::Create({}).value();
    service_ = std::make_unique<JobService>(options, store_.get(), content_.get(), runner_.get());
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(service_.get());
    server_ = builder.BuildAndStart();
    stub_ = v1::JobService::NewStub(MakeChannel(absl::StrCat("127.0.0.1:", port)));
  }
  ~Trainer() {
    runner_->Stop();
    server_->Shutdown(GrpcDeadline(MonotonicTime::Now() + absl::Milliseconds(200)));
  }
  void Start() { runner_->Start(); }

  absl::StatusOr<std::string> Submit(const std::string& text, const std::string& rows = Rows()) {
    grpc::ClientContext upload_context, context;
    upload_context.set_wait_for_ready(true);
    v1::UploadResponse uploaded;
    auto writer = stub_->Upload(&upload_context, &uploaded);
    v1::UploadRequest piece;
    piece.mutable_header()->set_sha256(Sha256Hex(rows));
    piece.mutable_header()->set_size_bytes(rows.size());
    writer->Write(piece);
    piece.set_piece(rows);
    writer->Write(piece);
    writer->WritesDone();
    TANDEM_RETURN_IF_ERROR(FromGrpc(writer->Finish()));
    v1::SubmitRequest request;
    request.set_job_text(text);
    v1::SubmitResponse response;
    TANDEM_RETURN_IF_ERROR(FromGrpc(stub_->Submit(&context, request, &response)));
    return response.job();
  }
  v1::JobStatus Status(const std::string& job) { return *runner_->StatusOf(job); }
  v1::JobStatus WaitFor(const std::string& job, const std::function<bool(const v1::JobStatus&)>& is_reached) {
    const MonotonicTime deadline = MonotonicTime::Now() + absl::Minutes(5);
    v1::JobStatus status = Status(job);
    for (std::uint64_t seen = 0; !is_reached(status) && MonotonicTime::Now() < deadline; status = Status(job)) {
      seen = runner_->WaitForChange(seen, absl::Milliseconds(10));
    }
    EXPECT_TRUE(is_reached(status)) << status.ShortDebugString();
    return status;
  }
  v1::JobStatus WaitForState(const std::string& job, v1::JobState state) {
    return WaitFor(job, [&](const v1::JobStatus& status) {
      EXPECT_TRUE(status.state() != v1::JOB_STATE_FAILED || state == v1::JOB_STATE_FAILED) << status.error();
      return status.state() == state || status.state() == v1::JOB_STATE_FAILED;
    });
  }

  std::function<void(const char* moment)> at_;  // of the policies made
  int nan_at_forward_ = 0;
  std::size_t max_rows_ = SIZE_MAX;      // see FakePolicy
  std::vector<int> logit_chunks_;        // of the policies made, in order
  std::size_t no_memory_at_policy_ = 0;  // from 1
  NodeMemory node_ = SmallNode();
  std::atomic<bool> is_attached_ = true;
  std::unique_ptr<JobStore> store_;
  std::unique_ptr<ContentStore> content_;
  FakeStanding standing_;
  std::unique_ptr<WatchedMetrics> metrics_;
  RolloutPeer peer_;
  std::unique_ptr<JobRunner> runner_;
  std::unique_ptr<JobService> service_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<v1::JobService::Stub> stub_;
};

// The history without what measures time, and the adapter and moments of the newest checkpoint.
std::string Trajectory(const std::string& directory, const std::string& job) {
  std::string trajectory;
  std::ifstream file(directory + "/jobs/" + job + "/history.jsonl");
  for (std::string line; std::getline(file, line);) {
    nlohmann::json json = nlohmann::json::parse(line);
    json.erase("times");
    trajectory += json.dump() + "\n";
  }
  const std::string checkpoints = directory + "/jobs/" + job + "/checkpoints";
  const std::uint64_t newest = CheckpointStore::OpenForReading(checkpoints).Steps().back();
  const std::string newest_path = absl::StrFormat("%s/step-%06d/", checkpoints, newest);
  for (const char* name : {"adapter.bin", "first_moments.bin", "second_moments.bin", "reference.bin"}) {
    if (!std::filesystem::exists(newest_path + name)) continue;
    trajectory += absl::StrCat(name, " ", Sha256Hex(ReadText(newest_path + name)), "\n");
  }
  nlohmann::json state = nlohmann::json::parse(ReadText(newest_path + "state.json"));
  state.erase("history_bytes");  // times are written in as many digits as they need
  trajectory += state.dump();
  return trajectory;
}

class JobRunnerTest : public ::testing::Test {
 protected:
  JobRunnerTest() : rollout_(&pool_) {}
  std::unique_ptr<Trainer> NewTrainer(const std::string& directory) {
    return std::make_unique<Trainer>(directory, &pool_, &rollout_);
  }
  // Of a run that nobody disturbs.
  std::string Undisturbed(const std::string& text) {
    const std::string directory = FreshDirectory("undisturbed");
    auto trainer = NewTrainer(directory);
    trainer->Start();
    const auto job = trainer->Submit(text);
    EXPECT_TRUE(job.ok()) << job.status();
    trainer->WaitForState(*job, v1::JOB_STATE_SUCCEEDED);
    return Trajectory(directory, *job);
  }
  std::vector<v1::WatchResponse> Watch(Trainer* trainer, const std::string& job, std::uint32_t from_step) {
    grpc::ClientContext context;
    context.set_deadline(GrpcDeadline(MonotonicTime::Now() + absl::Minutes(5)));
    v1::WatchRequest request;
    request.set_job(job);
    request.set_from_step(from_step);
    auto reader = trainer->stub_->Watch(&context, request);
    std::vector<v1::WatchResponse> responses;
    v1::WatchResponse response;
    while (reader->Read(&response)) responses.push_back(response);
    EXPECT_TRUE(reader->Finish().ok());
    return responses;
  }

  FakePool pool_;
  FakeRollout rollout_;
};

// Also CASES C27: a reward that does not apply to a row leaves every mean and takes nothing else with it.
TEST_F(JobRunnerTest, JobLearnsAndIsWatchedBrowsedAndExported) {
  const std::string directory = FreshDirectory("learns");
  auto trainer = NewTrainer(directory);
  trainer->Start();
  const auto job = trainer->Submit(JobText(12));
  ASSERT_TRUE(job.ok()) << job.status();
  const std::vector<v1::WatchResponse> events = Watch(trainer.get(), *job, 0);
  std::vector<double> rewards;
  std::vector<std::uint32_t> evaluated;
  double before = 0, after = 0;
  for (const v1::WatchResponse& event : events) {
    if (event.has_evaluation()) {
      if (evaluated.empty()) before = event.evaluation().reward();
      after = event.evaluation().reward();
      evaluated.push_back(event.evaluation().step());
      EXPECT_EQ(event.evaluation().num_prompts(), 10u);
      EXPECT_EQ(event.evaluation().rewards_size(), 2);
    }
    if (event.has_step()) {
      EXPECT_EQ(event.step().step(), rewards.size() + 1);
      std::map<std::string, double> values;
      for (const v1::NamedValue& value : event.step().values()) values[value.name()] = value.value();
      for (const char* name :
           {"loss", "grad_norm", "learning_rate", "reward", "reward_std", "frac_reward_zero_std", "rewards/ended/mean",
            "rewards/ended/std", "completions/mean_length", "completions/clipped_ratio", "num_tokens", "step_time"}) {
        EXPECT_TRUE(values.contains(name)) << name;
      }
      rewards.push_back(values["reward"]);
    }
  }
  EXPECT_EQ(rewards.size(), 12u);
  EXPECT_THAT(evaluated, ::testing::ElementsAre(0, 4, 8, 12));
  EXPECT_GT(after, before + 0.05);
  EXPECT_EQ(events.back().status().state(), v1::JOB_STATE_SUCCEEDED);
  EXPECT_GT(pool_.num_phases, 0);

  const std::vector<v1::WatchResponse> late = Watch(trainer.get(), *job, 12);
  EXPECT_EQ(std::ranges::count_if(late, [](const auto& event) { return event.has_step(); }), 1);
  EXPECT_EQ(std::ranges::count_if(late, [](const auto& event) { return event.has_evaluation(); }), 1);

  grpc::ClientContext completions_context, export_context, missing_context, list_context, status_context;
  v1::CompletionsRequest completions;
  completions.set_job(*job);
  completions.set_step(2);
  auto reader = trainer->stub_->Completions(&completions_context, completions);
  v1::CompletionRecord record;
  int num_records = 0;
  while (reader->Read(&record)) {
    ++num_records;
    EXPECT_THAT(record.prompt(), HasSubstr("say "));
    EXPECT_GE(record.rewards_size(), 1);
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(num_records, 12);

  v1::ExportRequest export_request;
  export_request.set_job(*job);
  auto files = trainer->stub_->Export(&export_context, export_request);
  v1::ExportResponse piece;
  std::map<std::string, std::string> exported;
  while (files->Read(&piece)) exported[piece.file()] += piece.piece();
  EXPECT_TRUE(files->Finish().ok());
  EXPECT_EQ(exported.size(), 2u);
  EXPECT_EQ(nlohmann::json::parse(exported["adapter_config.json"])["r"], 2);
  EXPECT_GT(exported["adapter_model.safetensors"].size(), 1000u);

  v1::GetJobRequest missing;
  missing.set_job("nobody");
  v1::JobStatus status;
  EXPECT_EQ(trainer->stub_->GetJob(&missing_context, missing, &status).error_code(), grpc::StatusCode::NOT_FOUND);
  v1::ListJobsResponse jobs;
  EXPECT_TRUE(trainer->stub_->ListJobs(&list_context, {}, &jobs).ok());
  EXPECT_EQ(jobs.jobs_size(), 1);
  v1::TrainerStatus trainer_status;
  EXPECT_TRUE(trainer->stub_->GetStatus(&status_context, {}, &trainer_status).ok());
  EXPECT_EQ(trainer_status.phase(), "idle");
  std::uint64_t pool_bytes = 0;
  for (const v1::OwnedBytes& entry : trainer_status.ledger()) pool_bytes += entry.bytes();
  EXPECT_EQ(pool_bytes, 8u << 20);
  // The job has ended: its series are gone, its adapter can still be asked for. The runner tidies up after it told the end.
  const MonotonicTime deadline = MonotonicTime::Now() + absl::Seconds(10);
  while (trainer->standing_.num_pieces() != 2 && MonotonicTime::Now() < deadline) absl::SleepFor(absl::Milliseconds(5));
  while (trainer->metrics_->Text().find(*job) != std::string::npos && MonotonicTime::Now() < deadline) {
    EXPECT_THAT(trainer->metrics_->Text(), Not(HasSubstr(absl::StrCat("tandem_train_running{job=\"", *job, "\"} 1\n"))));
    absl::SleepFor(absl::Milliseconds(5));
  }
  EXPECT_EQ(trainer->metrics_->Text().find(*job), std::string::npos);
  EXPECT_EQ(rollout_.version(*job), 13u);
  EXPECT_EQ(trainer->standing_.num_pieces(), 2u);
}

// CASES C45: six steps at once; three, death, three more.
TEST_F(JobRunnerTest, TrainerThatDiesAnywhereResumesToTheSameTrajectory) {
  const std::string text = JobText(9);
  const std::string undisturbed = Undisturbed(text);
  const std::string directory = FreshDirectory("killed");
  std::string job;
  for (const std::uint32_t step : {0u, 1u, 4u, 5u, 8u}) {
    auto trainer = NewTrainer(directory);
    trainer->Start();
    if (job.empty()) job = *trainer->Submit(text);
    trainer->WaitFor(
        job, [&](const v1::JobStatus& status) { return status.step() >= step && status.state() == v1::JOB_STATE_RUNNING; });
    trainer.reset();
  }
  auto trainer = NewTrainer(directory);
  EXPECT_EQ(trainer->Status(job).state(), v1::JOB_STATE_RUNNING);
  trainer->Start();
  trainer->WaitForState(job, v1::JOB_STATE_SUCCEEDED);
  EXPECT_EQ(Trajectory(directory, job), undisturbed);
  EXPECT_THAT(undisturbed, HasSubstr("\"reward\""));
}

TEST_F(JobRunnerTest, StopEndsTheStepAndLeavesACheckpointOfTheLastOne) {
  const std::string directory = FreshDirectory("stopped");
  auto trainer = NewTrainer(directory);
  trainer->Start();
  const std::string job = *trainer->Submit(JobText(100000));
  // Checkpoints are due each third step.
  trainer->WaitFor(job, [](const v1::JobStatus& status) { return status.step() >= 4; });
  trainer->runner_->Stop();
  const v1::JobStatus status = trainer->Status(job);
  EXPECT_EQ(status.state(), v1::JOB_STATE_RUNNING);
  const std::vector<std::uint64_t> steps = CheckpointStore::OpenForReading(directory + "/jobs/" + job + "/checkpoints").Steps();
  ASSERT_FALSE(steps.empty());
  EXPECT_GE(steps.back(), status.step());
  EXPECT_LE(steps.back(), status.step() + 1) << "a step that ended as the stop came";
}

TEST_F(JobRunnerTest, RolloutServerThatDiesLeavesTheTrajectoryAlone) {
  const std::string text = JobText(9);
  const std::string undisturbed = Undisturbed(text);
  const std::string directory = FreshDirectory("rollout_dies");
  auto trainer = NewTrainer(directory);
  rollout_.Set({.dying_units = 3, .forgotten_units = 2, .busy_units = 1, .stalled_activations = 0, .corrupt = {}});
  pool_.num_acquire_failures = 2;
  pool_.num_release_failures = 2;
  trainer->is_attached_ = false;
  trainer->Start();
  const std::string job = *trainer->Submit(text);
  trainer->WaitFor(job, [](const v1::JobStatus& status) { return !status.waiting_for().empty(); });
  EXPECT_THAT(trainer->Status(job).waiting_for(), HasSubstr(rollout_.address()));
  trainer->is_attached_ = true;
  trainer->WaitForState(job, v1::JOB_STATE_SUCCEEDED);
  EXPECT_EQ(Trajectory(directory, job), undisturbed);
}

// JobText with fields laid over it.
std::string JobWith(int num_steps, const std::string& more) {
  v1::JobSpec spec;
  google::protobuf::TextFormat::Parser parser;
  EXPECT_TRUE(parser.MergeFromString(JobText(num_steps), &spec) && parser.MergeFromString(more, &spec)) << more;
  std::string text;
  EXPECT_TRUE(google::protobuf::TextFormat::PrintToString(spec, &text));
  return text;
}

// A step's values, or an evaluation's, by name.
std::vector<std::map<std::string, double>> HistoryOf(const std::string& directory, const std::string& job,
                                                     HistoryEvent::Kind kind) {
  std::vector<std::map<std::string, double>> lines;
  HistoryReader history(directory + "/jobs/" + job);
  while (const auto event = history.Next()) {
    if (event->kind != kind) continue;
    lines.emplace_back(event->values.begin(), event->values.end());
    lines.back()["step"] = static_cast<double>(event->step);
  }
  return lines;
}

// Everything that has a state of its own at once: groups drawn again, mini-batches, a reference that moves, evaluations that
// count towards an early stop. CASES C45.
TEST_F(JobRunnerTest, EveryRecipesStateSurvivesDeathBitForBit) {
  const std::string text =
      JobWith(12, R"(rollout { prompts_per_step: 4 group_size: 2 dynamic_sampling { max_rounds: 3 reward: "ended" } }
    loss { beta: 0.1 kl_bias_correction: true updates_per_rollout: 2 mini_batches_per_rollout: 2
      reference_sync { interval_steps: 2 alpha: 0.5 } }
    evaluation { interval_steps: 1 samples_per_prompt: 3 metric: "pass_at_3" pass_reward: "ended"
      early_stop { patience: 9 min_increase: 0.01 } })");
  const std::string undisturbed = Undisturbed(text);
  const std::string directory = FreshDirectory("recipe_killed");
  std::string job;
  for (const std::uint32_t step : {0u, 1u, 2u, 4u, 7u, 8u}) {
    auto trainer = NewTrainer(directory);
    trainer->Start();
    if (job.empty()) job = *trainer->Submit(text);
    trainer->WaitFor(job, [&](const v1::JobStatus& status) {
      return (status.step() >= step && status.state() == v1::JOB_STATE_RUNNING) || status.state() == v1::JOB_STATE_SUCCEEDED;
    });
    trainer.reset();
  }
  auto trainer = NewTrainer(directory);
  trainer->Start();
  trainer->WaitForState(job, v1::JOB_STATE_SUCCEEDED);
  EXPECT_EQ(Trajectory(directory, job), undisturbed);
  EXPECT_THAT(undisturbed, HasSubstr("reference.bin"));
  const auto steps = HistoryOf(directory, job, HistoryEvent::Kind::kStep);
  double replaced = 0, kl = 0;
  for (const auto& step : steps) {
    replaced += step.at("dynamic_sampling/groups_replaced");
    kl += step.at("kl");
    EXPECT_EQ(step.at("dynamic_sampling/groups_drawn") - step.at("dynamic_sampling/groups_replaced"), 4);
    EXPECT_LE(step.at("dynamic_sampling/rounds"), 3);
    EXPECT_GE(step.at("dynamic_sampling/groups_flat"), 0);
  }
  EXPECT_GT(replaced, 0);
  EXPECT_GT(kl, 0);
}

TEST_F(JobRunnerTest, GroupsOfEqualRewardsAreReplacedUntilTheRoundsAreUsedUp) {
  const std::string directory = FreshDirectory("dynamic");
  auto trainer = NewTrainer(directory);
  trainer->Start();

  const std::string job = *trainer->Submit(JobWith(2, R"(rollout { dynamic_sampling { max_rounds: 4 reward: "near" } }
    rewards { name: "letters" weight: 1 keywords { words: "z" } })"));
  trainer->WaitForState(job, v1::JOB_STATE_SUCCEEDED);
  const auto steps = HistoryOf(directory, job, HistoryEvent::Kind::kStep);
  ASSERT_EQ(steps.size(), 2u);
  for (const auto& step : steps) {
    EXPECT_GE(step.at("dynamic_sampling/groups_drawn"), 3);
    EXPECT_EQ(step.at("dynamic_sampling/groups_drawn") - step.at("dynamic_sampling/groups_replaced"), 3);
    EXPECT_TRUE(step.contains("dynamic_sampling/reward"));
  }
  const std::string never = *trainer->Submit(JobWith(1, R"(rollout { dynamic_sampling { max_rounds: 4 reward: "letters" } }
    rewards { name: "letters" weight: 1 keywords { words: "z" } })"));
  trainer->WaitForState(never, v1::JOB_STATE_SUCCEEDED);
  const auto flat = HistoryOf(directory, never, HistoryEvent::Kind::kStep);
  ASSERT_EQ(flat.size(), 1u);
  EXPECT_EQ(flat[0].at("dynamic_sampling/rounds"), 4);
  EXPECT_EQ(flat[0].at("dynamic_sampling/groups_drawn"), 12);
  EXPECT_EQ(flat[0].at("dynamic_sampling/groups_flat"), 3) << "what was drawn first fills the step up";
  EXPECT_EQ(flat[0].at("epoch"), 1.2) << "the stream of prompts has moved on by all that were drawn";
}

TEST_F(JobRunnerTest, JobThatDoesNotRiseEndsEarlyAndItsBestAdapterCanBeExported) {
  const std::string directory = FreshDirectory("early");
  auto trainer = NewTrainer(directory);
  trainer->Start();
  // A rate that moves nothing.
  const std::string job =
      *trainer->Submit(JobWith(100, R"(optimizer { learning_rate: 1e-6 } checkpoint { interval_steps: 1 keep: 1 }
    evaluation { interval_steps: 1 samples_per_prompt: 4 pass_at: 1 pass_at: 2 pass_reward: "ended" metric: "pass_at_2"
      early_stop { patience: 3 min_increase: 0.5 } sampling { max_tokens: 4 } })"));
  const v1::JobStatus ended = trainer->WaitForState(job, v1::JOB_STATE_SUCCEEDED);
  EXPECT_EQ(ended.step(), 3u) << "the first evaluation sets the mark, three more do not rise above it";
  const auto evaluations = HistoryOf(directory, job, HistoryEvent::Kind::kEvaluation);
  ASSERT_EQ(evaluations.size(), 4u);
  double best = -1, best_step = 0;
  for (const auto& evaluation : evaluations) {
    EXPECT_LE(evaluation.at("completions/max_length"), 4);
    EXPECT_GE(evaluation.at("pass_at_2"), evaluation.at("pass_at_1"));
    if (evaluation.at("pass_at_2") > best) {
      best = evaluation.at("pass_at_2");
      best_step = evaluation.at("step");
    }
    EXPECT_EQ(evaluation.at("best/pass_at_2"), best);
    EXPECT_EQ(evaluation.at("best_step"), best_step);
  }
  EXPECT_EQ(evaluations.back().at("stops_job"), 1);
  const auto events = Watch(trainer.get(), job, 0);
  int num_stops = 0;
  for (const v1::WatchResponse& event : events) {
    if (!event.has_evaluation()) continue;
    EXPECT_EQ(event.evaluation().metric(), "pass_at_2");
    EXPECT_EQ(event.evaluation().num_prompts(), 10u);
    num_stops += event.evaluation().stops_job() ? 1 : 0;
  }
  EXPECT_EQ(num_stops, 1);

  // The newest and the best are there, and either can be had.
  std::set<std::uint64_t> kept = {static_cast<std::uint64_t>(best_step), ended.step()};
  const auto store = CheckpointStore::OpenForReading(directory + "/jobs/" + job + "/checkpoints");
  EXPECT_THAT(store.Steps(), ::testing::ElementsAreArray(kept));
  grpc::ClientContext context;
  v1::ExportRequest request;
  request.set_job(job);
  request.set_best(true);
  auto files = trainer->stub_->Export(&context, request);
  v1::ExportResponse piece;
  std::size_t size = 0;
  while (files->Read(&piece)) size += piece.piece().size();
  EXPECT_TRUE(files->Finish().ok());
  EXPECT_GT(size, 1000u);
}

TEST_F(JobRunnerTest, PausedJobGoesOnWhereItStoppedAndACancelledOneKeepsItsCheckpoint) {
  const std::string text = JobText(30);
  const std::string undisturbed = Undisturbed(text);
  const std::string directory = FreshDirectory("paused");
  auto trainer = NewTrainer(directory);
  trainer->Start();
  const std::string job = *trainer->Submit(text), other = *trainer->Submit(JobText(100000));
  trainer->WaitFor(job, [](const v1::JobStatus& status) { return status.step() >= 4; });
  grpc::ClientContext pause_context, resume_context, cancel_context, again_context;
  v1::PauseRequest pause;
  pause.set_job(job);
  v1::JobStatus status;
  ASSERT_TRUE(trainer->stub_->Pause(&pause_context, pause, &status).ok());
  const v1::JobStatus paused = trainer->WaitForState(job, v1::JOB_STATE_PAUSED);
  EXPECT_EQ(CheckpointStore::OpenForReading(directory + "/jobs/" + job + "/checkpoints").Steps().back(), paused.step());
  trainer->WaitFor(other, [](const v1::JobStatus& s) { return s.step() >= 3; });  // the next in the queue runs meanwhile
  v1::ResumeRequest resume;
  resume.set_job(job);
  ASSERT_TRUE(trainer->stub_->Resume(&resume_context, resume, &status).ok());
  EXPECT_EQ(status.state(), v1::JOB_STATE_QUEUED);
  v1::CancelRequest cancel;
  cancel.set_job(other);
  ASSERT_TRUE(trainer->stub_->Cancel(&cancel_context, cancel, &status).ok());
  trainer->WaitForState(other, v1::JOB_STATE_CANCELLED);
  EXPECT_FALSE(CheckpointStore::OpenForReading(directory + "/jobs/" + other + "/checkpoints").Steps().empty());
  EXPECT_EQ(trainer->stub_->Cancel(&again_context, cancel, &status).error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  trainer->WaitForState(job, v1::JOB_STATE_SUCCEEDED);
  EXPECT_EQ(Trajectory(directory, job), undisturbed);
}

TEST_F(JobRunnerTest, JobThatWaitsForAnAbsentRolloutServerCanBePausedAndCancelled) {
  auto trainer = NewTrainer(FreshDirectory("absent"));
  trainer->is_attached_ = false;
  rollout_.Set({.dying_units = 1, .forgotten_units = 0, .busy_units = 0, .stalled_activations = 0, .corrupt = {}});
  trainer->Start();
  const std::string job = *trainer->Submit(JobText(9));
  const auto waits = [](const v1::JobStatus& status) {
    return status.state() == v1::JOB_STATE_RUNNING && !status.waiting_for().empty();
  };
  trainer->WaitFor(job, waits);
  ASSERT_TRUE(trainer->store_->Pause(job).ok());
  trainer->runner_->Notify();
  trainer->WaitForState(job, v1::JOB_STATE_PAUSED);
  rollout_.Set({.dying_units = 1, .forgotten_units = 0, .busy_units = 0, .stalled_activations = 0, .corrupt = {}});
  ASSERT_TRUE(trainer->store_->Resume(job).ok());
  trainer->runner_->Notify();
  trainer->WaitFor(job, waits);
  ASSERT_TRUE(trainer->store_->Cancel(job).ok());
  trainer->runner_->Notify();
  trainer->WaitForState(job, v1::JOB_STATE_CANCELLED);
}

// Something that happens once, when the loop comes to a moment for the n-th time.
class Happening {
 public:
  void Set(const std::string& moment, int num_before, bool stalls, std::function<void()> act) {
    MutexLock lock(&mutex_);
    moment_ = moment;
    num_before_ = num_before;
    stalls_ = stalls;
    act_ = std::move(act);
  }
  // True: the call that comes to it shall not be answered.
  bool At(const std::string& moment) {
    std::function<void()> act;
    bool stalls = false;
    {
      MutexLock lock(&mutex_);
      if (moment != moment_ || num_before_-- > 0) return false;
      moment_.clear();
      act = std::move(act_);
      stalls = stalls_;
    }
    act();
    return stalls;
  }
  bool has_happened() {
    MutexLock lock(&mutex_);
    return moment_.empty();
  }

 private:
  Mutex mutex_;
  std::string moment_ ABSL_GUARDED_BY(mutex_);
  int num_before_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stalls_ ABSL_GUARDED_BY(mutex_) = false;
  std::function<void()> act_ ABSL_GUARDED_BY(mutex_);
};

TEST_F(JobRunnerTest, JobIsCancelledPausedAndResumedAtAnyMomentOfItsLoop) {
  const std::string text = JobWith(4, "loss { beta: 0.1 } evaluation { interval_steps: 2 }");
  const std::string undisturbed = Undisturbed(text);
  const std::string directory = FreshDirectory("any_moment");
  Happening happening;
  auto trainer = NewTrainer(directory);
  const auto at = [&](const char* moment) { happening.At(moment); };
  trainer->at_ = trainer->metrics_->at = pool_.at = at;
  rollout_.Set({.at = [&](const char* moment) { return happening.At(moment); }});
  trainer->Start();
  struct Case {
    const char* moment;
    int num_before;
    bool is_call;  // of the rollout server: it can be left without an answer
  };
  // Checkpoint 0 is written while the job starts; units 0 and 3 are evaluations.
  const Case cases[] = {{"checkpoint", 0, false}, {"activate", 0, true}, {"generate", 0, true}, {"generate", 1, true},
                        {"acquire", 0, false},    {"score", 1, false},   {"forward", 1, false}, {"backward", 1, false},
                        {"release", 1, false},    {"activate", 1, true}, {"generate", 3, true}, {"checkpoint", 1, false}};
  enum class Wish { kCancel, kPause, kPauseAndResume, kPauseAndCancel };
  for (const Case& c : cases) {
    for (const Wish wish : {Wish::kCancel, Wish::kPause, Wish::kPauseAndResume, Wish::kPauseAndCancel}) {
      SCOPED_TRACE(absl::StrCat(c.moment, " ", c.num_before, " wish ", static_cast<int>(wish)));
      const bool is_cancelled = wish == Wish::kCancel || wish == Wish::kPauseAndCancel;
      happening.Set(c.moment, c.num_before, c.is_call && is_cancelled, [&] {
        const std::string running = trainer->runner_->running_job();
        const auto ask = [&](absl::Status (JobStore::*change)(const std::string&)) {
          EXPECT_EQ((trainer->store_.get()->*change)(running), absl::OkStatus());
          trainer->runner_->Notify();
        };
        if (wish != Wish::kCancel) ask(&JobStore::Pause);
        if (wish == Wish::kPauseAndResume) ask(&JobStore::Resume);
        if (is_cancelled) ask(&JobStore::Cancel);
      });
      const MonotonicTime begin = MonotonicTime::Now();
      const std::string job = *trainer->Submit(text);
      if (is_cancelled) {
        const v1::JobStatus status = trainer->WaitForState(job, v1::JOB_STATE_CANCELLED);
        EXPECT_LT(status.step(), 4u);
        EXPECT_LT(MonotonicTime::Now() - begin, absl::Seconds(20)) << "not at the end of a call that nobody answers";
      } else {
        if (wish == Wish::kPause) {
          trainer->WaitForState(job, v1::JOB_STATE_PAUSED);
          ASSERT_TRUE(trainer->store_->Resume(job).ok());
          trainer->runner_->Notify();
        }
        trainer->WaitForState(job, v1::JOB_STATE_SUCCEEDED);
        EXPECT_EQ(Trajectory(directory, job), undisturbed);
      }
      EXPECT_TRUE(happening.has_happened());
      EXPECT_FALSE(pool_.holds_elastic());
    }
    const std::string next = *trainer->Submit(text);
    trainer->WaitForState(next, v1::JOB_STATE_SUCCEEDED);
    EXPECT_EQ(Trajectory(directory, next), undisturbed) << "behind one that was cancelled in " << c.moment;
  }
  pool_.at = nullptr;
}

// The rollout server does not answer just as the cancelled step gives the elastic region back: nobody else will.
TEST_F(JobRunnerTest, RegionThatACancelledJobCouldNotGiveBackIsGivenBackAfterIt) {
  auto trainer = NewTrainer(FreshDirectory("lease_left"));
  Happening happening;
  happening.Set("release", 1, false, [&] {
    pool_.num_release_failures = 3;
    EXPECT_EQ(trainer->store_->Cancel(trainer->runner_->running_job()), absl::OkStatus());
    trainer->runner_->Notify();
  });
  pool_.at = [&](const char* moment) { happening.At(moment); };
  trainer->Start();
  const std::string job = *trainer->Submit(JobText(100000));
  trainer->WaitForState(job, v1::JOB_STATE_CANCELLED);
  EXPECT_TRUE(happening.has_happened());
  const MonotonicTime deadline = MonotonicTime::Now() + absl::Seconds(10);
  while (pool_.holds_elastic() && MonotonicTime::Now() < deadline) absl::SleepFor(absl::Milliseconds(5));
  EXPECT_FALSE(pool_.holds_elastic());
  trainer->WaitForState(*trainer->Submit(JobText(2)), v1::JOB_STATE_SUCCEEDED);
  pool_.at = nullptr;
}

// The rollout server is away then, and refuses once more when it is back: no job runs, and the next one says why.
TEST_F(JobRunnerTest, FirstOfTheQueueSaysThatTheRegionIsToBeGivenBack) {
  auto trainer = NewTrainer(FreshDirectory("lease_waits"));
  Happening happening;
  happening.Set("release", 1, false, [&] {
    pool_.num_release_failures = 3;
    trainer->is_attached_ = false;
    EXPECT_EQ(trainer->store_->Cancel(trainer->runner_->running_job()), absl::OkStatus());
    trainer->runner_->Notify();
  });
  pool_.at = [&](const char* moment) { happening.At(moment); };
  trainer->Start();
  const std::string job = *trainer->Submit(JobText(100000)), first = *trainer->Submit(JobText(2)),
                    second = *trainer->Submit(JobText(2));
  trainer->WaitForState(job, v1::JOB_STATE_CANCELLED);
  trainer->WaitFor(first, [&](const v1::JobStatus& status) {
    return status.state() == v1::JOB_STATE_QUEUED && status.waiting_for() == "rollout_server at " + rollout_.address();
  });
  EXPECT_EQ(trainer->Status(second).waiting_for(), "1 job before it");
  trainer->is_attached_ = true;
  trainer->WaitForState(second, v1::JOB_STATE_SUCCEEDED);
  EXPECT_EQ(trainer->Status(first).waiting_for(), "");
  pool_.at = nullptr;
}

// As where another thread's write waits for the disk.
TEST_F(JobRunnerTest, NotifyThatWaitsForTheStoreHoldsNobodyElseUp) {
  const std::string directory = FreshDirectory("slow_store");
  auto trainer = NewTrainer(directory);
  trainer->is_attached_ = false;
  rollout_.Set({.dying_units = 1, .forgotten_units = 0, .busy_units = 0, .stalled_activations = 0, .corrupt = {}});
  trainer->Start();
  const std::string job = *trainer->Submit(JobText(9));
  trainer->WaitFor(job, [](const v1::JobStatus& status) { return !status.waiting_for().empty(); });
  sqlite3* database = nullptr;
  ASSERT_EQ(sqlite3_open((directory + "/jobs.sqlite").c_str(), &database), SQLITE_OK);
  std::atomic<bool> is_over = false;
  std::thread writer([&] {
    while (!is_over) EXPECT_EQ(trainer->store_->SetStep(job, 0), absl::OkStatus());
  });
  std::thread notifier([&] {
    while (!is_over) trainer->runner_->Notify();
  });
  absl::Duration waited;
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(sqlite3_exec(database, "BEGIN IMMEDIATE", nullptr, nullptr, nullptr), SQLITE_OK);
    const MonotonicTime begin = MonotonicTime::Now();
    while (MonotonicTime::Now() - begin < absl::Milliseconds(500)) {
      const MonotonicTime asked = MonotonicTime::Now();
      EXPECT_EQ(trainer->runner_->running_job(), job);
      waited += MonotonicTime::Now() - asked;
      absl::SleepFor(absl::Milliseconds(1));
    }
    EXPECT_EQ(sqlite3_exec(database, "COMMIT", nullptr, nullptr, nullptr), SQLITE_OK);
  }
  is_over = true;
  writer.join();
  notifier.join();
  sqlite3_close(database);
  EXPECT_LT(waited, absl::Milliseconds(400)) << "of 2 s";
}

TEST_F(JobRunnerTest, CancellationThatADeathCutShortIsDoneByTheNextLife) {
  const std::string directory = FreshDirectory("cancel_death");
  std::string job;
  {
    auto trainer = NewTrainer(directory);
    trainer->Start();
    job = *trainer->Submit(JobText(100000));
    trainer->WaitFor(job, [](const v1::JobStatus& status) { return status.step() >= 1; });
  }
  auto trainer = NewTrainer(directory);
  ASSERT_TRUE(trainer->store_->Cancel(job).ok());
  EXPECT_EQ(trainer->Status(job).state(), v1::JOB_STATE_RUNNING) << "nobody runs it";
  trainer->Start();
  trainer->WaitForState(job, v1::JOB_STATE_CANCELLED);
}

std::string AdapterOf(const std::string& directory, const std::string& job, std::uint64_t step) {
  return ReadText(absl::StrFormat("%s/jobs/%s/checkpoints/step-%06d/adapter.bin", directory, job, step));
}

TEST_F(JobRunnerTest, JobStartsAtTheAdapterOfTheJobThatItComesAfterAlsoOverADeath) {
  const std::string directory = FreshDirectory("chain");
  std::string first, second, third, best;
  {
    std::promise<void> submitted;
    Happening happening;
    happening.Set("forward", 4, false, [&] { submitted.get_future().wait(); });
    auto trainer = NewTrainer(directory);
    trainer->at_ = [&](const char* moment) { happening.At(moment); };
    trainer->Start();
    first = *trainer->Submit(JobText(9));
    trainer->WaitFor(first, [](const v1::JobStatus& status) { return status.step() >= 1; });
    // By name, and by id.
    second = *trainer->Submit(JobWith(2, "name: 'second' adapter { start_job: 'tiny' } loss { beta: 0.1 }"));
    third = *trainer->Submit(JobWith(2, absl::StrCat("name: 'third' after: '", second, "'")));
    best = *trainer->Submit(JobWith(1, absl::StrCat("name: 'best' adapter { start_job: '", first, "' start_best: true }")));
    EXPECT_EQ(trainer->Status(second).waiting_for(), absl::StrCat("job ", first, " (running)"));
    EXPECT_THAT(trainer->Status(second).after(), ::testing::ElementsAre(first));
    submitted.set_value();
  }
  auto trainer = NewTrainer(directory);
  EXPECT_EQ(trainer->Status(second).waiting_for(), absl::StrCat("job ", first, " (running)"));
  trainer->Start();
  trainer->WaitForState(third, v1::JOB_STATE_SUCCEEDED);
  EXPECT_EQ(trainer->Status(second).state(), v1::JOB_STATE_SUCCEEDED);
  EXPECT_EQ(trainer->Status(first).step(), 9u);
  const std::string start = AdapterOf(directory, second, 0);
  EXPECT_FALSE(start.empty());
  EXPECT_EQ(Sha256Hex(start), Sha256Hex(AdapterOf(directory, first, 9)));
  EXPECT_NE(Sha256Hex(AdapterOf(directory, third, 0)), Sha256Hex(AdapterOf(directory, second, 2))) << "it only comes after";
  trainer->WaitForState(best, v1::JOB_STATE_SUCCEEDED);
  const auto evaluations = HistoryOf(directory, first, HistoryEvent::Kind::kEvaluation);
  const auto best_step = static_cast<std::uint64_t>(evaluations.back().at("best_step"));
  EXPECT_EQ(Sha256Hex(AdapterOf(directory, best, 0)), Sha256Hex(AdapterOf(directory, first, best_step)));

  // Without its checkpoints nothing starts cold.
  std::filesystem::remove_all(directory + "/jobs/" + first);
  const std::string late = *trainer->Submit(JobWith(2, "name: 'late' adapter { start_job: '" + first + "' }"));
  EXPECT_THAT(trainer->WaitForState(late, v1::JOB_STATE_FAILED).error(), HasSubstr("adapter.start_job: job " + first));
}

TEST_F(JobRunnerTest, FailedJobTakesItsDependentsWithItAndTheNextIsUntouched) {
  const std::string text = JobText(3);
  const std::string undisturbed = Undisturbed(text);
  const std::string directory = FreshDirectory("failed_chain");
  auto trainer = NewTrainer(directory);
  trainer->nan_at_forward_ = 2;
  const std::string failing = *trainer->Submit(JobText(9)), next = *trainer->Submit(text);
  const std::string behind = *trainer->Submit(JobWith(9, "name: 'behind' adapter { start_job: '" + failing + "' }"));
  trainer->at_ = [&](const char*) { trainer->nan_at_forward_ = 0; };
  trainer->Start();
  trainer->WaitForState(next, v1::JOB_STATE_SUCCEEDED);
  EXPECT_EQ(trainer->Status(failing).state(), v1::JOB_STATE_FAILED);
  EXPECT_EQ(Trajectory(directory, next), undisturbed);
  const v1::JobStatus never = trainer->Status(behind);
  EXPECT_EQ(never.state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(never.error(), HasSubstr("it comes after others: job " + failing + " failed: "));
  EXPECT_THAT(never.error(), HasSubstr("policy_logprobs is nan"));
  EXPECT_EQ(never.step(), 0u);
}

TEST_F(JobRunnerTest, PrerequisitesAndPrioritiesAreCheckedWhenAJobIsSubmitted) {
  auto trainer = NewTrainer(FreshDirectory("prerequisites"));  // which runs nothing
  const std::string job = *trainer->Submit(JobText(3)), cancelled = *trainer->Submit(JobText(3));
  ASSERT_TRUE(trainer->store_->Cancel(cancelled).ok());
  const auto refusal = [&](const std::string& more) {
    const absl::Status status = trainer->Submit(JobWith(3, "name: 'next' " + more)).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    return std::string(status.message());
  };
  EXPECT_EQ(refusal("after: 'absent-1'"),
            "after: 'absent-1'; must be the id of a job of this trainer, or the name of one of your own");
  EXPECT_EQ(refusal("after: ''"), "after: ''; must be the id of a job of this trainer, or the name of one of your own");
  EXPECT_EQ(refusal("after: 'next'"),
            "after: 'next' is the name of the job itself; an earlier job of this name is named by its id");
  EXPECT_EQ(refusal("adapter { start_job: 'next' }"),
            "adapter.start_job: 'next' is the name of the job itself; an earlier job of this name is named by its id");
  EXPECT_EQ(refusal("after: '" + cancelled + "'"),
            absl::StrCat("after: '", cancelled, "' is job ", cancelled,
                         ", which is cancelled; must be queued, paused, running or succeeded"));
  EXPECT_EQ(refusal("after: '" + job + "' after: '" + job + "'"), "after: " + job + "; must be given once");
  std::string many;
  for (int i = 0; i < 17; ++i) many += "after: 'x' ";
  EXPECT_EQ(refusal(many), "after: 17 jobs; must be at most 16");
  EXPECT_EQ(refusal("priority: 101"), "priority: 101; must be -100 to 100");
  EXPECT_EQ(refusal("priority: -2147483648"), "priority: -2147483648; must be -100 to 100");
  const std::string start = "adapter { start_job: '" + job + "' ";
  EXPECT_EQ(refusal(start + "rank: 3 alpha: 6 }"), "adapter.rank: 3; must be the start adapter's 2");
  EXPECT_THAT(refusal(start + "alpha: 5 }"), HasSubstr("adapter.alpha: 5; must be such that the scale"));
  EXPECT_THAT(refusal(start + "targets: LINEAR_KIND_Q_PROJ }"),
              HasSubstr("adapter.targets: q_proj; must be the start adapter's q_proj, k_proj, v_proj"));
  EXPECT_EQ(refusal("adapter { start_best: true }"), "adapter.start_best: true; must be given with start_job");
  v1::JobSpec plain;
  ASSERT_TRUE(google::protobuf::TextFormat::ParseFromString(JobText(3), &plain));
  plain.clear_evaluation();
  plain.set_name("plain");
  std::string text;
  ASSERT_TRUE(google::protobuf::TextFormat::PrintToString(plain, &text));
  const std::string without = *trainer->Submit(text);
  EXPECT_EQ(refusal("adapter { start_job: '" + without + "' start_best: true }"),
            "adapter.start_best: true; must be false: job " + without + " has no evaluation");

  // A circle would need the name of a job that is not there yet.
  EXPECT_THAT(refusal("after: 'last'"), HasSubstr("after: 'last'"));
  const std::string next = *trainer->Submit(JobWith(3, "name: 'next' after: '" + job + "'"));
  const std::string last = *trainer->Submit(JobWith(3, "name: 'last' after: 'next'"));
  EXPECT_THAT(trainer->Status(last).after(), ::testing::ElementsAre(next));
  const std::string again = *trainer->Submit(JobWith(3, "name: 'next' after: 'last'"));
  EXPECT_THAT(trainer->Status(again).after(), ::testing::ElementsAre(last));
  EXPECT_THAT(trainer->Status(last).after(), ::testing::ElementsAre(next));
  EXPECT_THAT(trainer->store_->Get(last)->job_text, HasSubstr("after: \"" + next + "\""));
}

TEST_F(JobRunnerTest, QueueIsExportedAndListedInPages) {
  auto trainer = NewTrainer(FreshDirectory("pages"));
  std::vector<std::string> jobs;
  for (int i = 0; i < 5; ++i) jobs.push_back(*trainer->Submit(JobText(1)));
  ASSERT_TRUE(trainer->store_->Pause(jobs[1]).ok());
  v1::ListJobsRequest request;
  request.set_page_size(2);
  request.add_states(v1::JOB_STATE_QUEUED);
  std::vector<std::string> listed;
  do {
    grpc::ClientContext context;
    v1::ListJobsResponse response;
    ASSERT_TRUE(trainer->stub_->ListJobs(&context, request, &response).ok());
    EXPECT_LE(response.jobs_size(), 2);
    for (const v1::JobStatus& job : response.jobs()) listed.push_back(job.job());
    request.set_page_token(response.next_page_token());
  } while (!request.page_token().empty());
  EXPECT_THAT(listed, ::testing::ElementsAre(jobs[4], jobs[3], jobs[2], jobs[0]));
  for (const int states : {1, 7}) {
    v1::ListJobsRequest bad;
    for (int i = 0; i < states; ++i) bad.add_states(states == 1 ? v1::JOB_STATE_UNSPECIFIED : v1::JOB_STATE_QUEUED);
    grpc::ClientContext context;
    v1::ListJobsResponse response;
    EXPECT_EQ(trainer->stub_->ListJobs(&context, bad, &response).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  }
  trainer->runner_->Notify();
  EXPECT_THAT(trainer->metrics_->Text(), HasSubstr("tandem_queue_jobs{state=\"ready\"} 4"));
  EXPECT_THAT(trainer->metrics_->Text(), HasSubstr("tandem_queue_jobs{state=\"paused\"} 1"));
  trainer->Start();
  trainer->WaitForState(jobs[4], v1::JOB_STATE_SUCCEEDED);
  EXPECT_THAT(trainer->metrics_->Text(), HasSubstr("tandem_queue_wait_seconds_count 4"));
  EXPECT_GT(trainer->Status(jobs[0]).device_seconds(), 0);
  EXPECT_EQ(trainer->Status(jobs[1]).device_seconds(), 0);
}

// CASES C06: NaN in training fails the job by name; the checkpoint before it stays, and the next job runs.
TEST_F(JobRunnerTest, NanFailsTheJobByNameAndTheRunnerGoesOn) {
  const std::string directory = FreshDirectory("nan");
  auto trainer = NewTrainer(directory);
  trainer->nan_at_forward_ = 2;
  trainer->Start();
  const std::string job = *trainer->Submit(JobText(9));
  const v1::JobStatus failed = trainer->WaitForState(job, v1::JOB_STATE_FAILED);
  EXPECT_THAT(failed.error(), HasSubstr("policy_logprobs is nan"));
  EXPECT_FALSE(pool_.holds_elastic());
  trainer->nan_at_forward_ = 0;
  const std::string next = *trainer->Submit(JobText(2));
  trainer->WaitForState(next, v1::JOB_STATE_SUCCEEDED);
}

// The adapter and moments of the newest checkpoint: what no cut into pieces may change here, where sums are in one order.
std::string Trained(const std::string& trajectory) { return trajectory.substr(trajectory.find("adapter.bin")); }

TEST_F(JobRunnerTest, StepWithoutMemoryIsTriedOnceMoreInSmallerPieces) {
  const std::string text = JobText(5, "batch { micro_batch_tokens: 60 }");
  const std::string undisturbed = Undisturbed(text);
  const std::string directory = FreshDirectory("retried");
  auto trainer = NewTrainer(directory);
  trainer->max_rows_ = 35;
  trainer->Start();
  const std::string job = *trainer->Submit(text);
  std::string metrics;
  trainer->WaitFor(job, [&](const v1::JobStatus& status) {
    if (status.state() == v1::JOB_STATE_RUNNING && status.step() > 0) metrics = trainer->metrics_->Text();
    return status.state() == v1::JOB_STATE_SUCCEEDED || status.state() == v1::JOB_STATE_FAILED;
  });
  EXPECT_EQ(trainer->Status(job).state(), v1::JOB_STATE_SUCCEEDED) << trainer->Status(job).error();
  EXPECT_EQ(Trained(Trajectory(directory, job)), Trained(undisturbed));
  EXPECT_THAT(metrics, HasSubstr("tandem_train_memory_retries_total"));
  // One policy at the start, and for each retry one with a smaller tile of the head and the usual one again.
  ASSERT_GE(trainer->logit_chunks_.size(), 3u);
  EXPECT_THAT(std::vector<int>(trainer->logit_chunks_.begin(), trainer->logit_chunks_.begin() + 3),
              ::testing::ElementsAre(0, 128, 0));
}

// The step before it is done, and counted so in the checkpoint.
TEST_F(JobRunnerTest, NoMemoryForTheUsualPiecesAfterSmallerOnesFailsTheNextStep) {
  const std::string text = JobText(5, "batch { micro_batch_tokens: 60 }");
  const std::string undisturbed = Undisturbed(text);
  const std::string directory = FreshDirectory("usual_pieces");
  std::string job;
  {
    auto trainer = NewTrainer(directory);
    trainer->max_rows_ = 35;
    trainer->no_memory_at_policy_ = 3;
    trainer->Start();
    job = *trainer->Submit(text);
    const v1::JobStatus failed = trainer->WaitForState(job, v1::JOB_STATE_FAILED);
    EXPECT_THAT(failed.error(), HasSubstr("no memory for the policy"));
    EXPECT_GE(failed.step(), 1u);
  }
  auto trainer = NewTrainer(directory);
  trainer->Start();
  ASSERT_TRUE(trainer->store_->Resume(job).ok());
  trainer->WaitForState(job, v1::JOB_STATE_SUCCEEDED);
  EXPECT_EQ(Trained(Trajectory(directory, job)), Trained(undisturbed));
}

TEST_F(JobRunnerTest, StepWithoutMemoryInSmallerPiecesTooFailsTheJobWhichGoesOnWhenThereIsRoom) {
  const std::string text = JobText(9);
  const std::string undisturbed = Undisturbed(text);
  const std::string directory = FreshDirectory("exhausted");
  std::string job;
  {
    auto trainer = NewTrainer(directory);
    trainer->Start();
    job = *trainer->Submit(text);
    trainer->WaitFor(job, [](const v1::JobStatus& status) { return status.step() >= 2; });
  }
  {
    auto trainer = NewTrainer(directory);
    trainer->max_rows_ = 8;
    trainer->Start();
    const v1::JobStatus failed = trainer->WaitForState(job, v1::JOB_STATE_FAILED);
    EXPECT_THAT(failed.error(), HasSubstr("in smaller pieces too"));
    EXPECT_THAT(failed.error(), HasSubstr("no memory for"));
    EXPECT_FALSE(pool_.holds_elastic());
    EXPECT_EQ(CheckpointStore::OpenForReading(directory + "/jobs/" + job + "/checkpoints").Steps().back(), failed.step());
    const std::string next = *trainer->Submit(JobText(1));
    EXPECT_EQ(trainer->WaitForState(next, v1::JOB_STATE_FAILED).step(), 0u);
  }
  auto trainer = NewTrainer(directory);
  trainer->Start();
  ASSERT_TRUE(trainer->store_->Resume(job).ok());
  trainer->WaitForState(job, v1::JOB_STATE_SUCCEEDED);
  EXPECT_EQ(Trajectory(directory, job), undisturbed);
}

// CASES C39: what does not fit is refused before it is stored; what was stored, before its next step, and it goes on where the
// memory is back.
TEST_F(JobRunnerTest, JobThatTheNodeDoesNotHoldIsRefusedWithTheLargestContextThatFits) {
  const std::string text = JobText(9);
  const std::string undisturbed = Undisturbed(text);
  const std::string directory = FreshDirectory("too_large");
  std::string job;
  {
    auto trainer = NewTrainer(directory);
    trainer->Start();
    job = *trainer->Submit(text);
    trainer->WaitFor(job, [](const v1::JobStatus& status) { return status.step() >= 2; });
  }
  {
    auto trainer = NewTrainer(directory);
    trainer->node_.elastic_bytes = 24 << 10;
    trainer->Start();
    const v1::JobStatus failed = trainer->WaitForState(job, v1::JOB_STATE_FAILED);
    EXPECT_GE(failed.step(), 2u);
    for (const std::string& refusal : {failed.error(), std::string(trainer->Submit(text).status().message())}) {
      EXPECT_THAT(refusal, HasSubstr("rollout.sampling.max_tokens: 6"));
      EXPECT_THAT(refusal, HasSubstr("--pool_bytes="));
    }
    grpc::ClientContext context;
    v1::PlanRequest plan;
    plan.set_job_text(text);
    v1::PlanResponse planned;
    ASSERT_TRUE(trainer->stub_->Plan(&context, plan, &planned).ok()) << "a plan of what does not fit tells what would";
    EXPECT_EQ(planned.faults_size(), 1);
    EXPECT_GT(planned.memory().least_pool_bytes(), 0u);
  }
  auto trainer = NewTrainer(directory);
  trainer->Start();
  ASSERT_TRUE(trainer->store_->Resume(job).ok());
  trainer->WaitForState(job, v1::JOB_STATE_SUCCEEDED);
  EXPECT_EQ(Trajectory(directory, job), undisturbed);
}

// Beyond the rows that are encoded at submission a prompt may be longer than every one that the plan saw: here among lines that
// are longer still, of characters written as escapes.
TEST_F(JobRunnerTest, DrawnPromptLongerThanTheContextFailsTheJobByItsLine) {
  std::string rows;
  for (std::size_t i = 0; i < kMaxEncodedRows; ++i) rows += "{\"prompt\": \"say\"}\n";
  for (std::size_t i = 0; i < kMaxEncodedLongRows; ++i)
    rows += "{\"prompt\": \"\\u0061\\u0061\\u0061\\u0061\\u0061\\u0061\\u0061\\u0061\\u0061\\u0061\\u0061\"}\n";
  rows += "{\"prompt\": \"" + std::string(60, 'x') + "\"}\n";
  const std::string text = absl::StrCat(R"(name: "long" num_steps: 2
    rollout { prompts_per_step: 4400 group_size: 1 sampling { temperature: 1 max_tokens: 6 } }
    rewards { weight: 1 ended_by_itself {} } adapter { rank: 2 alpha: 4 } optimizer { learning_rate: 0.2 } data { content: ")",
                                        Sha256Hex(rows), "\" }");
  const std::string directory = FreshDirectory("long_prompt");
  auto trainer = NewTrainer(directory);
  trainer->Start();
  const auto job = trainer->Submit(text, rows);
  ASSERT_TRUE(job.ok()) << job.status();
  const v1::JobStatus failed = trainer->WaitForState(*job, v1::JOB_STATE_FAILED);
  const std::string error = absl::StrCat("data set line ", kMaxEncodedRows + kMaxEncodedLongRows + 1,
                                         ": the prompt has 60 tokens; with completions of up to 6 tokens the largest context "
                                         "that fits is 64 tokens");
  EXPECT_EQ(failed.error(), error);
  const auto evaluated = trainer->Submit(absl::StrCat(text, " evaluation { content: \"", Sha256Hex(rows), "\" }"), rows);
  ASSERT_TRUE(evaluated.ok()) << evaluated.status();
  EXPECT_EQ(trainer->WaitForState(*evaluated, v1::JOB_STATE_FAILED).error(), error);
  for (const v1::WatchResponse& event : Watch(trainer.get(), *evaluated, 0)) {
    EXPECT_FALSE(event.has_evaluation()) << "the row is refused before it is drawn";
  }
  EXPECT_TRUE(trainer->store_->Resume(*job).ok());
}

// CASES C45: a checkpoint without its optimizer state fails the job; it does not start cold.
// A disk that is full when a step's completions are written: the step counts as not done.
TEST_F(JobRunnerTest, StepWhoseRecordCannotBeWrittenIsDoneAgain) {
  const std::string undisturbed = Undisturbed(JobText(8)), directory = FreshDirectory("unrecorded");
  auto trainer = NewTrainer(directory);
  const std::string job = *trainer->Submit(JobText(8)), completions = directory + "/jobs/" + job + "/completions";
  const std::string partial = completions + "/step-000005.jsonl.partial";
  std::filesystem::create_directories(completions);
  std::filesystem::create_symlink("/dev/full", partial);
  trainer->Start();
  const v1::JobStatus failed = trainer->WaitForState(job, v1::JOB_STATE_FAILED);
  EXPECT_THAT(failed.error(), AllOf(HasSubstr(partial), HasSubstr("no checkpoint of step 5")));
  EXPECT_FALSE(std::filesystem::is_symlink(partial)) << "what was written takes no room";
  grpc::ClientContext context;
  v1::ResumeRequest resume;
  resume.set_job(job);
  v1::JobStatus status;
  ASSERT_TRUE(trainer->stub_->Resume(&context, resume, &status).ok());
  trainer->WaitFor(job, [](const v1::JobStatus& now) { return now.state() == v1::JOB_STATE_SUCCEEDED; });
  EXPECT_EQ(Trajectory(directory, job), undisturbed);
}

// More callers than have a turn, and all are served.
TEST_F(JobRunnerTest, PlansAreMadeInTurn) {
  auto trainer = NewTrainer(FreshDirectory("turns"));
  trainer->Start();
  ASSERT_TRUE(trainer->Submit(JobText(1)).ok());
  std::vector<std::jthread> callers;
  std::atomic<int> num_planned = 0;
  for (int i = 0; i < 6 * JobService::kMaxPlans; ++i) {
    callers.emplace_back([&] {
      grpc::ClientContext context;
      context.set_deadline(GrpcDeadline(MonotonicTime::Now() + absl::Minutes(2)));
      v1::PlanRequest plan;
      plan.set_job_text(JobText(4));
      v1::PlanResponse planned;
      if (trainer->stub_->Plan(&context, plan, &planned).ok()) ++num_planned;
    });
  }
  callers.clear();
  EXPECT_EQ(num_planned, 6 * JobService::kMaxPlans);
}

TEST_F(JobRunnerTest, DamagedCheckpointFailsTheJobByName) {
  const std::string directory = FreshDirectory("damaged");
  std::string job;
  {
    auto trainer = NewTrainer(directory);
    trainer->Start();
    job = *trainer->Submit(JobText(100000));
    trainer->WaitFor(job, [](const v1::JobStatus& status) { return status.step() >= 4; });
  }
  const std::string checkpoints = directory + "/jobs/" + job + "/checkpoints";
  for (const std::uint64_t step : CheckpointStore::OpenForReading(checkpoints).Steps()) {
    std::filesystem::remove(absl::StrFormat("%s/step-%06d/second_moments.bin", checkpoints, step));
  }
  auto trainer = NewTrainer(directory);
  trainer->Start();
  const v1::JobStatus failed = trainer->WaitForState(job, v1::JOB_STATE_FAILED);
  EXPECT_THAT(failed.error(), HasSubstr("second_moments.bin is absent"));
}

// CASES C27: a group in which no reward applies is counted, not an error.
TEST_F(JobRunnerTest, GroupsWithoutAnyRewardAreCountedAndTheStepGoesOn) {
  const std::string directory = FreshDirectory("null_rewards");
  auto trainer = NewTrainer(directory);
  trainer->Start();
  std::string text = JobText(4);
  const std::string ended = R"(rewards { name: "ended" weight: 1 ended_by_itself {} })";
  text.replace(text.find(ended), ended.size(), "");
  const auto job = trainer->Submit(text);
  ASSERT_TRUE(job.ok()) << job.status();
  trainer->WaitForState(*job, v1::JOB_STATE_SUCCEEDED);
  double dropped = 0;
  HistoryReader history(directory + "/jobs/" + *job);
  while (const auto event = history.Next()) {
    for (const auto& [name, value] : event->values) dropped += name == "groups_dropped" ? value : 0;
  }
  EXPECT_GT(dropped, 0);  // four rows of ten have no answer, and each is drawn
}

TEST_F(JobRunnerTest, AdapterOfAFinishedJobIsMadeKnownToARolloutServerThatCameBack) {
  auto trainer = NewTrainer(FreshDirectory("resident"));
  trainer->Start();
  const std::string job = *trainer->Submit(JobText(2));
  trainer->WaitForState(job, v1::JOB_STATE_SUCCEEDED);
  const std::string checksum = rollout_.checksum(job);
  v1::RetireAdapterRequest forget;
  forget.set_job(job);
  ASSERT_TRUE(rollout_.RetireAdapter(nullptr, &forget, nullptr).ok());
  trainer->runner_->OnPeerAttached();
  const MonotonicTime deadline = MonotonicTime::Now() + absl::Seconds(10);
  while (rollout_.version(job) == 0 && MonotonicTime::Now() < deadline) absl::SleepFor(absl::Milliseconds(5));
  EXPECT_EQ(rollout_.version(job), 3u);
  EXPECT_EQ(rollout_.checksum(job), checksum);
}

TEST_F(JobRunnerTest, JobThatEndsBeforeItPublishesLeavesNothingToMakeKnown) {
  Happening happening;
  auto trainer = NewTrainer(FreshDirectory("unpublished"));
  trainer->metrics_->at = [&](const char* moment) { happening.At(moment); };
  trainer->Start();
  for (const auto change : {&JobStore::Cancel, &JobStore::Pause}) {
    happening.Set("checkpoint", 0, false,
                  [&] { EXPECT_EQ((trainer->store_.get()->*change)(trainer->runner_->running_job()), absl::OkStatus()); });
    const std::string job = *trainer->Submit(JobText(2));
    trainer->WaitForState(job, change == &JobStore::Cancel ? v1::JOB_STATE_CANCELLED : v1::JOB_STATE_PAUSED);
    EXPECT_EQ(trainer->Status(job).step(), 0u);
    EXPECT_EQ(rollout_.version(job), 0u);
    trainer->runner_->OnPeerAttached();
    trainer->WaitForState(*trainer->Submit(JobText(2)), v1::JOB_STATE_SUCCEEDED);
  }
}

TEST_F(JobRunnerTest, BadUploadsAndJobsAreRefusedAndTheServiceGoesOn) {
  auto trainer = NewTrainer(FreshDirectory("refusals"));
  trainer->Start();
  v1::UploadRequest piece;
  v1::UploadResponse uploaded;
  {
    grpc::ClientContext context;
    auto writer = trainer->stub_->Upload(&context, &uploaded);
    piece.set_piece("no header");
    writer->Write(piece);
    writer->WritesDone();
    EXPECT_EQ(writer->Finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  }
  {
    grpc::ClientContext context;
    auto writer = trainer->stub_->Upload(&context, &uploaded);
    piece.mutable_header()->set_sha256(std::string(64, 'a'));
    piece.mutable_header()->set_size_bytes(2 << 20);
    writer->Write(piece);
    piece.set_piece(std::string((1 << 20) + 1, 'x'));
    writer->Write(piece);
    writer->WritesDone();
    EXPECT_THAT(writer->Finish().error_message(), HasSubstr("limit"));
  }
  EXPECT_TRUE(absl::IsInvalidArgument(trainer->Submit(JobText(0)).status()));
  grpc::ClientContext plan_context;
  v1::PlanRequest plan;
  plan.set_job_text(JobText(4));
  v1::PlanResponse planned;
  ASSERT_TRUE(trainer->stub_->Plan(&plan_context, plan, &planned).ok());
  EXPECT_EQ(planned.steps_per_epoch(), 4u);
  EXPECT_GT(planned.trained_parameters(), 0u);
  EXPECT_EQ(planned.memory().context_tokens(), 11u);
  EXPECT_EQ(planned.memory().wanted_live_sequences(), 12u);
  EXPECT_EQ(planned.memory().pool_bytes(), SmallNode().pool_bytes());
  EXPECT_THAT(planned.job_text(), HasSubstr("learning_rate: 0.2"));
  EXPECT_TRUE(trainer->Submit(JobText(1)).ok());
}

// Jobs, contents and files are found by names that callers choose: none leaves the data folder, and none of what lies beside it
// is read or made.
TEST_F(JobRunnerTest, NamesThatLeaveTheDataFolderNameNothing) {
  const std::string directory = FreshDirectory("traversal");
  auto trainer = NewTrainer(FreshDirectory("traversal/data"));
  trainer->Start();
  ASSERT_TRUE(trainer->Submit(JobText(1)).ok());
  std::filesystem::create_directories(directory + "/outside/completions");
  WriteText(directory + "/outside/history.jsonl", "{\"kind\":\"step\",\"step\":1,\"secret\":1,\"times\":{}}\n");
  WriteText(directory + "/outside/completions/step-000001.jsonl", "{\"step\":1}\n");
  WriteText(directory + "/outside/rows.jsonl", Rows());
  std::filesystem::create_directories(directory + "/data/jobs");
  std::filesystem::create_symlink(directory + "/outside", directory + "/data/jobs/link");
  const std::vector<std::string> names = {
      "../../outside",         "../../../traversal/outside", directory + "/outside", "link",           "..",         ".", "/", "",
      "tiny/../../../outside", std::string("tiny\0", 5),     std::string(5000, 'a'), "%2e%2e/outside", "' OR 1=1 --"};
  for (const std::string& name : names) {
    SCOPED_TRACE(name.substr(0, 80));
    const auto is_refused = [](const grpc::Status& status) {
      return status.error_code() == grpc::StatusCode::NOT_FOUND || status.error_code() == grpc::StatusCode::INVALID_ARGUMENT;
    };
    v1::GetJobRequest get;
    v1::WatchRequest watch;
    v1::CompletionsRequest completions;
    v1::ExportRequest export_request;
    v1::CancelRequest cancel;
    get.set_job(name), watch.set_job(name), completions.set_job(name), export_request.set_job(name), cancel.set_job(name);
    watch.set_until_now(true);
    grpc::ClientContext contexts[6];
    for (grpc::ClientContext& context : contexts) context.set_deadline(GrpcDeadline(MonotonicTime::Now() + absl::Seconds(20)));
    v1::JobStatus status;
    v1::JobDescription description;
    EXPECT_TRUE(is_refused(trainer->stub_->GetJob(&contexts[0], get, &status)));
    EXPECT_TRUE(is_refused(trainer->stub_->Describe(&contexts[1], get, &description)));
    EXPECT_TRUE(is_refused(trainer->stub_->Cancel(&contexts[2], cancel, &status)));
    const auto read_none = [&](auto reader, auto message) {
      EXPECT_FALSE(reader->Read(&message)) << message.ShortDebugString();
      EXPECT_TRUE(is_refused(reader->Finish()));
    };
    read_none(trainer->stub_->Watch(&contexts[3], watch), v1::WatchResponse());
    read_none(trainer->stub_->Completions(&contexts[4], completions), v1::CompletionRecord());
    read_none(trainer->stub_->Export(&contexts[5], export_request), v1::ExportResponse());
  }
  // The same of contents; and a job names files by content alone.
  const std::string sha256 = Sha256Hex(Rows());
  for (const std::string& name :
       {std::string("../../outside/rows.jsonl"), directory + "/outside/rows.jsonl", "../" + sha256, sha256 + "/..",
        sha256 + std::string("\0", 1), std::string(64, 'A'), std::string(64, '.'), std::string(100000, 'a'), std::string()}) {
    SCOPED_TRACE(name.substr(0, 80));
    grpc::ClientContext has_context, upload_context;
    v1::HasContentRequest has;
    has.set_sha256(name);
    v1::HasContentResponse found;
    EXPECT_TRUE(trainer->stub_->HasContent(&has_context, has, &found).ok());
    EXPECT_FALSE(found.present());
    v1::UploadResponse uploaded;
    auto writer = trainer->stub_->Upload(&upload_context, &uploaded);
    v1::UploadRequest piece;
    piece.mutable_header()->set_sha256(name);
    piece.mutable_header()->set_name("../../../outside/written");
    piece.mutable_header()->set_size_bytes(1);
    writer->Write(piece);
    writer->WritesDone();
    EXPECT_EQ(writer->Finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    const std::string text = JobText(1);
    EXPECT_TRUE(absl::IsInvalidArgument(trainer->Submit(text + " data { content: \"" + absl::CEscape(name) + "\" }").status()));
  }
  for (const char* path : {"data { path: \"/etc/passwd\" }", "evaluation { path: \"../../outside/rows.jsonl\" }",
                           "adapter { start_path: \"/etc\" }"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(trainer->Submit(JobText(1, path)).status())) << path;
  }
  std::set<std::string> outside;
  for (const auto& entry : std::filesystem::directory_iterator(directory + "/outside"))
    outside.insert(entry.path().filename().string());
  EXPECT_EQ(outside, (std::set<std::string>{"completions", "history.jsonl", "rows.jsonl"}));
}

}  // namespace
}  // namespace tandem
