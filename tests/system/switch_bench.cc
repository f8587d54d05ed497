// tandem_switch_bench: what a phase switch and the publication of a LoRA version cost while requests stream. It starts a
// rollout_server, attaches to its pool as the trainer, and times what the trainer would call. Words beyond --json go to the
// rollout_server: `tandem_switch_bench --json --random_weights=llama-3.1-8b --pool_bytes=100GiB`. The GPU where there is one.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <thread>

#include "absl/time/clock.h"
#include "common/base/clock.h"
#include "common/base/mutex.h"
#include "common/base/units.h"
#include "common/rpc/channel.h"
#include "common/sharing/pool_member.h"
#include "kernels/checksum/checksum.h"
#include "nlohmann/json.hpp"
#include "tests/system/daemon_pair.h"

namespace tandem {
namespace {

constexpr int kRounds = 100, kWarmUps = 10;
constexpr std::uint32_t kSequences = 8, kPromptTokens = 16, kMaxTokens = 200;
constexpr int kRank = 16;
constexpr const char* kJob = "bench";

// Median and 99th percentile of times, in milliseconds.
class Times {
 public:
  void Add(absl::Duration time) { milliseconds_.push_back(absl::ToDoubleMilliseconds(time)); }
  double Quantile(double part) {
    if (milliseconds_.empty()) return 0;
    std::sort(milliseconds_.begin(), milliseconds_.end());
    return milliseconds_[static_cast<std::size_t>(part * static_cast<double>(milliseconds_.size() - 1))];
  }
  nlohmann::json Json() { return {{"median_ms", Quantile(0.5)}, {"p99_ms", Quantile(0.99)}, {"max_ms", Quantile(1)}}; }

 private:
  std::vector<double> milliseconds_;
};

using GenerateStream = grpc::ClientReaderWriter<v1::GenerateRequest, v1::GenerateResponse>;
std::unique_ptr<GenerateStream> Ask(v1::RolloutService::Stub* stub, grpc::ClientContext* context, const std::string& job,
                                    std::uint32_t max_tokens) {
  auto stream = stub->Generate(context);
  v1::GenerateRequest request;
  request.mutable_header()->set_job(job);
  request.mutable_header()->set_mode(v1::SCHEDULE_MODE_SHARED);
  request.mutable_header()->set_num_groups(1);
  stream->Write(request);
  request.mutable_group()->set_group_size(kSequences);
  v1::SamplingParams* const sampling = request.mutable_group()->mutable_sampling();
  sampling->set_temperature(1);
  sampling->set_max_tokens(max_tokens);
  sampling->set_ignore_end_tokens(true);
  stream->Write(request);
  for (std::uint32_t i = 0; i < kPromptTokens; ++i) request.mutable_prompt()->mutable_token_ids()->add_ids(10 + i);
  stream->Write(request);
  request.mutable_run();
  stream->Write(request);
  stream->WritesDone();
  return stream;
}

// A request of one token each, drawn under `version` (0: any). When the first was here.
absl::StatusOr<MonotonicTime> AskForOneToken(v1::RolloutService::Stub* stub, const std::string& job, std::uint64_t version) {
  const auto context = ContextFor(absl::Seconds(60));
  const auto stream = Ask(stub, context.get(), job, 1);
  MonotonicTime first = MonotonicTime::InfiniteFuture();
  v1::GenerateResponse response;
  while (stream->Read(&response)) {
    if (!response.has_tokens()) continue;
    first = std::min(first, MonotonicTime::Now());
    const auto& spans = response.tokens().version_spans();
    if (version != 0 && (spans.empty() || spans[0].weight_version() != version))
      return absl::InternalError(absl::StrCat("a token that is not of version ", version));
  }
  TANDEM_RETURN_IF_ERROR(FromGrpc(stream->Finish()));
  return first;
}

// Sequences that stream one batch after another; tells when the last token came and of which version.
class Stream {
 public:
  Stream(const DaemonPair* pair, std::string job) : stub_(pair->Rollout()), job_(std::move(job)), thread_([this] { Run(); }) {}
  ~Stream() {
    is_stopping_ = true;
    thread_.join();
  }
  // When the first token that came after `begin`, of `version` or a later one, was here. Errors: DEADLINE_EXCEEDED.
  absl::StatusOr<MonotonicTime> Await(MonotonicTime begin, std::uint64_t version = 0) {
    const MonotonicTime deadline = MonotonicTime::Now() + absl::Seconds(30);
    MutexLock lock(&mutex_);
    while (last_ < begin || version_ < version) {
      if (MonotonicTime::Now() > deadline) return absl::DeadlineExceededError(absl::StrCat("no token for 30 s: ", fault_));
      changed_.WaitFor(&mutex_, absl::Milliseconds(200));
    }
    return last_;
  }
  Times gaps() const {  // between tokens of one sequence
    MutexLock lock(&mutex_);
    return gaps_;
  }

