// `tandem doctor`: whether this node can run the pair, found out by trying.
#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "client/commands.h"
#include "client/printing.h"
#include "common/base/clock.h"
#include "common/base/unique_fd.h"
#include "common/base/units.h"
#include "common/gpu/nvml.h"
#include "common/rpc/channel.h"
#include "nlohmann/json.hpp"

namespace tandem {
namespace {

namespace fs = std::filesystem;

constexpr absl::Duration kProgramLimit = absl::Seconds(20);
constexpr absl::Duration kCallLimit = absl::Seconds(5);
constexpr std::size_t kMaxAnswerBytes = 8 << 20;
constexpr int kLeastCuda = 13000;
constexpr std::uint64_t kLeastHostBytes = 8 * kGiB;
constexpr std::uint64_t kLeastDiskBytes = kGiB, kAmpleDiskBytes = 20 * kGiB;
constexpr char kSandboxJobs[] = "jobs with python_function or code_tests need it";

enum class Grade { kOk, kWarning, kFault };
const char* GradeName(Grade grade) { return grade == Grade::kOk ? "ok" : grade == Grade::kWarning ? "warning" : "fault"; }

struct Finding {
  std::string check;
  Grade grade = Grade::kOk;
  std::string found;
  std::string advice = "";  // what to do; empty with kOk
};

void PrintFinding(const Finding& finding, bool as_json) {
  if (as_json) {
    const nlohmann::json line = {
        {"check", finding.check}, {"grade", GradeName(finding.grade)}, {"found", finding.found}, {"advice", finding.advice}};
    Print(line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
  } else {
    Print(absl::StrFormat("%-8s%-16s%s%s%s", GradeName(finding.grade), finding.check, finding.found,
                          finding.advice.empty() ? "" : ". ", finding.advice));
  }
}

std::string FirstLine(const std::string& text) { return text.substr(0, text.find('\n')); }
// All of a short text, as one line.
std::string OneLine(std::string text) {
  constexpr std::size_t kMaxBytes = 600;
  absl::StripTrailingAsciiWhitespace(&text);
  std::ranges::replace(text, '\n', ' ');
  return text.substr(0, kMaxBytes);
}

struct ProgramEnd {
  int exit_code = -1;  // -1: it did not start, ran past kProgramLimit or was ended by a signal
  std::string output;  // both streams, at most kMaxAnswerBytes
};
ProgramEnd RunProgram(std::vector<std::string> words) {
  ProgramEnd end;
  int fds[2];
  if (::pipe2(fds, O_CLOEXEC) != 0) return end;
  UniqueFd ours(fds[0]), theirs(fds[1]);
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, theirs.get(), STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, theirs.get(), STDERR_FILENO);
  pid_t pid = -1;
  const int spawned = ::posix_spawn(&pid, arguments[0], &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  theirs.Close();
  if (spawned != 0) {
    end.output = absl::StrCat(words[0], ": ", std::strerror(spawned));
    return end;
  }
  const MonotonicTime deadline = MonotonicTime::Now() + kProgramLimit;
  bool is_whole = false;
  while (!is_whole && MonotonicTime::Now() < deadline && end.output.size() < kMaxAnswerBytes) {
    pollfd waited{.fd = ours.get(), .events = POLLIN, .revents = 0};
    if (::poll(&waited, 1, 100) <= 0) continue;
    std::array<char, 4096> piece;
    const ssize_t got = ::read(ours.get(), piece.data(), piece.size());
    is_whole = got == 0;
    if (got > 0) end.output.append(piece.data(), static_cast<std::size_t>(got));
  }
  if (!is_whole) ::kill(pid, SIGKILL);
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {}
  if (is_whole && WIFEXITED(status)) end.exit_code = WEXITSTATUS(status);
  if (!is_whole) end.output += absl::StrCat("did not end within ", absl::FormatDuration(kProgramLimit));
  return end;
}

// --- GPU and host ---

std::vector<Finding> LookAtDriver(bool is_pair_running) {
  const absl::StatusOr<DriverDescription> driver = DescribeDriver();
  std::error_code error;
  if (!driver.ok()) {
    const bool has_device = fs::exists("/dev/nvidiactl", error) || fs::exists("/proc/driver/nvidia/version", error);
    if (has_device)
      return {{"driver", Grade::kFault, std::string(driver.status().message()),
               "Install the driver's libraries of the kernel module's version; in a container, start it with --gpus all"}};
    return {{"driver", Grade::kWarning, "no NVIDIA driver", "The daemons run on the CPU; for a GPU install driver 580 or later"}};
  }
  std::vector<Finding> findings;
  const std::string versions = absl::StrFormat("%s, CUDA %d.%d, GPUs: %d", driver->version, driver->cuda_version / 1000,
                                               driver->cuda_version % 1000 / 10, driver->gpus.size());
  if (driver->gpus.empty())
    findings.push_back({"driver", Grade::kFault, versions, "No GPU is visible: see nvidia-smi and the kernel's log"});
  else if (driver->cuda_version < kLeastCuda)
    findings.push_back({"driver", Grade::kFault, versions, "CUDA 13 is needed: install driver 580 or later"});
  else
    findings.push_back({"driver", Grade::kOk, versions});
  for (std::size_t i = 0; i < driver->gpus.size(); ++i) {
    const DriverGpu& gpu = driver->gpus[i];
    Finding finding{"gpu_memory", Grade::kOk,
                    absl::StrCat("GPU ", i, ", ", gpu.name, ": ", FormatBytes(gpu.free_bytes), " of ",
                                 FormatBytes(gpu.total_bytes), " free")};
    if (!is_pair_running && gpu.free_bytes < gpu.total_bytes / 10 * 9) {
      finding.grade = Grade::kWarning;
      finding.advice = "Other processes hold memory that the pool then lacks: nvidia-smi names them";
    }
    findings.push_back(std::move(finding));
  }
  return findings;
}

std::uint64_t AvailableHostBytes() {
  std::ifstream file("/proc/meminfo");
  std::string name, unit;
  for (std::uint64_t kib = 0; file >> name >> kib && std::getline(file, unit);) {
    if (name == "MemAvailable:") return kib * kKiB;
  }
  return 0;
}

Finding LookAtHostMemory() {
  const std::uint64_t available_bytes = AvailableHostBytes();
  Finding finding{"host_memory", Grade::kOk, FormatBytes(available_bytes) + " available"};
  if (available_bytes < kLeastHostBytes) {
    finding.grade = Grade::kWarning;
    finding.advice = absl::StrCat("Loading weights and layer inputs want ", FormatBytes(kLeastHostBytes), " or more");
  }
  return finding;
}

Finding LookAtPageLock(bool has_gpu) {
  rlimit limit{};
  ::getrlimit(RLIMIT_MEMLOCK, &limit);
  if (limit.rlim_cur == RLIM_INFINITY) return {"page_lock", Grade::kOk, "RLIMIT_MEMLOCK unlimited"};
  Finding finding{"page_lock", Grade::kOk, absl::StrCat("RLIMIT_MEMLOCK ", FormatBytes(limit.rlim_cur))};
  if (has_gpu) {
    finding.grade = Grade::kWarning;
    finding.advice = "Layer inputs are page-locked: LimitMEMLOCK=infinity in the unit, or ulimit -l unlimited";
  }
  return finding;
}

// --- Daemons and ports ---

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;
  int port = 0;
};
// nullopt: not HOST:PORT, or the host is not known.
std::optional<SocketAddress> Resolve(const std::string& address) {
  const std::size_t colon = address.rfind(':');
  SocketAddress resolved;
  if (colon == address.npos || !absl::SimpleAtoi(address.substr(colon + 1), &resolved.port)) return std::nullopt;
  std::string host = address.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), address.c_str() + colon + 1, &hints, &found) != 0) return std::nullopt;
  std::memcpy(&resolved.storage, found->ai_addr, found->ai_addrlen);
  resolved.size = found->ai_addrlen;
  ::freeaddrinfo(found);
  return resolved;
}

