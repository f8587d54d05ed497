#include "trainer_server/sandbox/sandbox.h"

#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "common/base/clock.h"

namespace tandem {
namespace {

constexpr char kNobody[] = "65534";  // user and group inside, and outside where this process is root
constexpr int kFirstFd = 3;
constexpr int kHighFd = 256;  // descriptors are made above, so that placing one overwrites none
constexpr absl::Duration kCheckLimit = absl::Seconds(10);

// Prints, a line each: where this Python's parts lie.
constexpr char kPartsProgram[] =
    "import os, sys, sysconfig\n"
    "if sys.version_info < (3, 9): sys.exit('it is Python %d.%d; 3.9 or later is wanted' % sys.version_info[:2])\n"
    "parts = [sys.executable, sys.prefix, sys.base_prefix, sysconfig.get_config_var('LIBDIR') or ''] + sys.path\n"
    "print(os.path.realpath(sys.executable))\n"
    "print('\\n'.join(p for p in parts if p and os.path.isabs(p) and os.path.exists(p)))\n";

constexpr std::uint32_t kRefusedCalls[] = {SYS_memfd_create,
                                           SYS_memfd_secret,
                                           SYS_shmget,
                                           SYS_shmat,
                                           SYS_semget,
                                           SYS_msgget,
                                           SYS_mq_open,
                                           SYS_io_uring_setup,
                                           SYS_ptrace,
                                           SYS_process_vm_readv,
                                           SYS_process_vm_writev,
                                           SYS_pidfd_getfd,
                                           SYS_userfaultfd,
                                           SYS_perf_event_open,
                                           SYS_bpf,
                                           SYS_keyctl,
                                           SYS_add_key,
                                           SYS_request_key,
                                           SYS_unshare,
                                           SYS_setns,
                                           SYS_mount,
                                           SYS_umount2,
                                           SYS_fsopen,
                                           SYS_move_mount,
                                           SYS_open_tree,
                                           SYS_pivot_root,
                                           SYS_open_by_handle_at,
                                           SYS_kcmp,
                                           SYS_fanotify_init,
                                           SYS_quotactl,
                                           SYS_personality};

// The filter as the kernel takes it: other architectures and kRefusedCalls get EPERM, clone3 (whose flags a filter cannot read)
// ENOSYS, so that libc takes clone, which gets EPERM where it asks for a user namespace. So does mmap of memory to be shared,
// which may outlive its mapping and is then in no process's account, and sockets of families that know no network namespace
// (AF_VSOCK) or hold memory of the kernel.
std::string SystemCallFilter() {
  std::vector<sock_filter> filter;
  const auto load = [&](std::size_t offset) {
    filter.push_back(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, static_cast<std::uint32_t>(offset)));
  };
  const auto refuse_if = [&](std::uint16_t test, std::uint32_t value, std::uint32_t error, bool refuses_match = true) {
    filter.push_back(BPF_JUMP(static_cast<std::uint16_t>(BPF_JMP | test | BPF_K), value,
                              static_cast<std::uint8_t>(refuses_match ? 0 : 1),
                              static_cast<std::uint8_t>(refuses_match ? 1 : 0)));
    filter.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error));
  };
  load(offsetof(seccomp_data, arch));
  refuse_if(BPF_JEQ, AUDIT_ARCH_X86_64, EPERM, false);
  load(offsetof(seccomp_data, nr));
  refuse_if(BPF_JGE, 0x40000000u, EPERM);  // the x32 calls
  for (const std::uint32_t call : kRefusedCalls) refuse_if(BPF_JEQ, call, EPERM);
  refuse_if(BPF_JEQ, SYS_clone3, ENOSYS);
  const auto refuse_argument = [&](std::uint32_t call, std::size_t argument, std::uint32_t mask, std::uint16_t test,
                                   std::uint32_t value) {
    filter.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 5));
    load(offsetof(seccomp_data, args) + argument * sizeof(std::uint64_t));
    filter.push_back(BPF_STMT(BPF_ALU | BPF_AND | BPF_K, mask));
    refuse_if(test, value, EPERM);
    filter.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  };
  constexpr std::uint32_t kSharedMemory = MAP_SHARED | MAP_ANONYMOUS;
  refuse_argument(SYS_clone, 0, CLONE_NEWUSER, BPF_JEQ, CLONE_NEWUSER);
  refuse_argument(SYS_mmap, 3, kSharedMemory, BPF_JEQ, kSharedMemory);
  refuse_argument(SYS_socket, 0, 0xffffffffu, BPF_JGT, AF_NETLINK);
  filter.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  return {reinterpret_cast<const char*>(filter.data()), filter.size() * sizeof(sock_filter)};
}

