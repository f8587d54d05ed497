#include "common/base/file_lock.h"

#include <fcntl.h>
#include <sys/file.h>

#include <cerrno>
#include <cstring>

namespace tandem {

absl::StatusOr<std::optional<FileLock>> FileLock::TryTake(const std::string& path, int operation) {
  UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd.is_open()) return absl::PermissionDeniedError(absl::StrCat("opening '", path, "': ", std::strerror(errno)));
  int result;
  do { result = ::flock(fd.get(), operation | LOCK_NB); } while (result != 0 && errno == EINTR);
  if (result == 0) return std::optional<FileLock>(FileLock(std::move(fd)));
  if (errno == EWOULDBLOCK) return std::optional<FileLock>();
  return absl::InternalError(absl::StrCat("locking '", path, "': ", std::strerror(errno)));
}

}  // namespace tandem