// 0, or the errno of listening there.
int TryToListen(const SocketAddress& address) {
  const UniqueFd fd(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int one = 1;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
  const auto* generic = reinterpret_cast<const sockaddr*>(&address.storage);
  return ::bind(fd.get(), generic, address.size) == 0 && ::listen(fd.get(), 1) == 0 ? 0 : errno;
}

// "nginx (pid 7)", or what else is known of who listens.
std::string OwnerOfPort(int port) {
  std::string inode, uid;
  for (const char* table : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream file(table);
    for (std::string line; std::getline(file, line);) {
      const std::vector<std::string> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
      constexpr char kListening[] = "0A";
      if (words.size() > 9 && words[3] == kListening && absl::EndsWith(words[1], absl::StrFormat(":%04X", port))) {
        uid = words[7];
        inode = words[9];
      }
    }
  }
  std::error_code error;
  for (const auto& process : fs::directory_iterator("/proc", error)) {
    std::error_code ignored;
    for (fs::directory_iterator file(process.path() / "fd", ignored), end; !ignored && file != end; file.increment(ignored)) {
      std::error_code gone;
      if (fs::read_symlink(file->path(), gone) != "socket:[" + inode + "]") continue;
      std::string name;
      std::getline(std::ifstream(process.path() / "comm"), name);
      return absl::StrCat(name, " (pid ", process.path().filename().string(), ")");
    }
  }
  return inode.empty() ? "a socket that was bound and does not listen" : absl::StrCat("a process of user ", uid);
}

// What GET `path` answers; empty: nothing that speaks HTTP answers within kCallLimit.
std::string HttpAnswer(const SocketAddress& address, const std::string& path) {
  const UniqueFd fd(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const timeval limit = absl::ToTimeval(kCallLimit);
  ::setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  ::setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address.storage), address.size) != 0) return "";
  const std::string request = absl::StrCat("GET ", path, " HTTP/1.0\r\nHost: localhost\r\n\r\n");
  if (::send(fd.get(), request.data(), request.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(request.size())) return "";
  std::string answer;
  const MonotonicTime deadline = MonotonicTime::Now() + kCallLimit;
  while (MonotonicTime::Now() < deadline && answer.size() < kMaxAnswerBytes) {
    std::array<char, 65536> piece;
    const ssize_t got = ::recv(fd.get(), piece.data(), piece.size(), 0);
    if (got <= 0) break;
    answer.append(piece.data(), static_cast<std::size_t>(got));
  }
  return answer;
}

