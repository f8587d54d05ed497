// The process behind PoolProcess. Words "key=value" as arguments; then commands on stdin, one line of answer each on stdout.
#include <dirent.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <bit>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mutex.h"
#include "common/base/units.h"
#include "common/memory/lease_book.h"
#include "common/rpc/channel.h"
#include "common/rpc/daemon.h"
#include "common/sharing/pool_member.h"
#include "grpcpp/grpcpp.h"
#include "tests/common/sharing/device_touch.h"

namespace tandem {
namespace {

void Say(const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

int CountDescriptors() {
  int count = 0;
  DIR* const folder = ::opendir("/proc/self/fd");
  while (::readdir(folder) != nullptr) ++count;
  ::closedir(folder);
  return count - 3;  // "." and "..", and the folder itself
}

// Maps of the pool; and Pss and Rss of them, which differ where a page is shared.
struct PoolMaps {
  int count = 0;
  std::uint64_t rss_kib = 0, pss_kib = 0;
};
PoolMaps ReadPoolMaps() {
  std::ifstream smaps("/proc/self/smaps");
  PoolMaps maps;
  bool is_pool = false;
  for (std::string line; std::getline(smaps, line);) {
    std::istringstream words(line);
    std::string key;
    std::uint64_t value = 0;
    words >> key;
    if (key.back() != ':') {
      is_pool = line.find("memfd:tandem_pool") != std::string::npos;
      maps.count += is_pool;
    } else if (is_pool && (key == "Rss:" || key == "Pss:")) {
      words >> value;
      (key == "Rss:" ? maps.rss_kib : maps.pss_kib) += value;
    }
  }
  return maps;
}

// The events heard, oldest first.
class Heard {
 public:
  void Add(const std::string& event) {
    MutexLock lock(&mutex_);
    text_ += text_.empty() ? event : "," + event;
  }
  std::string Take() {
    MutexLock lock(&mutex_);
    return text_.empty() ? "none" : std::exchange(text_, "");
  }

 private:
  Mutex mutex_;
  std::string text_;
};

std::string LeaseText(const v1::LeaseState& lease) { return absl::StrCat(RoleName(lease.holder()), " ", lease.epoch()); }
std::string StatusText(const absl::Status& status) {
  return status.ok() ? "ok" : absl::StrCat(absl::StatusCodeToString(status.code()), " ", status.message());
}

class Commands {
 public:
  Commands(PoolMember* member, Heard* heard, absl::Duration* yield_time)
      : member_(member), heard_(heard), yield_time_(yield_time) {}

  std::string Run(const std::string& line) {
    std::istringstream words(line);
    std::string verb, argument, value;
    words >> verb >> argument >> value;
    if (verb == "acquire") {  // [deadline]
      absl::Duration deadline = absl::Seconds(10);
      if (!argument.empty()) absl::ParseDuration(argument, &deadline);
      const auto lease = member_->AcquireElastic(v1::STREAM_MODE_PAUSE, MonotonicTime::Now() + deadline);
      return lease.ok() ? LeaseText(*lease) : StatusText(lease.status());
    }
    if (verb == "release") return StatusText(member_->ReleaseElastic(MonotonicTime::Now() + absl::Seconds(10)));
    if (verb == "lease") return absl::StrCat(LeaseText(member_->lease()), member_->holds_elastic() ? " mine" : "");
    if (verb == "attached") return member_->is_peer_attached() ? "yes" : "no";
    if (verb == "health") return StatusText(member_->health());
    if (verb == "manifest") {
      const v1::PoolManifest manifest = member_->manifest();
      return absl::StrCat(manifest.transport(), " ", manifest.device_uuid(), " ", manifest.num_chunks(), "x",
                          manifest.chunk_bytes(), " ", v1::WeightFormat_Name(manifest.weights().format()),
                          manifest.dies_with_maker() ? " dies" : " stays");
    }
    if (verb == "pool") return member_->manifest().pool_id();
    if (verb == "events") return heard_->Take();
    if (verb == "descriptors") return absl::StrCat(CountDescriptors());
    if (verb == "maps") {
      const PoolMaps maps = ReadPoolMaps();
      return absl::StrCat(maps.count, " ", maps.rss_kib, " ", maps.pss_kib);
    }
    if (verb == "limit") {
      rlimit limit{};
      ::getrlimit(RLIMIT_NOFILE, &limit);
      return absl::StrCat(limit.rlim_cur);
    }
    if (verb == "read_weights") {  // touches every page
      std::uint64_t sum = 0;
      const std::span<std::byte> weights = member_->region(v1::REGION_KIND_WEIGHTS);
      std::vector<std::byte> bytes(member_->device() == Device::kCpu ? 0 : weights.size());
      if (absl::Status copied = CopyToHost(member_->device(), bytes.data(), weights.data(), bytes.size()); !copied.ok())
        return StatusText(copied);
      for (const std::byte byte : bytes.empty() ? weights : std::span(bytes)) sum = sum * 31 + static_cast<std::uint64_t>(byte);
      return absl::StrCat(sum);
    }
    if (verb == "yield_time") return absl::ParseDuration(argument, yield_time_) ? "ok" : "bad";
    if (verb == "ledger") {
      std::string text;
      for (const v1::OwnedBytes& owned : member_->RegionLedger()) absl::StrAppend(&text, owned.owner(), "=", owned.bytes(), " ");
      return text;
    }
    int kind = 0;
    std::uint32_t bits = 0;
    if (!absl::SimpleAtoi(argument, &kind)) return "?";
    const std::span<std::byte> region = member_->region(static_cast<v1::RegionKind>(kind));
    if (verb == "get") {
      const absl::Status copied = CopyToHost(member_->device(), &bits, region.data(), sizeof bits);
      return copied.ok() ? absl::StrCat(bits) : StatusText(copied);
    }
    if (verb == "touch") return StatusText(testing::TouchByte(member_->device(), region.data()));  // its first byte, by a kernel
    if (verb == "put" && absl::SimpleAtoi(value, &bits)) {
      const volatile float number = std::bit_cast<float>(bits);  // through a float register, as a scale would go
      const float copy = number;
      return StatusText(CopyFromHost(member_->device(), region.data(), &copy, sizeof copy));
    }
    return "?";
  }

 private:
  PoolMember* const member_;
  Heard* const heard_;
  absl::Duration* const yield_time_;
};

int Main(int argc, char** argv) {
  std::map<std::string, std::string> words;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    words[word.substr(0, word.find('='))] = word.substr(word.find('=') + 1);
  }
  StartLog(words["role"] == "1" ? "rollout" : "trainer", LogLevel::kInfo);
  ::signal(SIGPIPE, SIG_IGN);
  PoolMemberOptions options;
  options.role = static_cast<v1::Role>(std::atoi(words["role"].c_str()));
  options.run_dir = words["run_dir"];
  options.peer_address = words["peer"];
  options.model_path = words["model"];
  options.chunk_bytes = ParseBytes(words["chunk_bytes"]).value();
  if (words.count("pool_bytes")) options.pool_bytes = ParseBytes(words["pool_bytes"]).value();
  if (words.count("standing_bytes"))
    options.rollout_standing_bytes = options.trainer_standing_bytes = ParseBytes(words["standing_bytes"]).value();
  options.device = words["device"] == "cuda" ? Device::kCuda : Device::kCpu;
  options.use_cuda_ipc = words["transport"] == "cuda_ipc";
  if (words.count("reserve_bytes")) options.reserve_bytes = ParseBytes(words["reserve_bytes"]).value();
  options.strict_leases = words["strict"] == "1";
  options.kill_silent_holder = words["kill_silent"] == "1";
  if (words.count("holder_timeout")) absl::ParseDuration(words["holder_timeout"], &options.holder_timeout);
  options.start_timeout = absl::Seconds(20);
  if (words.count("start_timeout")) absl::ParseDuration(words["start_timeout"], &options.start_timeout);
  if (words.count("nofile")) {
    rlimit limit{};
    ::getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = static_cast<rlim_t>(std::atoi(words["nofile"].c_str()));
    ::setrlimit(RLIMIT_NOFILE, &limit);
  }

  auto member = PoolMember::Start(options);
  if (!member.ok()) {
    Say(absl::StrCat("failed ", StatusText(member.status())));
    return 2;
  }
  if (words["hold"] == "1") {  // a maker that has a pool and does not serve yet
    Say("holding");
    std::string line;
    std::getline(std::cin, line);
  }
  Heard heard;
  absl::Duration yield_time = absl::ZeroDuration();
  const PoolEvents events{.on_peer_attached = [&](v1::Role, int) { heard.Add("attached"); },
                          .on_peer_lost = [&](v1::Role) { heard.Add("lost"); },
                          .on_yield_elastic =
                              [&](v1::StreamMode, MonotonicTime) {
                                heard.Add("yield");
                                absl::SleepFor(yield_time);
                                return absl::OkStatus();
                              },
                          .on_elastic_returned = [&] { heard.Add("returned"); }};
  const std::string ready = (*member)->made_pool() ? "ready made" : "ready joined";
  Commands commands(member->get(), &heard, &yield_time);
  const auto run_commands = [&commands] {
    for (std::string line; std::getline(std::cin, line);) Say(commands.Run(line));
  };
  if (words["daemon"] == "1") {  // served and watched as the real ones are
    DaemonConfig config;
    config.listen = words["listen"];
    const std::unique_ptr<Metrics> metrics = Metrics::Create("").value();
    const int code = Daemon::Serve(
        config, Access::Create(config.access).value(), metrics.get(), member->get(), {(*member)->service()},
        [&](int) {
          (*member)->Offer(events);
          Say(ready);
          std::thread(run_commands).detach();
        },
        [] { return absl::OkStatus(); }, [&] { (*member)->Stop(); });
    ::_exit(code);  // the other thread holds the lock of stdin, for which an exit in order may wait
  }
  grpc::ServerBuilder builder;
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddListeningPort(words["listen"], grpc::InsecureServerCredentials());
  builder.RegisterService((*member)->service());
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr) {
    Say("failed to listen");
    return 3;
  }
  (*member)->Offer(events);
  Say(ready);
  run_commands();
  (*member)->Stop();
  server->Shutdown(GrpcDeadline(MonotonicTime::Now() + absl::Seconds(1)));
  return 0;
}

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) { return tandem::Main(argc, argv); }
