#include "trainer_server/sandbox/sandboxed_process.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "common/base/clock.h"
#include "common/base/status.h"

namespace tandem {
namespace {

constexpr absl::Duration kTick = absl::Milliseconds(100);  // between looks at memory and interruption
constexpr std::size_t kErrorTailBytes = 4 << 10;
constexpr std::size_t kMaxProcessesLookedAt = 4096;

void SetNonBlocking(int fd) { ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK); }

// Memory of a process that no file backs. One that ends meanwhile has none.
std::uint64_t AnonymousBytes(pid_t pid) {
  std::ifstream statm(absl::StrCat("/proc/", pid, "/statm"));
  std::uint64_t size = 0, resident = 0, shared = 0;
  if (!(statm >> size >> resident >> shared)) return 0;
  return (resident - std::min(resident, shared)) * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

// What a process sees as /tmp: its bytes, and a share for each file. None where it is not the sandbox's own of that size, as
// while the sandbox is being made, or cannot be seen.
std::uint64_t UsedScratchBytes(pid_t pid, std::uint64_t scratch_bytes) {
  constexpr std::uint64_t kFileBytes = 1024;  // of the kernel's memory
  struct statvfs scratch {};
  if (::statvfs(absl::StrCat("/proc/", pid, "/root", "/tmp").c_str(), &scratch) != 0) return 0;
  if (scratch.f_blocks * scratch.f_bsize != scratch_bytes) return 0;
  return (scratch.f_blocks - scratch.f_bfree) * scratch.f_bsize + (scratch.f_files - scratch.f_ffree) * kFileBytes;
}

// Of all its threads: the kernel lists a child with the thread that made it.
void AppendChildren(pid_t pid, std::vector<pid_t>* processes) {
  std::error_code error;
  std::filesystem::directory_iterator thread(absl::StrCat("/proc/", pid, "/task"), error);
  for (; !error && thread != std::filesystem::directory_iterator(); thread.increment(error)) {
    std::ifstream children(thread->path() / "children");
    for (pid_t child = 0; children >> child;) processes->push_back(child);
  }
}

}  // namespace

SandboxedProcess::SandboxedProcess(pid_t pid, Pipes pipes, MemoryLimits limits)
    : pid_(pid), pipes_(std::move(pipes)), limits_(limits), exit_(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))) {
  for (const UniqueFd* fd : {&pipes_.input, &pipes_.output, &pipes_.errors}) {
    if (fd->is_open()) SetNonBlocking(fd->get());
  }
}

SandboxedProcess::~SandboxedProcess() { Kill(); }

// Its group too: while a sandbox is being made, what will be its first process does not die with its parent yet.
void SandboxedProcess::Kill() noexcept {
  if (wait_status_ >= 0) return;
  ::kill(-pid_, SIGKILL);
  while (::waitpid(pid_, &wait_status_, 0) < 0 && errno == EINTR) {}
  wait_status_ = std::max(wait_status_, 0);
}

bool SandboxedProcess::ReadErrors() {
  char buffer[64 << 10];
  const ssize_t got = ::read(pipes_.errors.get(), buffer, sizeof(buffer));
  if (got <= 0) return false;
  error_bytes_ += static_cast<std::size_t>(got);
  error_tail_.append(buffer, static_cast<std::size_t>(got));
  if (error_tail_.size() > kErrorTailBytes) error_tail_.erase(0, error_tail_.size() - kErrorTailBytes);
  return true;
}

// Forks share pages: a page counts for each, so that the figure is never below what is held.
bool SandboxedProcess::HoldsTooMuch() const {
  std::vector<pid_t> processes = {pid_};
  std::uint64_t bytes = 0, scratch_bytes = 0;
  for (std::size_t i = 0; i < processes.size() && i < kMaxProcessesLookedAt; ++i) {
    bytes += AnonymousBytes(processes[i]);
    if (scratch_bytes == 0) scratch_bytes = UsedScratchBytes(processes[i], limits_.scratch_bytes);
    AppendChildren(processes[i], &processes);
  }
  return bytes + scratch_bytes > limits_.memory_bytes;
}

PumpEnd SandboxedProcess::Run(const Pump& pump, std::string* output) {
  std::string_view input = pump.input;
  error_bytes_ = 0;
  bool has_exited = false;
  MonotonicTime next_tick = MonotonicTime::Now();
  while (true) {
    if (pump.is_done && pump.is_done(*output)) return PumpEnd::kDone;
    if (output->size() > pump.max_output_bytes || error_bytes_ > pump.max_error_bytes) return PumpEnd::kOutputLimit;
    const MonotonicTime now = MonotonicTime::Now();
    if (now >= pump.deadline) return PumpEnd::kTimeLimit;
    if (now >= next_tick) {
      if (pump.is_interrupted && pump.is_interrupted()) return PumpEnd::kInterrupted;
      if (HoldsTooMuch()) return PumpEnd::kMemoryLimit;
      next_tick = now + kTick;
    }
    // After its end, what it left in its pipes is read without waiting for more.
    const auto fd_of = [](bool is_polled, const UniqueFd& fd) { return is_polled && fd.is_open() ? fd.get() : -1; };
    pollfd polled[] = {{fd_of(true, pipes_.output), POLLIN, 0},
                       {fd_of(true, pipes_.errors), POLLIN, 0},
                       {fd_of(!input.empty(), pipes_.input), POLLOUT, 0},
                       {fd_of(!has_exited, exit_), POLLIN, 0}};
    const absl::Duration wait = std::min(next_tick, pump.deadline) - now;
    const int ready = ::poll(polled, std::size(polled), has_exited ? 0 : static_cast<int>(absl::ToInt64Milliseconds(wait)) + 1);
    if (ready <= 0) {
      if (has_exited) return PumpEnd::kExited;
      continue;
    }
    if (polled[0].revents != 0) {
      char buffer[64 << 10];
      const ssize_t got = ::read(pipes_.output.get(), buffer, sizeof(buffer));
      if (got > 0) output->append(buffer, static_cast<std::size_t>(got));
      if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) pipes_.output.Close();
    }
    if (polled[1].revents != 0 && !ReadErrors()) pipes_.errors.Close();
    if (polled[2].revents != 0) {
      const ssize_t sent = ::send(pipes_.input.get(), input.data(), input.size(), MSG_NOSIGNAL);
      if (sent > 0) input.remove_prefix(static_cast<std::size_t>(sent));
      if (sent < 0 && errno != EAGAIN && errno != EINTR) pipes_.input.Close();  // its end shows soon
    }
    has_exited = has_exited || polled[3].revents != 0;
  }
}

bool SandboxedProcess::is_alive() const {
  pollfd exited = {exit_.get(), POLLIN, 0};
  return wait_status_ < 0 && ::poll(&exited, 1, 0) == 0;
}

int SandboxedProcess::ExitCode() {
  pollfd exited = {exit_.get(), POLLIN, 0};
  if (wait_status_ < 0) ::poll(&exited, 1, 1000);
  Kill();
  return WIFSIGNALED(wait_status_) ? 128 + WTERMSIG(wait_status_) : WEXITSTATUS(wait_status_);
}

std::string SandboxedProcess::error_tail() const { return std::string(absl::StripAsciiWhitespace(error_tail_)); }

}  // namespace tandem