// Of the daemon that serves the page; nullopt: none of ours.
std::optional<std::string> VersionIn(const std::string& page) {
  constexpr char kBegin[] = "\ntandem_build_info{version=\"";
  const std::size_t begin = page.find(kBegin);
  if (begin == page.npos) return std::nullopt;
  const std::size_t from = begin + sizeof(kBegin) - 1;
  return page.substr(from, page.find('"', from) - from);
}

struct Daemon {
  std::string program;
  std::string address;
  std::string metrics_address;
  std::string model = "";  // with is_running
  bool is_running = false;
  absl::Status reached = absl::OkStatus();
};

Finding PortFinding(const std::string& check, const std::string& address, const std::string& flag) {
  const std::optional<SocketAddress> resolved = Resolve(address);
  if (!resolved.has_value()) return {check, Grade::kFault, address + " is no address", "Give HOST:PORT"};
  if (IsRemoteAddress(address)) return {check, Grade::kOk, address + " is not of this node and does not answer"};
  const int error = TryToListen(*resolved);
  if (error == 0) return {check, Grade::kOk, absl::StrCat("not running; ", address, " is free")};
  if (error != EADDRINUSE)
    return {check, Grade::kFault, absl::StrCat("listening at ", address, ": ", std::strerror(error)),
            absl::StrCat("Give the daemon another ", flag)};
  const std::string owner = OwnerOfPort(resolved->port);
  if (absl::StartsWith(owner, "rollout_server") || absl::StartsWith(owner, "trainer_server"))
    return {check, Grade::kWarning, absl::StrCat(address, " is held by ", owner, ", which does not answer"),
            "It starts, stops or hangs: see its log"};
  return {check, Grade::kFault, absl::StrCat(address, " is used by ", owner),
          absl::StrCat("Stop that, or give the daemon another ", flag)};
}

