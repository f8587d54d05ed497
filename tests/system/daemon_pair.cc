#include "tests/system/daemon_pair.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <sstream>

#include "common/base/check.h"
#include "common/base/clock.h"
#include "common/base/hash.h"
#include "common/base/unique_fd.h"
#include "common/base/units.h"
#include "common/rpc/channel.h"
#include "nlohmann/json.hpp"

namespace tandem {
namespace {

const char* ProgramOf(Half half) { return half == Half::kRollout ? "rollout_server" : "trainer_server"; }

// Where this test lies, and the daemons beside it, wherever the build folder has been taken.
std::string BinDirectory() { return std::filesystem::read_symlink("/proc/self/exe").parent_path(); }

}  // namespace

std::vector<int> FreePorts(int count) {
  std::vector<UniqueFd> sockets;
  std::vector<int> ports;
  for (int i = 0; i < count; ++i) {
    UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    auto* generic = reinterpret_cast<sockaddr*>(&address);
    TANDEM_CHECK(::bind(fd.get(), generic, size) == 0 && ::getsockname(fd.get(), generic, &size) == 0, "no free port");
    ports.push_back(ntohs(address.sin_port));
    sockets.push_back(std::move(fd));
  }
  return ports;
}

Device TestDevice() {
  static const Device device = [] {
    const char* const name = std::getenv("TANDEM_TEST_DEVICE");
    return name != nullptr && std::string(name) == "cuda" ? Device::kCuda : Device::kCpu;
  }();
  return device;
}

bool IsLongTest() {
  const char* const value = std::getenv("TANDEM_LONG_TESTS");
  return value != nullptr && std::string(value) == "1";
}

std::uint64_t AnonymousBytes(pid_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/status"));
  std::string word;
  std::uint64_t kib = 0;
  while (file >> word && word != "RssAnon:") {}
  file >> kib;
  return kib * kKiB;
}

namespace {
std::uint64_t NumEntries(const std::string& folder) {
  std::error_code error;
  std::uint64_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder, error)) ++count;
  return count;
}
}  // namespace
std::uint64_t NumDescriptors(pid_t pid) { return NumEntries(absl::StrCat("/proc/", pid, "/fd")); }
std::uint64_t NumThreads(pid_t pid) { return NumEntries(absl::StrCat("/proc/", pid, "/task")); }

bool WaitUntil(absl::Duration timeout, const std::function<bool()>& holds) {
  const MonotonicTime deadline = MonotonicTime::Now() + timeout;
  while (!holds()) {
    if (MonotonicTime::Now() > deadline) return false;
    absl::SleepFor(absl::Milliseconds(5));
  }
  return true;
}

std::unique_ptr<grpc::ClientContext> ContextFor(absl::Duration timeout) {
  auto context = std::make_unique<grpc::ClientContext>();
  context->set_deadline(GrpcDeadline(MonotonicTime::Now() + timeout));
  return context;
}

DaemonPair::DaemonPair(DaemonPairOptions options) : options_(std::move(options)) {
  std::filesystem::remove_all(options_.directory);
  std::filesystem::create_directories(options_.directory);
  const std::vector<int> ports = FreePorts(4);
  for (std::size_t i = 0; i < 2; ++i) {
    listens_[i] = absl::StrCat("127.0.0.1:", ports[i]);
    addresses_[i] = options_.meets_in_run_dir ? absl::StrCat("unix:", options_.directory, "/pool/",
                                                             ProgramOf(i == 0 ? Half::kRollout : Half::kTrainer), ".grpc")
                                              : listens_[i];
    metrics_ports_[i] = ports[i + 2];
  }
}

DaemonPair::~DaemonPair() {
  for (Half half : {Half::kRollout, Half::kTrainer}) Kill(half);
}

std::string DaemonPair::data_dir(Half half) const { return absl::StrCat(options_.directory, "/", ProgramOf(half)); }