absl::Status SystemError(const std::string& what) {
  return absl::ResourceExhaustedError(absl::StrCat("sandbox: ", what, " failed: ", std::strerror(errno)));
}

// A sealed file in memory, at its beginning.
absl::StatusOr<UniqueFd> FileOf(const std::string& bytes) {
  const UniqueFd file(::memfd_create("tandem", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file.is_open()) return SystemError("memfd_create");
  for (std::size_t written = 0; written < bytes.size();) {
    const ssize_t got = ::write(file.get(), bytes.data() + written, bytes.size() - written);
    if (got < 0 && errno != EINTR) return SystemError("write");
    written += static_cast<std::size_t>(std::max<ssize_t>(got, 0));
  }
  if (::fcntl(file.get(), F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL) != 0 ||
      ::lseek(file.get(), 0, SEEK_SET) != 0) {
    return SystemError("sealing a file");
  }
  UniqueFd high(::fcntl(file.get(), F_DUPFD_CLOEXEC, kHighFd));
  if (!high.is_open()) return SystemError("fcntl");
  return high;
}

struct Ends {
  UniqueFd ours, theirs;
};
absl::StatusOr<Ends> Raised(int ours, int theirs) {
  Ends ends{UniqueFd(ours), UniqueFd(::fcntl(theirs, F_DUPFD_CLOEXEC, kHighFd))};
  ::close(theirs);
  if (!ends.theirs.is_open()) return SystemError("fcntl");
  return ends;
}
absl::StatusOr<Ends> MakePipe() {
  int fds[2];
  if (::pipe2(fds, O_CLOEXEC) != 0) return SystemError("pipe2");
  return Raised(fds[0], fds[1]);
}
absl::StatusOr<Ends> MakeChannel() {
  int fds[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0) return SystemError("socketpair");
  return Raised(fds[0], fds[1]);
}

// Starts a program with `fds` as its descriptors 0, 1, .., and no others.
absl::StatusOr<pid_t> Spawn(const std::vector<std::string>& command, const std::vector<int>& fds) {
  std::vector<char*> arguments;
  for (const std::string& argument : command) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  char* environment[] = {const_cast<char*>("PATH=/usr/bin:/bin"), const_cast<char*>("LC_ALL=C.UTF-8"), nullptr};
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  for (std::size_t i = 0; i < fds.size(); ++i) posix_spawn_file_actions_adddup2(&actions, fds[i], static_cast<int>(i));
  posix_spawn_file_actions_addclosefrom_np(&actions, static_cast<int>(fds.size()));
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none, defaults;
  sigemptyset(&none);
  sigemptyset(&defaults);
  for (const int signal : {SIGPIPE, SIGINT, SIGTERM, SIGHUP, SIGCHLD}) sigaddset(&defaults, signal);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setsigdefault(&attributes, &defaults);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSID);
  pid_t pid = -1;
  const int failed = ::posix_spawn(&pid, arguments[0], &actions, &attributes, arguments.data(), environment);
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  if (failed == 0) return pid;
  errno = failed;
  return SystemError("starting " + command[0]);
}

std::string FindProgram(const std::string& name) {
  for (const char* folder : {"/usr/bin/", "/bin/", "/usr/local/bin/", "/usr/sbin/"}) {
    if (::access((folder + name).c_str(), X_OK) == 0) return folder + name;
  }
  return "";
}

// Not of a container with users of its own, whose root is bound by limits as any user is.
bool IsRootOfTheNode() {
  std::ifstream map("/proc/self/uid_map");
  std::uint64_t inside = 1, outside = 1, count = 0;
  map >> inside >> outside >> count;
  return ::geteuid() == 0 && inside == 0 && outside == 0 && count == 0xffffffffu;
}

bool IsInside(const std::string& path, const std::string& folder) { return path == folder || path.starts_with(folder + "/"); }

}  // namespace

absl::StatusOr<std::shared_ptr<const Sandbox>> Sandbox::Create(const std::string& python) {
  std::shared_ptr<Sandbox> sandbox(new Sandbox);
  TANDEM_RETURN_IF_ERROR(sandbox->FindPrograms(python));
  TANDEM_RETURN_IF_ERROR(sandbox->FindPythonParts(python));
  TANDEM_RETURN_IF_ERROR(sandbox->TryOut());
  return std::shared_ptr<const Sandbox>(std::move(sandbox));
}