// The daemon and its two ports.
std::vector<Finding> LookAtDaemon(const Daemon& daemon) {
  std::vector<Finding> findings;
  std::string version = "not known";
  const std::string metrics_check = absl::StrCat(daemon.program.substr(0, daemon.program.find('_')), "_metrics");
  const std::optional<SocketAddress> metrics = Resolve(daemon.metrics_address);
  const std::optional<std::string> served = metrics.has_value() ? VersionIn(HttpAnswer(*metrics, "/metrics")) : std::nullopt;
  if (served.has_value()) {
    version = *served;
    findings.push_back({metrics_check, Grade::kOk, absl::StrCat("served at ", daemon.metrics_address)});
  } else {
    findings.push_back(PortFinding(metrics_check, daemon.metrics_address, "--metrics"));
  }
  Finding finding;
  if (daemon.is_running) {
    finding = {daemon.program, Grade::kOk,
               absl::StrCat("answers at ", daemon.address, ", version ", version, ", model ", daemon.model)};
    if (served.has_value() && version != TANDEM_VERSION) {
      finding.grade = Grade::kWarning;
      finding.advice = absl::StrCat("This command is ", TANDEM_VERSION, ": bring all three to one version");
    }
  } else if (absl::IsUnauthenticated(daemon.reached) || absl::IsPermissionDenied(daemon.reached)) {
    finding = {daemon.program, Grade::kWarning,
               absl::StrCat("answers at ", daemon.address, ", version ", version, ": ", std::string(daemon.reached.message())),
               "Give --token_file or --cert and --key"};
  } else {
    finding = PortFinding(daemon.program, daemon.address, "--listen");
  }
  findings.insert(findings.begin(), std::move(finding));
  return findings;
}

// The live page of the trainer.
Finding LookAtPage(const Daemon& trainer, const std::string& address) {
  const std::string check = "live_page";
  const std::optional<SocketAddress> page = Resolve(address);
  if (page.has_value()) {
    // Over TLS its owner has to tell.
    const bool is_ours = HttpAnswer(*page, "/").find("<title>Tandem</title>") != std::string::npos ||
                         (trainer.is_running && absl::StartsWith(OwnerOfPort(page->port), "trainer_server"));
    if (is_ours) return {check, Grade::kOk, absl::StrCat("served at ", address)};
  }
  return PortFinding(check, address, "--http_address");
}

template <typename Status, typename Call>
void Ask(Connection connection, const std::string& run_dir, Daemon* daemon, std::string Connection::*address, Call call) {
  const auto ask = [&] {
    const auto context = connection.Context();
    Status status;
    daemon->reached = FromGrpc(call(connection, context.get(), &status));
    daemon->is_running = daemon->reached.ok();
    if (!daemon->is_running) return;
    daemon->address = connection.*address;
    daemon->model = status.model();
  };
  ask();
  // One that wants TLS or a token is asked over its socket, by those who may enter the folder.
  const std::string socket = absl::StrCat(run_dir, "/", daemon->program, ".grpc");
  if (daemon->is_running || ::access(socket.c_str(), W_OK) != 0) return;
  const absl::Status first = daemon->reached;
  connection.*address = "unix:" + socket;
  connection.security = {};
  ask();
  if (!daemon->is_running) daemon->reached = first;
}

std::pair<Daemon, Daemon> AskDaemons(Connection connection, const DoctorOptions& options) {
  connection.timeout = std::min(connection.timeout, kCallLimit);
  Daemon rollout{"rollout_server", connection.rollout_address, options.rollout_metrics};
  Daemon trainer{"trainer_server", connection.trainer_address, options.trainer_metrics};
  Ask<v1::RolloutStatus>(connection, options.run_dir, &rollout, &Connection::rollout_address,
                         [](const Connection& to, grpc::ClientContext* context, v1::RolloutStatus* status) {
                           return to.Rollout()->GetStatus(context, v1::RolloutStatusRequest(), status);
                         });
  Ask<v1::TrainerStatus>(connection, options.run_dir, &trainer, &Connection::trainer_address,
                         [](const Connection& to, grpc::ClientContext* context, v1::TrainerStatus* status) {
                           return to.Trainer()->GetStatus(context, v1::TrainerStatusRequest(), status);
                         });
  return {rollout, trainer};
}

// --- Folders ---

std::string EnvironmentOr(const char* name, const std::string& fallback) {
  const char* const value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : fallback;
}