void DaemonPair::Start(Half half) {
  TANDEM_CHECK(pids_[Index(half)] == -1, ProgramOf(half), " runs already");
  const std::size_t own = Index(half), other = 1 - own;
  std::vector<std::string> words = {BinDirectory() + "/" + ProgramOf(half),
                                    "--listen=" + listens_[own],
                                    absl::StrCat("--metrics=127.0.0.1:", metrics_ports_[own]),
                                    "--run_dir=" + options_.directory + "/pool",
                                    "--data_dir=" + data_dir(half),
                                    "--model=" + options_.model,
                                    TestDevice() == Device::kCuda ? "--device=cuda" : "--device=cpu"};
  if (TestDevice() == Device::kCuda) words.push_back("--pool_bytes=4GiB");
  if (!options_.meets_in_run_dir) words.push_back("--peer=" + addresses_[other]);
  words.insert(words.end(), options_.flags.begin(), options_.flags.end());
  if (half == Half::kTrainer) words.push_back("--http_address=off");
  if (half == Half::kTrainer) words.insert(words.end(), options_.trainer_flags.begin(), options_.trainer_flags.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  const std::string log_path = absl::StrCat(options_.directory, "/", ProgramOf(half), ".log");
  const std::string preloaded = options_.preloaded.empty() ? "" : BinDirectory() + "/" + options_.preloaded;
  const pid_t pid = ::fork();
  TANDEM_CHECK(pid >= 0, "fork failed");
  if (pid == 0) {
    const int fd = ::open(log_path.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
    ::dup2(fd, STDERR_FILENO);
    ::dup2(fd, STDOUT_FILENO);
    ::setenv("OMP_NUM_THREADS", "1", 1);
    for (std::string& assignment : options_.environment) ::putenv(assignment.data());
    if (!preloaded.empty()) ::setenv("LD_PRELOAD", preloaded.c_str(), 1);
    ::execv(argv[0], argv.data());
    ::_exit(127);
  }
  pids_[own] = pid;
}

bool DaemonPair::IsAlive(Half half) {
  const std::size_t i = Index(half);
  if (pids_[i] == -1) return false;
  int status = 0;
  if (::waitpid(pids_[i], &status, WNOHANG) == pids_[i]) pids_[i] = -1;
  return pids_[i] != -1;
}

bool DaemonPair::WaitReady(Half half, absl::Duration timeout) {
  const MonotonicTime deadline = MonotonicTime::Now() + timeout;
  while (MonotonicTime::Now() < deadline && IsAlive(half)) {
    auto context = ContextFor(absl::Milliseconds(500));
    grpc::Status status;
    if (half == Half::kRollout) {
      v1::RolloutStatus response;
      status = Rollout()->GetStatus(context.get(), v1::RolloutStatusRequest(), &response);
    } else {
      v1::TrainerStatus response;
      status = Trainer()->GetStatus(context.get(), v1::TrainerStatusRequest(), &response);
    }
    if (status.ok()) return true;
    absl::SleepFor(absl::Milliseconds(20));
  }
  return false;
}

void DaemonPair::Signal(Half half, int signal) {
  if (pid(half) > 0) ::kill(pid(half), signal);
}

int DaemonPair::Wait(Half half, absl::Duration timeout) {
  const std::size_t i = Index(half);
  const MonotonicTime deadline = MonotonicTime::Now() + timeout;
  while (pids_[i] > 0) {
    int status = 0;
    if (::waitpid(pids_[i], &status, WNOHANG) == pids_[i]) {
      pids_[i] = -1;
      return status;
    }
    if (MonotonicTime::Now() > deadline) return -1;
    absl::SleepFor(absl::Milliseconds(5));
  }
  return 0;
}

void DaemonPair::Kill(Half half) {
  Signal(half, SIGKILL);
  Wait(half, absl::Seconds(10));
}

std::unique_ptr<v1::JobService::Stub> DaemonPair::Trainer() const {
  return v1::JobService::NewStub(MakeChannel(address(Half::kTrainer)));
}
std::unique_ptr<v1::RolloutService::Stub> DaemonPair::Rollout() const {
  return v1::RolloutService::NewStub(MakeChannel(address(Half::kRollout)));
}

std::string DaemonPair::log(Half half) const {
  std::ifstream file(absl::StrCat(options_.directory, "/", ProgramOf(half), ".log"));
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

absl::StatusOr<std::string> DaemonPair::Submit(const std::string& job_text, const std::string& rows,
                                               const std::string& evaluation) {
  auto trainer = Trainer();
  const std::string sha256 = Sha256Hex(rows);
  {
    auto context = ContextFor(absl::Seconds(10));
    v1::UploadResponse response;
    auto writer = trainer->Upload(context.get(), &response);
    v1::UploadRequest request;
    request.mutable_header()->set_sha256(sha256);
    request.mutable_header()->set_size_bytes(rows.size());
    request.mutable_header()->set_name("rows.jsonl");
    writer->Write(request);
    request.set_piece(rows);
    writer->Write(request);
    writer->WritesDone();
    TANDEM_RETURN_IF_ERROR(FromGrpc(writer->Finish()));
  }
  v1::SubmitRequest request;
  request.set_job_text(absl::StrCat(job_text, "\ndata { content: \"", sha256, "\" }\nevaluation { content: \"", sha256, "\" ",
                                    evaluation, " }\n"));
  auto context = ContextFor(absl::Seconds(10));
  v1::SubmitResponse response;
  TANDEM_RETURN_IF_ERROR(FromGrpc(trainer->Submit(context.get(), request, &response)));
  return response.job();
}

absl::StatusOr<v1::JobStatus> DaemonPair::GetJob(const std::string& job) {
  v1::GetJobRequest request;
  request.set_job(job);
  v1::JobStatus status;
  auto context = ContextFor(absl::Seconds(5));
  TANDEM_RETURN_IF_ERROR(FromGrpc(Trainer()->GetJob(context.get(), request, &status)));
  return status;
}

absl::StatusOr<v1::JobStatus> DaemonPair::WaitForEnd(const std::string& job, absl::Duration timeout) {
  const MonotonicTime deadline = MonotonicTime::Now() + timeout;
  absl::StatusOr<v1::JobStatus> last = absl::UnavailableError("never asked");
  while (MonotonicTime::Now() < deadline) {
    last = GetJob(job);
    if (last.ok() && (last->state() == v1::JOB_STATE_SUCCEEDED || last->state() == v1::JOB_STATE_FAILED ||
                      last->state() == v1::JOB_STATE_CANCELLED)) {
      return last;
    }
    absl::SleepFor(absl::Milliseconds(50));
  }
  return absl::DeadlineExceededError(absl::StrCat("job ", job, " has not ended after ", absl::FormatDuration(timeout), ": ",
                                                  last.ok() ? last->ShortDebugString() : last.status().ToString()));
}

absl::StatusOr<std::string> DaemonPair::Client(const std::string& words) {
  const std::string command = absl::StrCat(BinDirectory(), "/tandem --json --trainer=", address(Half::kTrainer),
                                           " --rollout=", address(Half::kRollout), " ", words, " 2>&1");
  FILE* const pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) return absl::UnknownError(absl::StrCat("cannot run ", command));
  std::string output;
  std::array<char, 4096> piece;
  for (std::size_t size = 0; (size = std::fread(piece.data(), 1, piece.size(), pipe)) > 0;) output.append(piece.data(), size);
  if (const int status = ::pclose(pipe); status != 0) return absl::UnknownError(absl::StrCat(command, ": ", output));
  return output;
}

std::string DaemonPair::Trajectory(const std::string& job) {
  // The history as the trainer keeps it; fields that measure time differ between equal runs.
  std::ifstream file(absl::StrCat(data_dir(Half::kTrainer), "/jobs/", job, "/history.jsonl"));
  std::string trajectory, line;
  while (std::getline(file, line)) {
    nlohmann::json row = nlohmann::json::parse(line, nullptr, false);
    if (row.is_discarded()) return "not JSON: " + line;
    for (auto it = row.begin(); it != row.end();) {
      const std::string& name = it.key();
      const bool is_time = name.find("time") != std::string::npos || name.find("second") != std::string::npos;
      it = is_time ? row.erase(it) : std::next(it);
    }
    trajectory += row.dump() + "\n";
  }
  return trajectory;
}

double DaemonPair::MeanReward(const std::string& job, std::size_t num_steps) {
  std::ifstream file(absl::StrCat(data_dir(Half::kTrainer), "/jobs/", job, "/history.jsonl"));
  std::vector<double> rewards;
  for (std::string line; std::getline(file, line);) {
    const nlohmann::json row = nlohmann::json::parse(line, nullptr, false);
    if (row.contains("reward") && row["reward"].is_number()) rewards.push_back(row["reward"]);
  }
  const std::size_t count = std::min(num_steps, rewards.size());
  return std::accumulate(rewards.end() - static_cast<std::ptrdiff_t>(count), rewards.end(), 0.0) /
         static_cast<double>(std::max<std::size_t>(count, 1));
}

GenerateResult GenerateText(v1::RolloutService::Stub* rollout, const std::string& prompt, const v1::SamplingParams& sampling,
                            int group_size, const std::string& job, absl::Duration timeout) {
  GenerateResult result;
  const auto members = static_cast<std::size_t>(group_size);
  result.ids.resize(members);
  result.rollout_logprobs.resize(members);
  result.texts.resize(members);
  auto context = ContextFor(timeout);
  auto stream = rollout->Generate(context.get());
  v1::GenerateRequest request;
  request.mutable_header()->set_job(job);
  request.mutable_header()->set_mode(v1::SCHEDULE_MODE_SHARED);
  request.mutable_header()->set_num_groups(1);
  request.mutable_header()->set_return_text(true);
  stream->Write(request);
  request.mutable_group()->set_group_size(static_cast<std::uint32_t>(group_size));
  *request.mutable_group()->mutable_sampling() = sampling;
  stream->Write(request);
  request.mutable_prompt()->set_text(prompt);
  stream->Write(request);
  request.mutable_run();
  stream->Write(request);
  stream->WritesDone();
  v1::GenerateResponse response;
  while (stream->Read(&response)) {
    const std::size_t member = response.member_index();
    if (member < members && response.has_tokens()) {
      const auto& tokens = response.tokens();
      result.ids[member].insert(result.ids[member].end(), tokens.ids().begin(), tokens.ids().end());
      auto& logprobs = result.rollout_logprobs[member];
      logprobs.insert(logprobs.end(), tokens.rollout_logprobs().begin(), tokens.rollout_logprobs().end());
      result.texts[member] += tokens.text();
    } else if (member < members && response.has_finished()) {
      result.texts[member] += response.finished().text();
    }
    result.responses.push_back(response);
  }
  result.status = stream->Finish();
  return result;
}

}  // namespace tandem