absl::Status Sandbox::FindPrograms(const std::string& python) {
  const bool is_root = IsRootOfTheNode();
  for (const auto& [name, place] : {std::pair("bwrap", &bubblewrap_), std::pair("prlimit", &prlimit_),
                                    std::pair("choom", &choom_), std::pair("setpriv", &setpriv_)}) {
    if (place == &setpriv_ && !is_root) continue;
    *place = FindProgram(name);
    if (!place->empty()) continue;
    return absl::FailedPreconditionError(absl::StrCat("the reward sandbox needs the program ", name, ", which this node lacks: ",
                                                      place == &bubblewrap_ ? "install bubblewrap" : "install util-linux"));
  }
  if (python.empty() || python.front() != '/' || ::access(python.c_str(), X_OK) != 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "--reward_python: '", python, "' is no program that can be run; give the absolute path of a Python, 3.9 or later"));
  }
  return absl::OkStatus();
}

absl::Status Sandbox::FindPythonParts(const std::string& python) {
  TANDEM_ASSIGN_OR_RETURN(Ends output, MakePipe());
  TANDEM_ASSIGN_OR_RETURN(Ends errors, MakePipe());
  TANDEM_ASSIGN_OR_RETURN(const UniqueFd input, FileOf(""));
  TANDEM_ASSIGN_OR_RETURN(const pid_t pid,
                          Spawn({python, "-I", "-c", kPartsProgram}, {input.get(), output.theirs.get(), errors.theirs.get()}));
  output.theirs.Close();
  errors.theirs.Close();
  SandboxedProcess process(pid, {UniqueFd(), std::move(output.ours), std::move(errors.ours)},
                           {.memory_bytes = std::uint64_t{1} << 40});
  std::string text;
  const PumpEnd end =
      process.Run({.input = {}, .is_done = {}, .deadline = MonotonicTime::Now() + kCheckLimit, .is_interrupted = {}}, &text);
  if (end != PumpEnd::kExited || process.ExitCode() != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("--reward_python: ", python,
                     " cannot be used: ", end == PumpEnd::kExited ? process.error_tail() : "it gave no answer in 10 s"));
  }
  std::vector<std::string> parts = absl::StrSplit(text, '\n', absl::SkipEmpty());
  if (parts.empty())
    return absl::FailedPreconditionError(absl::StrCat("--reward_python: ", python, " does not say where it lies"));
  python_ = python;
  // Both as it was named and as it lies: virtual environments are links.
  const std::vector<std::string> named = parts;
  for (const std::string& part : named) {
    std::error_code error;
    const std::filesystem::path real = std::filesystem::canonical(part, error);
    if (!error) parts.push_back(real.string());
  }
  parts.push_back(python);
  std::ranges::sort(parts);  // folders before what is in them
  for (const std::string& part : parts) {
    const bool is_covered = IsInside(part, "/usr") || IsInside(part, "/bin") || IsInside(part, "/lib") || part == "/" ||
                            std::ranges::any_of(python_parts_, [&](const std::string& have) { return IsInside(part, have); });
    if (!is_covered) python_parts_.push_back(part);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<SandboxedProcess>> Sandbox::Start(const SandboxCommand& command) const {
  std::vector<UniqueFd> kept;
  std::vector<int> fds;
  Ends channel;
  if (command.input.has_value()) {
    TANDEM_ASSIGN_OR_RETURN(channel.theirs, FileOf(*command.input));
  } else {
    TANDEM_ASSIGN_OR_RETURN(channel, MakeChannel());
  }
  TANDEM_ASSIGN_OR_RETURN(Ends output, MakePipe());
  TANDEM_ASSIGN_OR_RETURN(Ends errors, MakePipe());
  fds = {channel.theirs.get(), output.theirs.get(), errors.theirs.get()};

  // The first to go when the node is out of memory.
  std::vector<std::string> words = {choom_, "-n", "1000", "--"};
  const auto add = [&](std::initializer_list<std::string> more) { words.insert(words.end(), more); };
  // Root is not bound by the limit on processes.
  if (!setpriv_.empty()) add({setpriv_, "--reuid", kNobody, "--regid", kNobody, "--clear-groups"});
  add({bubblewrap_, "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try",
       "--disable-userns", "--uid", kNobody, "--gid", kNobody, "--hostname", "sandbox", "--die-with-parent", "--new-session",
       "--clearenv"});
  for (const auto& [name, value] :
       {std::pair("PATH", "/usr/bin:/bin"), std::pair("HOME", "/tmp"), std::pair("USER", "nobody"),
        std::pair("LC_ALL", "C.UTF-8"), std::pair("OMP_NUM_THREADS", "1"), std::pair("OPENBLAS_NUM_THREADS", "1"),
        std::pair("PYTHONDONTWRITEBYTECODE", "1"), std::pair("PYTHONHASHSEED", "0"), std::pair("CUDA_VISIBLE_DEVICES", "")}) {
    add({"--setenv", name, value});
  }
  add({"--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev"});
  // The first process: who could write to its memory could let it outlive its parent.
  add({"--size", "4096", "--perms", "0555", "--tmpfs", "/proc/1", "--remount-ro", "/proc/1"});
  // What is bound without --dev-bind cannot be opened: /dev/zero, mapped, is memory to be shared.
  add({"--ro-bind", "/dev/null", "/dev/zero", "--remount-ro", "/dev"});
  for (const char* folder : {"bin", "sbin", "lib", "lib32", "lib64"})
    add({"--symlink", absl::StrCat("usr/", folder), absl::StrCat("/", folder)});
  for (const char* file : {"/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime"}) add({"--ro-bind-try", file, file});
  add({"--size", absl::StrCat(command.scratch_bytes), "--tmpfs", "/tmp"});
  for (const std::string& part : python_parts_) add({"--ro-bind", part, part});
  for (const SandboxFile& file : command.files) {
    TANDEM_ASSIGN_OR_RETURN(UniqueFd fd, FileOf(file.bytes));
    add({"--perms", "0444", "--ro-bind-data", absl::StrCat(kFirstFd + kept.size()), file.path});
    fds.push_back(fd.get());
    kept.push_back(std::move(fd));
  }
  static const std::string filter = SystemCallFilter();
  TANDEM_ASSIGN_OR_RETURN(const UniqueFd filter_fd, FileOf(filter));
  fds.push_back(filter_fd.get());
  add({"--seccomp", absl::StrCat(kFirstFd + kept.size()), "--chdir", "/tmp", "--remount-ro", "/", "--"});
  // The limits are set within, by the last program before Python: bubblewrap itself needs none of them.
  const auto limit = [&](const char* name, std::uint64_t value) { add({absl::StrCat("--", name, "=", value, ":", value)}); };
  add({prlimit_});
  limit("as", command.memory_bytes);
  limit("nproc", static_cast<std::uint64_t>(command.max_processes));
  limit("nofile", static_cast<std::uint64_t>(command.max_files));
  limit("fsize", command.scratch_bytes);
  limit("core", 0);
  limit("memlock", 0);
  limit("msgqueue", 0);
  if (command.cpu_time != absl::InfiniteDuration()) {
    limit("cpu", static_cast<std::uint64_t>(absl::ToInt64Seconds(absl::Ceil(command.cpu_time, absl::Seconds(1)))));
  }
  add({"--", python_});
  words.insert(words.end(), command.arguments.begin(), command.arguments.end());

  TANDEM_ASSIGN_OR_RETURN(const pid_t pid, Spawn(words, fds));
  return std::make_unique<SandboxedProcess>(
      pid, SandboxedProcess::Pipes{std::move(channel.ours), std::move(output.ours), std::move(errors.ours)},
      SandboxedProcess::MemoryLimits{command.memory_bytes, command.scratch_bytes});
}

absl::Status Sandbox::TryOut() const {
  SandboxCommand command{.arguments = {"-I", "-c", "print('ready')"}, .files = {}, .input = ""};
  command.memory_bytes = std::uint64_t{1} << 30;
  TANDEM_ASSIGN_OR_RETURN(const std::unique_ptr<SandboxedProcess> process, Start(command));
  std::string output;
  const PumpEnd end =
      process->Run({.input = {}, .is_done = {}, .deadline = MonotonicTime::Now() + kCheckLimit, .is_interrupted = {}}, &output);
  const int code = end == PumpEnd::kExited ? process->ExitCode() : -1;
  if (code == 0 && output == "ready\n") return absl::OkStatus();
  const std::string said = process->error_tail();
  std::string hint;
  if (absl::StrContains(said, "namespace")) {
    hint =
        ": this node lets nobody make user namespaces; set the sysctl user.max_user_namespaces (and "
        "kernel.unprivileged_userns_clone, or "
        "kernel.apparmor_restrict_unprivileged_userns=0, where there is one), or allow them to this container";
  } else if (absl::StrContains(said, "Permission denied") && !setpriv_.empty()) {
    hint = ": as root, trainer_server runs the sandbox as user 65534, who must be able to read --reward_python";
  }
  return absl::FailedPreconditionError(absl::StrCat("the reward sandbox does not start on this node: ",
                                                    said.empty() ? absl::StrCat("code ", code, " without a word") : said, hint));
}

absl::StatusOr<std::shared_ptr<const Sandbox>> SandboxSource::Get() {
  MutexLock lock(&mutex_);
  if (sandbox_ == nullptr) { TANDEM_ASSIGN_OR_RETURN(sandbox_, Sandbox::Create(python_)); }
  return sandbox_;
}

}  // namespace tandem