// Of what a daemon would make `path` in.
std::string NearestThatExists(const std::string& path) {
  std::error_code error;
  fs::path nearest = fs::absolute(path, error);
  while (!fs::exists(nearest, error) && nearest != nearest.parent_path()) nearest = nearest.parent_path();
  return nearest.string();
}

Finding LookAtFolder(const std::string& check, const std::string& path, bool is_private) {
  const std::string nearest = NearestThatExists(path);
  const std::string user = absl::StrCat("user ", ::geteuid());
  struct stat stat {};
  std::error_code error;
  if (::stat(nearest.c_str(), &stat) != 0 || !S_ISDIR(stat.st_mode))
    return {check, Grade::kFault, absl::StrCat(path, ": ", nearest, " is no folder"), absl::StrCat("Give another --", check)};
  const bool is_there = fs::equivalent(nearest, path, error);
  if (::access(nearest.c_str(), W_OK | X_OK) != 0)
    return {check, Grade::kFault, absl::StrCat(path, ": ", user, " cannot write to ", nearest, ": ", std::strerror(errno)),
            absl::StrCat("Make it for the daemons' user (and run this as that user): install -d -m 700 -o USER ", path)};
  if (is_there && is_private && (stat.st_uid != ::geteuid() || (stat.st_mode & (S_IWGRP | S_IWOTH)) != 0))
    return {check, Grade::kFault,
            absl::StrFormat("%s belongs to user %d, mode %o; it must be %s's, and writable by nobody else", path, stat.st_uid,
                            stat.st_mode & 07777, user),
            absl::StrCat("chown and chmod 700 ", path, ", or give another --", check)};
  return {check, Grade::kOk, absl::StrCat(path, is_there ? " is writable" : " is made at the first start")};
}

Finding LookAtDisk(const std::string& path) {
  const std::string nearest = NearestThatExists(path);
  struct statvfs disk {};
  if (::statvfs(nearest.c_str(), &disk) != 0)
    return {"disk", Grade::kFault, absl::StrCat(nearest, ": ", std::strerror(errno)), "Give another --data_dir"};
  const std::uint64_t available_bytes = std::uint64_t{disk.f_bavail} * disk.f_frsize;
  Finding finding{"disk", Grade::kOk, absl::StrCat(FormatBytes(available_bytes), " available for ", path)};
  if (available_bytes < kAmpleDiskBytes) {
    const bool is_full = available_bytes < kLeastDiskBytes;
    finding.grade = is_full ? Grade::kFault : Grade::kWarning;
    finding.advice =
        absl::StrCat("Checkpoints that do not fit fail their job: have ",
                     FormatBytes(is_full ? kLeastDiskBytes : kAmpleDiskBytes), " free, or give --data_dir on another disk");
  }
  return finding;
}

// --- Programs ---

// Where the trainer looks.
std::string FindProgram(const std::string& name) {
  for (const char* folder : {"/usr/bin/", "/bin/", "/usr/local/bin/", "/usr/sbin/"}) {
    if (::access((folder + name).c_str(), X_OK) == 0) return folder + name;
  }
  return "";
}

Finding LookAtSandbox() {
  const std::string check = "bubblewrap";
  const std::string bubblewrap = FindProgram("bwrap");
  if (bubblewrap.empty()) return {check, Grade::kWarning, "no bwrap", absl::StrCat("apt-get install bubblewrap: ", kSandboxJobs)};
  for (const char* program : {"prlimit", "choom"}) {
    if (FindProgram(program).empty())
      return {check, Grade::kWarning, absl::StrCat("no ", program), absl::StrCat("apt-get install util-linux: ", kSandboxJobs)};
  }
  const ProgramEnd end = RunProgram({bubblewrap,
                                     "--unshare-user",
                                     "--unshare-ipc",
                                     "--unshare-pid",
                                     "--unshare-net",
                                     "--unshare-uts",
                                     "--disable-userns",
                                     "--uid",
                                     "65534",
                                     "--gid",
                                     "65534",
                                     "--die-with-parent",
                                     "--ro-bind",
                                     "/usr",
                                     "/usr",
                                     "--symlink",
                                     "usr/bin",
                                     "/bin",
                                     "--symlink",
                                     "usr/lib",
                                     "/lib",
                                     "--symlink",
                                     "usr/lib64",
                                     "/lib64",
                                     "--proc",
                                     "/proc",
                                     "--dev",
                                     "/dev",
                                     "--tmpfs",
                                     "/tmp",
                                     "--",
                                     "/usr/bin/true"});
  if (end.exit_code == 0) return {check, Grade::kOk, bubblewrap + " makes its namespaces"};
  return {check, Grade::kWarning, FirstLine(end.output),
          absl::StrCat("Allow user namespaces (operations.md, The reward sandbox): ", kSandboxJobs)};
}