 private:
  void Run() {
    while (!is_stopping_) {
      auto context = ContextFor(absl::Minutes(5));
      const auto stream = Ask(stub_.get(), context.get(), job_, kMaxTokens);
      v1::GenerateResponse response;
      MonotonicTime before = MonotonicTime::InfiniteFuture();
      while (stream->Read(&response)) {
        if (is_stopping_) context->TryCancel();
        if (!response.has_tokens() || response.member_index() != 0) continue;
        const MonotonicTime now = MonotonicTime::Now();
        MutexLock lock(&mutex_);
        if (response.tokens().ids_size() == 1 && before < now) gaps_.Add(now - before);
        before = last_ = now;
        for (const v1::VersionSpan& span : response.tokens().version_spans()) version_ = span.weight_version();
        changed_.SignalAll();
      }
      if (const grpc::Status status = stream->Finish(); !status.ok() && !is_stopping_) {
        MutexLock lock(&mutex_);
        fault_ = status.error_message();
      }
    }
  }

  const std::unique_ptr<v1::RolloutService::Stub> stub_;
  const std::string job_;
  std::atomic<bool> is_stopping_ = false;
  mutable Mutex mutex_;
  CondVar changed_;
  MonotonicTime last_ ABSL_GUARDED_BY(mutex_) = MonotonicTime::InfinitePast();
  std::uint64_t version_ ABSL_GUARDED_BY(mutex_) = 0;
  Times gaps_ ABSL_GUARDED_BY(mutex_);
  std::string fault_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

absl::StatusOr<nlohmann::json> MeasureSteps(const DaemonPair& pair, const std::string& job) {
  Stream stream(&pair, job);
  const MonotonicTime end = MonotonicTime::Now() + absl::Seconds(2);
  while (MonotonicTime::Now() < end) TANDEM_RETURN_IF_ERROR(stream.Await(MonotonicTime::Now()).status());
  return stream.gaps().Json();
}

// There and back, with nothing to do, as a job switches when all its completions have ended, or while sequences stream: then the
// acquisition waits for the step under way. The release is answered when the engine goes on: its next step begins.
absl::Status MeasureSwitches(const DaemonPair& pair, PoolMember* pool, bool is_streaming, nlohmann::json* result) {
  std::optional<Stream> stream;
  if (is_streaming) stream.emplace(&pair, "");
  Times acquire, release, first_token;
  for (int i = -kWarmUps; i < kRounds; ++i) {
    if (is_streaming) TANDEM_RETURN_IF_ERROR(stream->Await(MonotonicTime::Now()).status());
    const MonotonicTime begin = MonotonicTime::Now();
    TANDEM_RETURN_IF_ERROR(pool->AcquireElastic(v1::STREAM_MODE_PAUSE, begin + absl::Seconds(10)).status());
    const MonotonicTime acquired = MonotonicTime::Now();
    absl::SleepFor(absl::Milliseconds(10));  // the trainer's work; tokens drawn before the switch have long arrived
    const MonotonicTime back = MonotonicTime::Now();
    TANDEM_RETURN_IF_ERROR(pool->ReleaseElastic(back + absl::Seconds(10)));
    const MonotonicTime released = MonotonicTime::Now();
    MonotonicTime token = released;
    if (is_streaming) { TANDEM_ASSIGN_OR_RETURN(token, stream->Await(back)); }
    if (i < 0) continue;
    acquire.Add(acquired - begin);
    release.Add(released - back);
    first_token.Add(token - back);
  }
  if (!is_streaming) {
    *result = {{"acquire", acquire.Json()}, {"release", release.Json()}};
    return absl::OkStatus();
  }
  *result = {{"acquire_while_streaming", acquire.Json()},
             {"release_while_streaming", release.Json()},
             {"release_to_first_token", first_token.Json()}};
  return absl::OkStatus();
}

// A version is copied into the idle slot, summed and activated, as the trainer does it.
absl::Status MeasurePublishes(const DaemonPair& pair, PoolMember* pool, nlohmann::json* result) {
  TANDEM_ASSIGN_OR_RETURN(const ModelDescription description, ReadModelDescription(*pool));
  const AdapterLayout layout =
      AdapterLayout::Create(description.config, kRank,
                            {LinearKind::kQProj, LinearKind::kKProj, LinearKind::kVProj, LinearKind::kOProj,
                             LinearKind::kGateProj, LinearKind::kUpProj, LinearKind::kDownProj});
  const std::span<std::byte> region = pool->region(v1::REGION_KIND_TRAINER_STANDING);
  const std::uint64_t slot_bytes = RoundUp(layout.total_bytes, 4096);
  if (3 * slot_bytes > region.size())
    return absl::ResourceExhaustedError(absl::StrCat("the trainer's standing region of ", FormatBytes(region.size()),
                                                     " has no room for three adapters of ", FormatBytes(slot_bytes)));
  TANDEM_RETURN_IF_ERROR(ZeroMemory(pool->device(), region.data(), 3 * slot_bytes));
  const std::span<std::byte> masters = region.subspan(2 * slot_bytes, layout.total_bytes);
  const auto stub = pair.Rollout();
  const auto publish = [&](std::uint64_t version) -> absl::Status {
    const std::span<std::byte> slot = region.subspan(version % 2 * slot_bytes, layout.total_bytes);
    TANDEM_RETURN_IF_ERROR(CopyOnDevice(pool->device(), slot.data(), masters.data(), slot.size()));
    TANDEM_ASSIGN_OR_RETURN(const std::string checksum, MemoryChecksum(pool->device(), slot.data(), slot.size()));
    v1::ActivateAdapterRequest request;
    request.set_job(kJob);
    request.set_weight_version(version);
    v1::AdapterSlot* const place = request.mutable_slot();
    place->mutable_range()->set_begin_bytes(pool->offset_of(slot.data()));
    place->mutable_range()->set_end_bytes(pool->offset_of(slot.data()) + slot.size());
    place->set_rank(kRank);
    place->set_scale(2);
    for (const LinearKind kind : layout.targets) place->add_targets(LinearKindName(kind));
    place->set_checksum(checksum);
    v1::ActivateAdapterResponse response;
    return FromGrpc(stub->ActivateAdapter(ContextFor(absl::Seconds(10)).get(), request, &response));
  };
  std::uint64_t version = 0;
  TANDEM_RETURN_IF_ERROR(publish(++version));
  // As a job publishes: between two batches. What a request takes without a publication before it is told beside.
  Times request, call, first_token;
  for (int i = -kWarmUps; i < kRounds; ++i) {
    const MonotonicTime asked = MonotonicTime::Now();
    TANDEM_ASSIGN_OR_RETURN(const MonotonicTime answered, AskForOneToken(stub.get(), kJob, version));
    const MonotonicTime begin = MonotonicTime::Now();
    TANDEM_RETURN_IF_ERROR(publish(++version));
    const MonotonicTime published = MonotonicTime::Now();
    TANDEM_ASSIGN_OR_RETURN(const MonotonicTime token, AskForOneToken(stub.get(), kJob, version));
    if (i < 0) continue;
    request.Add(answered - asked);
    call.Add(published - begin);
    first_token.Add(token - begin);
  }
  // Beside sequences that stream: activated after the step under way.
  Times streaming_call, streaming_token;
  {
    Stream stream(&pair, kJob);
    for (int i = -kWarmUps; i < kRounds; ++i) {
      TANDEM_RETURN_IF_ERROR(stream.Await(MonotonicTime::Now()).status());
      absl::SleepFor(absl::Milliseconds(7));  // not in step with the engine
      const MonotonicTime begin = MonotonicTime::Now();
      TANDEM_RETURN_IF_ERROR(publish(++version));
      const MonotonicTime published = MonotonicTime::Now();
      TANDEM_ASSIGN_OR_RETURN(const MonotonicTime token, stream.Await(begin, version));
      if (i < 0) continue;
      streaming_call.Add(published - begin);
      streaming_token.Add(token - begin);
    }
  }
  TANDEM_ASSIGN_OR_RETURN((*result)["decode_step_with_lora"], MeasureSteps(pair, kJob));
  (*result)["adapter_bytes"] = layout.total_bytes;
  (*result)["request_to_first_token"] = request.Json();
  (*result)["publish"] = call.Json();
  (*result)["publish_to_first_token"] = first_token.Json();
  (*result)["publish_while_streaming"] = streaming_call.Json();
  (*result)["publish_to_first_token_while_streaming"] = streaming_token.Json();
  return absl::OkStatus();
}

absl::Status Measure(const std::vector<std::string>& flags, const std::string& directory, nlohmann::json* result) {
  DaemonPair pair({.directory = directory, .model = "", .flags = flags, .preloaded = {}});
  pair.Start(Half::kRollout);
  if (!pair.WaitReady(Half::kRollout, absl::Minutes(5))) return absl::UnavailableError(pair.log(Half::kRollout));
  PoolMemberOptions options;
  options.role = v1::ROLE_TRAINER;
  options.peer_address = pair.address(Half::kRollout);
  options.run_dir = directory + "/pool";
  options.device = TestDevice();
  TANDEM_ASSIGN_OR_RETURN(const std::unique_ptr<PoolMember> pool, PoolMember::Start(options));
  pool->Offer({});
  const v1::PoolManifest manifest = pool->manifest();
  (*result)["device"] = DeviceName(TestDevice());
  (*result)["pool_bytes"] = manifest.num_chunks() * manifest.chunk_bytes();
  TANDEM_ASSIGN_OR_RETURN((*result)["decode_step"], MeasureSteps(pair, ""));
  absl::Status status;
  for (const bool is_streaming : {false, true}) {
    nlohmann::json part;
    if (status.ok()) status = MeasureSwitches(pair, pool.get(), is_streaming, &part);
    result->update(part);
  }
  if (status.ok()) status = MeasurePublishes(pair, pool.get(), result);
  pool->Stop();
  return status.ok() ? status : Annotate(status, pair.log(Half::kRollout));
}

int Main(int argc, char** argv) {
  std::vector<std::string> flags;
  bool is_json = false;
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) == "--json") {
      is_json = true;
    } else {
      flags.emplace_back(argv[i]);
    }
  }
  if (HasCudaDevice()) ::setenv("TANDEM_TEST_DEVICE", "cuda", 0);
  const std::string directory = absl::StrCat("/tmp/tandem_switch_bench_", ::getpid());
  nlohmann::json result;
  const absl::Status status = Measure(flags, directory, &result);
  std::filesystem::remove_all(directory);
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", status.ToString().c_str());
    return 1;
  }
  if (is_json) {
    std::printf("%s\n", result.dump().c_str());
    return 0;
  }
  for (const auto& [name, value] : result.items()) {
    if (!value.is_object()) {
      std::printf("%-40s %s\n", name.c_str(), value.dump().c_str());
      continue;
    }
    std::printf("%-40s median %8.3f ms, p99 %8.3f ms, slowest %8.3f ms\n", name.c_str(), value["median_ms"].get<double>(),
                value["p99_ms"].get<double>(), value["max_ms"].get<double>());
  }
  return 0;
}

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) { return tandem::Main(argc, argv); }
