#include "tests/common/sharing/pool_process.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "absl/time/clock.h"
#include "common/base/check.h"
#include "common/base/clock.h"

namespace tandem::testing {

PoolProcess::PoolProcess(const PoolProcessOptions& options) {
  // Beside the test that starts it, wherever the build folder has been taken.
  const std::string program = std::filesystem::read_symlink("/proc/self/exe").parent_path() / "tandem_pool_process";
  std::vector<std::string> words = {program,
                                    absl::StrCat("role=", static_cast<int>(options.role)),
                                    "run_dir=" + options.run_dir,
                                    "listen=" + options.listen,
                                    "peer=" + options.peer,
                                    "model=" + options.model,
                                    "chunk_bytes=" + options.chunk_bytes};
  words.insert(words.end(), options.more.begin(), options.more.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  int in[2], out[2];
  TANDEM_CHECK(::pipe2(in, O_CLOEXEC) == 0 && ::pipe2(out, O_CLOEXEC) == 0, "pipe2");
  pid_ = ::fork();
  TANDEM_CHECK(pid_ >= 0, "fork");
  if (pid_ == 0) {
    ::dup2(in[0], STDIN_FILENO);
    ::dup2(out[1], STDOUT_FILENO);
    ::execv(argv[0], argv.data());
    ::_exit(127);
  }
  ::close(in[0]);
  ::close(out[1]);
  commands_ = UniqueFd(in[1]);
  answers_ = UniqueFd(out[0]);
}

std::string PoolProcess::ReadLine(absl::Duration timeout) {
  const MonotonicTime deadline = MonotonicTime::Now() + timeout;
  for (;;) {
    if (const std::size_t end = unread_.find('\n'); end != std::string::npos) {
      std::string line = unread_.substr(0, end);
      unread_.erase(0, end + 1);
      return line;
    }
    pollfd entry{.fd = answers_.get(), .events = POLLIN, .revents = 0};
    const auto left = std::max<std::int64_t>(absl::ToInt64Milliseconds(deadline - MonotonicTime::Now()), 0);
    if (::poll(&entry, 1, static_cast<int>(left)) <= 0) return "";
    char text[4096];
    const ssize_t size = ::read(answers_.get(), text, sizeof text);
    if (size <= 0) return "";
    unread_.append(text, static_cast<std::size_t>(size));
  }
}

void PoolProcess::Send(const std::string& command) {
  const std::string line = command + "\n";
  [[maybe_unused]] const ssize_t written = ::write(commands_.get(), line.data(), line.size());  // dead: ReadLine says so
}

std::string PoolProcess::Ask(const std::string& command, absl::Duration timeout) {
  Send(command);
  return ReadLine(timeout);
}

void PoolProcess::Signal(int signal) {
  if (pid_ > 0) ::kill(pid_, signal);
}

void PoolProcess::Kill() {
  if (pid_ <= 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

int PoolProcess::Wait(absl::Duration timeout) {
  const MonotonicTime deadline = MonotonicTime::Now() + timeout;
  while (pid_ > 0) {
    int status = 0;
    if (::waitpid(pid_, &status, WNOHANG) == pid_) {
      pid_ = -1;
      return status;
    }
    if (MonotonicTime::Now() > deadline) return -1;
    absl::SleepFor(absl::Milliseconds(5));
  }
  return -1;
}

int FreePort() {
  const UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  TANDEM_CHECK(::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), size) == 0, "bind");
  TANDEM_CHECK(::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &size) == 0, "getsockname");
  return ntohs(address.sin_port);
}

}  // namespace tandem::testing