Finding LookAtPython(const std::string& python) {
  const std::string check = "reward_python";
  if (python.empty() || python.front() != '/' || ::access(python.c_str(), X_OK) != 0)
    return {check, Grade::kWarning, absl::StrCat("'", python, "' is no program that can be run"),
            absl::StrCat("apt-get install python3, or give --reward_python an absolute path: ", kSandboxJobs)};
  const ProgramEnd end = RunProgram(
      {python, "-I", "-c", "import sys; print('%d.%d.%d' % sys.version_info[:3]); sys.exit(sys.version_info < (3, 9))"});
  if (end.exit_code == 0) return {check, Grade::kOk, absl::StrCat(python, ", ", FirstLine(end.output))};
  return {check, Grade::kWarning, absl::StrCat(python, ": ", FirstLine(end.output)),
          absl::StrCat("Python 3.9 or later is wanted: ", kSandboxJobs)};
}

// A daemon that prints its version has found all its libraries.
Finding LookAtLibTorch() {
  std::error_code error;
  const fs::path own = fs::read_symlink("/proc/self/exe", error);
  const fs::path program = own.parent_path().parent_path() / "bin" / "rollout_server";
  if (error || !fs::exists(program, error))
    return {"libtorch", Grade::kWarning, absl::StrCat("no ", program.string(), " to try"),
            "This installation is a client's: run doctor from the daemons'"};
  const ProgramEnd end = RunProgram({program.string(), "--version"});
  if (end.exit_code == 0) return {"libtorch", Grade::kOk, FirstLine(end.output) + " starts with its libraries"};
  return {"libtorch", Grade::kFault, OneLine(end.output), "Bring LibTorch as operations.md says, and name it by TANDEM_TORCH"};
}

}  // namespace

absl::Status Doctor(const Connection& connection, const Words& words, DoctorOptions options) {
  if (!words.empty()) return absl::InvalidArgumentError("usage: tandem doctor [--run_dir=DIR] [--data_dir=DIR]");
  if (options.run_dir.empty())
    options.run_dir = EnvironmentOr("XDG_RUNTIME_DIR", "").empty() ? absl::StrCat("/tmp/tandem-", ::getuid())
                                                                   : EnvironmentOr("XDG_RUNTIME_DIR", "") + "/tandem";
  if (options.data_dir.empty()) options.data_dir = EnvironmentOr("HOME", "/tmp") + "/.local/share/tandem";
  int num_faults = 0;
  const auto report = [&](const std::vector<Finding>& findings) {
    for (const Finding& finding : findings) {
      PrintFinding(finding, connection.json);
      if (finding.grade == Grade::kFault) ++num_faults;
    }
  };
  const auto [rollout, trainer] = AskDaemons(connection, options);
  const std::vector<Finding> driver = LookAtDriver(rollout.is_running || trainer.is_running);
  report(driver);
  report({LookAtHostMemory(), LookAtPageLock(driver.size() > 1), LookAtLibTorch()});
  report(LookAtDaemon(rollout));
  report(LookAtDaemon(trainer));
  if (options.http_address != "off") report({LookAtPage(trainer, options.http_address)});
  report({LookAtFolder("run_dir", options.run_dir, /*is_private=*/true),
          LookAtFolder("data_dir", options.data_dir, /*is_private=*/false), LookAtDisk(options.data_dir)});
  report({LookAtSandbox(), LookAtPython(options.reward_python)});
  if (num_faults == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(num_faults, num_faults == 1 ? " fault" : " faults"));
}

}  // namespace tandem
