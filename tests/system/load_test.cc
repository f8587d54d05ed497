// More than a trainer is used to: watchers by the thousand, a queue of thousands, clients that open streams and fall silent. By
// hand (TANDEM_LONG_TESTS=1) each watcher has a connection of its own and the queue is ten times as long.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/base/clock.h"
#include "common/base/hash.h"
#include "common/base/units.h"
#include "common/rpc/channel.h"
#include "tests/support/tiny_model.h"
#include "tests/system/daemon_pair.h"
#include "tests/system/system_jobs.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;

constexpr Half kBoth[] = {Half::kRollout, Half::kTrainer};

// A connection that no other channel shares.
std::shared_ptr<grpc::Channel> OwnChannel(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

class LoadTest : public ::testing::Test {
 protected:
  void SetUp() override {
    rlimit files{};
    ::getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;  // a connection takes one here and one in the trainer, which inherits it
    ::setrlimit(RLIMIT_NOFILE, &files);
    DaemonPairOptions options;
    options.directory = ::testing::TempDir() + "load";
    options.model = options.directory + "_model";
    ASSERT_TRUE(WriteTinyModel(options.model, SystemModel()).ok());
    pair_ = std::make_unique<DaemonPair>(options);
    for (const Half half : kBoth) pair_->Start(half);
    for (const Half half : kBoth) ASSERT_TRUE(pair_->WaitReady(half, absl::Seconds(60))) << pair_->log(half);
    trainer_ = pair_->pid(Half::kTrainer);
  }
  std::string Submit(const std::string& job_text) {
    const auto job = pair_->Submit(job_text, TinyRows(24));
    EXPECT_TRUE(job.ok()) << job.status();
    return job.value_or("");
  }
  std::uint32_t StepOf(const std::string& job) {
    const auto status = pair_->GetJob(job);
    return status.ok() ? status->step() : 0;
  }
  // Seconds a step, over `num_steps` from now on.
  double SecondsPerStep(const std::string& job, std::uint32_t num_steps) {
    const std::uint32_t first = StepOf(job);
    const MonotonicTime begin = MonotonicTime::Now();
    EXPECT_TRUE(WaitUntil(absl::Minutes(2), [&] { return StepOf(job) >= first + num_steps; }));
    return absl::ToDoubleSeconds(MonotonicTime::Now() - begin) / (StepOf(job) - first);
  }

  std::unique_ptr<DaemonPair> pair_;
  pid_t trainer_ = -1;
};

// Of one job, on one completion queue.
class Watchers {
 public:
  Watchers(const std::string& address, const std::string& job, std::size_t count, std::size_t num_connections) {
    for (std::size_t i = 0; i < num_connections; ++i) stubs_.push_back(v1::JobService::NewStub(OwnChannel(address)));
    for (std::size_t i = 0; i < count; ++i) {
      calls_.push_back(std::make_unique<Call>());
      Call& call = *calls_.back();
      v1::WatchRequest request;
      request.set_job(job);
      call.reader = stubs_[i % num_connections]->AsyncWatch(&call.context, request, &queue_, &call);
    }
    thread_ = std::thread([this] { Run(); });
  }
  ~Watchers() {
    for (const auto& call : calls_) call->context.TryCancel();
    if (thread_.joinable()) thread_.join();
    queue_.Shutdown();
  }
  // Until each has ended. What each was told, and how it ended.
  struct End {
    std::vector<std::uint32_t> steps;
    v1::JobState state = v1::JOB_STATE_UNSPECIFIED;
    grpc::Status status;
  };
  std::vector<End> Wait() {
    thread_.join();
    std::vector<End> ends;
    for (const auto& call : calls_) ends.push_back(std::move(call->end));
    return ends;
  }
  std::size_t num_begun() const { return num_begun_.load(); }  // that were told something

 private:
  struct Call {
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientAsyncReader<v1::WatchResponse>> reader;
    v1::WatchResponse response;
    enum { kStarting, kReading, kFinishing } phase = kStarting;
    bool is_told = false;
    End end;
  };
  void Run() {
    void* tag = nullptr;
    bool ok = false;
    for (std::size_t open = calls_.size(); open > 0 && queue_.Next(&tag, &ok);) {
      Call& call = *static_cast<Call*>(tag);
      if (call.phase == Call::kFinishing) {
        --open;
        continue;
      }
      if (call.phase == Call::kReading && ok) {
        if (!std::exchange(call.is_told, true)) ++num_begun_;
        if (call.response.has_step()) call.end.steps.push_back(call.response.step().step());
        if (call.response.has_status()) call.end.state = call.response.status().state();
      }
      call.phase = ok ? Call::kReading : Call::kFinishing;
      if (ok) {
        call.reader->Read(&call.response, &call);
      } else {
        call.reader->Finish(&call.end.status, &call);
      }
    }
  }

  std::vector<std::unique_ptr<v1::JobService::Stub>> stubs_;
  grpc::CompletionQueue queue_;
  std::vector<std::unique_ptr<Call>> calls_;
  std::atomic<std::size_t> num_begun_ = 0;
  std::thread thread_;
};

TEST_F(LoadTest, AThousandWatchersAreToldEachStepOnceAndTheNextOnesAreRefused) {
  constexpr std::size_t kWatchers = 1000, kBound = 1024;
  const std::size_t num_connections = IsLongTest() ? kWatchers : 50;
  // Steps of some tenths of a second.
  const std::string job = Submit(R"(name: "watched" seed: 3 num_steps: 100000
    rollout { prompts_per_step: 8 group_size: 16 sampling { temperature: 1 max_tokens: 48 } }
    rewards { name: "text" weight: 1 length_target { target_tokens: 40 width_tokens: 8 } }
    loss { preset: LOSS_PRESET_DR_GRPO } adapter { rank: 4 alpha: 8 } optimizer { learning_rate: 1e-3 }
    checkpoint { interval_steps: 1000 })");
  ASSERT_TRUE(WaitUntil(absl::Seconds(60), [&] { return StepOf(job) >= 3; }));
  const double alone = SecondsPerStep(job, 10);
  const std::uint64_t threads = NumThreads(trainer_), bytes = AnonymousBytes(trainer_);
  Watchers watchers(pair_->address(Half::kTrainer), job, kWatchers, num_connections);
  ASSERT_TRUE(WaitUntil(absl::Seconds(60), [&] { return watchers.num_begun() == kWatchers; })) << watchers.num_begun();
  SecondsPerStep(job, 3);
  const double watched = SecondsPerStep(job, 10);
  const std::uint64_t watched_bytes = AnonymousBytes(trainer_) - std::min(bytes, AnonymousBytes(trainer_));
  std::printf("%zu watchers over %zu connections: %.3f s a step, %.3f s alone; %s of memory for them\n", kWatchers,
              num_connections, watched, alone, FormatBytes(watched_bytes).c_str());
  // What it costs is the clients' too, which share the processors here.
  EXPECT_LT(watched, alone + 0.5);
  EXPECT_LT(watched_bytes, 512 * kMiB);
  {
    Watchers more(pair_->address(Half::kTrainer), job, kBound - kWatchers + 5, 1);
    ASSERT_TRUE(WaitUntil(absl::Seconds(20), [&] { return more.num_begun() == kBound - kWatchers; })) << more.num_begun();
    ASSERT_TRUE(pair_->Client("cancel " + job).ok());
    std::size_t num_refused = 0;
    for (const Watchers::End& end : more.Wait()) {
      if (end.status.ok()) continue;
      ++num_refused;
      EXPECT_EQ(end.status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
      EXPECT_EQ(end.status.error_message(), "trainer_server serves 1024 watchers at a time");
    }
    EXPECT_EQ(num_refused, 5u);
  }
  const std::vector<Watchers::End> ends = watchers.Wait();
  std::vector<std::uint32_t> all(StepOf(job));
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint32_t>(i + 1);
  std::size_t num_whole = 0;
  for (const Watchers::End& end : ends)
    num_whole += end.status.ok() && end.state == v1::JOB_STATE_CANCELLED && end.steps == all ? 1 : 0;
  EXPECT_EQ(num_whole, kWatchers) << "were told " << all.size() << " steps, each once";
  EXPECT_TRUE(WaitUntil(absl::Seconds(20), [&] { return NumThreads(trainer_) <= threads + 4; })) << NumThreads(trainer_);
}

// Watch, completions and upload, each opened and left alone.
TEST_F(LoadTest, ClientsThatNeverReadOrWriteAreLetGoAndHarmNobody) {
  const std::string job = Submit(TinyJob(200, /*seed=*/7, /*checkpoint_interval=*/50));
  ASSERT_TRUE(pair_->WaitForEnd(job, absl::Minutes(2)).ok());
  const std::uint64_t descriptors = NumDescriptors(trainer_), threads = NumThreads(trainer_), bytes = AnonymousBytes(trainer_);
  constexpr std::size_t kSilent = 30;  // of each kind
  struct Silent {
    std::unique_ptr<v1::JobService::Stub> stub;
    grpc::ClientContext contexts[3];
    v1::UploadResponse uploaded;
    std::unique_ptr<grpc::ClientReader<v1::WatchResponse>> watch;
    std::unique_ptr<grpc::ClientReader<v1::CompletionRecord>> completions;
    std::unique_ptr<grpc::ClientWriter<v1::UploadRequest>> upload;
  };
  std::vector<std::unique_ptr<Silent>> clients;
  v1::WatchRequest watch;
  watch.set_job(job);
  v1::CompletionsRequest completions;
  completions.set_job(job);
  completions.set_step(1);
  completions.set_last_step(200);
  const MonotonicTime begin = MonotonicTime::Now();
  for (std::size_t i = 0; i < kSilent; ++i) {
    clients.push_back(std::make_unique<Silent>());
    Silent& client = *clients.back();
    client.stub = v1::JobService::NewStub(OwnChannel(pair_->address(Half::kTrainer)));
    client.watch = client.stub->Watch(&client.contexts[0], watch);
    client.completions = client.stub->Completions(&client.contexts[1], completions);
    client.upload = client.stub->Upload(&client.contexts[2], &client.uploaded);
    v1::UploadRequest header;
    header.mutable_header()->set_sha256(Sha256Hex(absl::StrCat(i)));
    header.mutable_header()->set_size_bytes(1 << 20);
    ASSERT_TRUE(client.upload->Write(header));
  }
  ASSERT_TRUE(WaitUntil(absl::Seconds(10), [&] { return NumThreads(trainer_) >= threads + 2 * kSilent; }));
  // Others are served meanwhile, and another job runs.
  const std::string other = Submit(TinyJob(60, /*seed=*/8, /*checkpoint_interval=*/50));
  const auto end = pair_->WaitForEnd(other, absl::Seconds(60));
  ASSERT_TRUE(end.ok()) << end.status();
  EXPECT_EQ(end->state(), v1::JOB_STATE_SUCCEEDED);
  EXPECT_LT(AnonymousBytes(trainer_), bytes + 128 * kMiB);
  EXPECT_TRUE(WaitUntil(absl::Seconds(60), [&] { return NumThreads(trainer_) <= threads + 4; })) << NumThreads(trainer_);
  std::printf("%zu silent streams let go after %s\n", 3 * kSilent, absl::FormatDuration(MonotonicTime::Now() - begin).c_str());
  for (const auto& client : clients) {
    EXPECT_FALSE(client->upload->Finish().ok());
    for (grpc::ClientContext& context : client->contexts) context.TryCancel();  // what was never read is in the way of an end
    client->completions->Finish();
    client->watch->Finish();
  }
  clients.clear();
  EXPECT_TRUE(WaitUntil(absl::Seconds(20), [&] { return NumDescriptors(trainer_) <= descriptors + 3; }))
      << NumDescriptors(trainer_) << ", before " << descriptors;
}

TEST_F(LoadTest, AQueueOfThousandsIsListedKeptAndWorkedOff) {
  const std::size_t num_jobs = IsLongTest() ? 10'000 : 1'000;
  const std::string running = Submit(TinyJob(100'000, /*seed=*/9, /*checkpoint_interval=*/1000));
  ASSERT_TRUE(WaitUntil(absl::Seconds(30), [&] { return StepOf(running) >= 3; }));
  v1::JobDescription description;
  v1::GetJobRequest request;
  request.set_job(running);
  auto trainer = pair_->Trainer();
  auto context = ContextFor(absl::Seconds(10));
  ASSERT_TRUE(trainer->Describe(context.get(), request, &description).ok());
  const std::uint64_t bytes = AnonymousBytes(trainer_);
  const double alone = SecondsPerStep(running, 30);
  const MonotonicTime begin = MonotonicTime::Now();
  std::set<std::string> submitted = {running};
  for (std::size_t i = 0; i < num_jobs; ++i) {
    v1::SubmitRequest submit;
    submit.set_job_text(description.job_text());
    v1::SubmitResponse response;
    auto limited = ContextFor(absl::Seconds(30));
    const grpc::Status status = trainer->Submit(limited.get(), submit, &response);
    ASSERT_TRUE(status.ok()) << i << ": " << status.error_message();
    submitted.insert(response.job());
  }
  EXPECT_EQ(submitted.size(), num_jobs + 1);
  const double per_second = static_cast<double>(num_jobs) / absl::ToDoubleSeconds(MonotonicTime::Now() - begin);
  const auto list = [&] {
    std::set<std::string> listed;
    v1::ListJobsRequest page;
    do {
      v1::ListJobsResponse response;
      auto limited = ContextFor(absl::Seconds(30));
      EXPECT_TRUE(trainer->ListJobs(limited.get(), page, &response).ok());
      EXPECT_LE(response.jobs_size(), 100);
      for (const v1::JobStatus& job : response.jobs()) EXPECT_TRUE(listed.insert(job.job()).second) << job.job();
      page.set_page_token(response.next_page_token());
    } while (!page.page_token().empty());
    return listed;
  };
  const MonotonicTime listing = MonotonicTime::Now();
  EXPECT_EQ(list(), submitted);
  const absl::Duration listed = MonotonicTime::Now() - listing;
  const double queued = SecondsPerStep(running, 30);
  const std::uint64_t more_bytes = AnonymousBytes(trainer_) - std::min(bytes, AnonymousBytes(trainer_));

  pair_->Kill(Half::kTrainer);
  const MonotonicTime restart = MonotonicTime::Now();
  pair_->Start(Half::kTrainer);
  ASSERT_TRUE(pair_->WaitReady(Half::kTrainer, absl::Seconds(5))) << pair_->log(Half::kTrainer);
  const absl::Duration restarted = MonotonicTime::Now() - restart;
  std::printf("%zu jobs: %.0f submitted a second, listed in %s, %s more memory, %.4f s a step (%.4f with none), restart %s\n",
              num_jobs, per_second, absl::FormatDuration(listed).c_str(), FormatBytes(more_bytes).c_str(), queued, alone,
              absl::FormatDuration(restarted).c_str());
  EXPECT_EQ(list(), submitted) << "none is lost by a death";
  EXPECT_LT(more_bytes, 256 * kMiB);
  ASSERT_TRUE(pair_->Client("cancel " + running).ok());
  EXPECT_TRUE(WaitUntil(absl::Seconds(30), [&] {
    v1::TrainerStatus status;
    auto limited = ContextFor(absl::Seconds(5));
    return trainer->GetStatus(limited.get(), {}, &status).ok() && !status.running_job().empty() &&
           status.running_job() != running;
  })) << "the next one runs";
}

}  // namespace
}  // namespace tandem
