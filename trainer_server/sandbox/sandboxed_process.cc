#include "trainer_server/sandbox/sandboxed_process.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
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

void AppendChildren(pid_t pid, std::vector<pid_t>* processes) {
  std::ifstream children(absl::StrCat("/proc/", pid, "/task/", pid, "/children"));
  for (pid_t child = 0; children >> child;) processes->push_back(child);
}

}  // namespace

SandboxedProcess::SandboxedProcess(pid_t pid, Pipes pipes, std::uint64_t memory_bytes)
    : pid_(pid),
      pipes_(std::move(pipes)),
      memory_bytes_(memory_bytes),
      exit_(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))) {
  for (const UniqueFd* fd : {&pipes_.input, &pipes_.output, &pipes_.errors}) {
    if (fd->is_open()) SetNonBlocking(fd->get());
  }
}

SandboxedProcess::~SandboxedProcess() { Kill(); }

void SandboxedProcess::Kill() noexcept {
  if (wait_status_ >= 0) return;
  ::kill(pid_, SIGKILL);
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
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < processes.size() && i < kMaxProcessesLookedAt; ++i) {
    bytes += AnonymousBytes(processes[i]);
    AppendChildren(processes[i], &processes);
  }
  return bytes > memory_bytes_;
}

PumpEnd SandboxedProcess::Run(const Pump& pump, std::string* output) {
  std::string_view input = pump.input;
  error_bytes_ = 0;
  absl::Time next_tick = absl::Now();
  while (true) {
    if (pump.is_done && pump.is_done(*output)) return PumpEnd::kDone;
    if (output->size() > pump.max_output_bytes || error_bytes_ > pump.max_error_bytes) return PumpEnd::kOutputLimit;
    const absl::Time now = absl::Now();
    if (now >= pump.deadline) return PumpEnd::kTimeLimit;
    if (now >= next_tick) {
      if (pump.is_interrupted && pump.is_interrupted()) return PumpEnd::kInterrupted;
      if (HoldsTooMuch()) return PumpEnd::kMemoryLimit;
      next_tick = now + kTick;
    }
    // Where a process closes its output but lives on, its end is waited for.
    const bool writes = !input.empty() && pipes_.input.is_open();
    pollfd polled[] = {{pipes_.output.is_open() ? pipes_.output.get() : exit_.get(), POLLIN, 0},
                       {pipes_.errors.is_open() ? pipes_.errors.get() : -1, POLLIN, 0},
                       {writes ? pipes_.input.get() : -1, POLLOUT, 0}};
    const absl::Duration wait = std::min(next_tick, pump.deadline) - now;
    const int ready = ::poll(polled, std::size(polled), static_cast<int>(absl::ToInt64Milliseconds(wait)) + 1);
    if (ready <= 0) continue;
    if (polled[0].revents != 0) {
      if (!pipes_.output.is_open()) {
        while (pipes_.errors.is_open() && error_bytes_ <= pump.max_error_bytes && ReadErrors()) {}
        return PumpEnd::kExited;
      }
      char buffer[64 << 10];
      const ssize_t got = ::read(pipes_.output.get(), buffer, sizeof(buffer));
      if (got > 0) output->append(buffer, static_cast<std::size_t>(got));
      if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) pipes_.output.Close();
    }
    if (polled[1].revents != 0 && !ReadErrors()) pipes_.errors.Close();  // poll said that there was something: its end
    if (polled[2].revents != 0) {
      const ssize_t sent = ::send(pipes_.input.get(), input.data(), input.size(), MSG_NOSIGNAL);
      if (sent > 0) input.remove_prefix(static_cast<std::size_t>(sent));
      if (sent < 0 && errno != EAGAIN && errno != EINTR) pipes_.input.Close();  // its end shows in the output
    }
  }
}

int SandboxedProcess::ExitCode() {
  pollfd exited = {exit_.get(), POLLIN, 0};
  if (wait_status_ < 0 && ::poll(&exited, 1, 1000) > 0) {
    while (::waitpid(pid_, &wait_status_, 0) < 0 && errno == EINTR) {}
    wait_status_ = std::max(wait_status_, 0);
  }
  Kill();
  return WIFSIGNALED(wait_status_) ? 128 + WTERMSIG(wait_status_) : WEXITSTATUS(wait_status_);
}

std::string SandboxedProcess::error_tail() const { return std::string(absl::StripAsciiWhitespace(error_tail_)); }

}  // namespace tandem
