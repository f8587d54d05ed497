#include "common/sharing/process_watch.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <string_view>

#include "common/base/check.h"

namespace tandem {

absl::StatusOr<ProcessWatch> ProcessWatch::Open(pid_t pid) {
  ProcessWatch watch;
  watch.fd_ = UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));  // close-on-exec by itself
  watch.pid_ = pid;
  if (watch.fd_.is_open()) return watch;
  const std::string message = absl::StrCat("watching process ", pid, ": ", std::strerror(errno));
  return errno == ESRCH ? absl::NotFoundError(message) : absl::InternalError(message);
}

bool ProcessWatch::HasDied() const {
  TANDEM_CHECK(is_open(), "nothing to watch");
  pollfd entry{.fd = fd(), .events = POLLIN, .revents = 0};
  int ready;
  do { ready = ::poll(&entry, 1, 0); } while (ready < 0 && errno == EINTR);
  return ready > 0 && (entry.revents & POLLIN) != 0;
}

bool ProcessWatch::IsStopped() const {
  if (!is_open() || HasDied()) return false;
  const UniqueFd file(::open(absl::StrCat("/proc/", pid_, "/stat").c_str(), O_RDONLY | O_CLOEXEC));
  char text[512];
  const ssize_t size = file.is_open() ? ::read(file.get(), text, sizeof text) : -1;
  if (size <= 0) return false;
  // "123 (name, any bytes) T ...": proc(5).
  const std::string_view stat(text, static_cast<std::size_t>(size));
  const std::size_t name_end = stat.rfind(") ");
  if (name_end == std::string_view::npos || name_end + 2 >= stat.size()) return false;
  const char state = stat[name_end + 2];
  return state == 'T' || state == 't';
}

absl::Status ProcessWatch::Kill() const {
  TANDEM_CHECK(is_open(), "nothing to kill");
  if (::syscall(SYS_pidfd_send_signal, fd(), SIGKILL, nullptr, 0) == 0) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("killing process ", pid_, ": ", std::strerror(errno)));
}

}  // namespace tandem
