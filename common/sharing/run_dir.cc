#include "common/sharing/run_dir.h"

#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "absl/time/clock.h"
#include "common/base/clock.h"
#include "common/memory/lease_book.h"

namespace tandem {

absl::StatusOr<RunDir> RunDir::Open(const std::string& path) {
  if (path.empty()) return absl::InvalidArgumentError("run_dir is empty");
  std::error_code error;
  const std::filesystem::path absolute = std::filesystem::absolute(path, error);
  if (error) return absl::InvalidArgumentError(absl::StrCat("run_dir '", path, "': ", error.message()));
  std::filesystem::create_directories(absolute.parent_path(), error);
  if (::mkdir(absolute.c_str(), 0700) != 0 && errno != EEXIST)
    return absl::PermissionDeniedError(absl::StrCat("making run_dir '", absolute.string(), "': ", std::strerror(errno)));
  struct stat stat {};
  if (::stat(absolute.c_str(), &stat) != 0 || !S_ISDIR(stat.st_mode))
    return absl::InvalidArgumentError(absl::StrCat("run_dir '", absolute.string(), "' is no folder"));
  if (stat.st_uid != ::geteuid() || (stat.st_mode & (S_IWGRP | S_IWOTH)) != 0)
    return absl::PermissionDeniedError(absl::StrCat("run_dir '", absolute.string(), "' belongs to user ", stat.st_uid, ", mode ",
                                                    absl::StrFormat("%o", stat.st_mode & 07777), "; it must be user ",
                                                    ::geteuid(), "'s, and writable by nobody else"));
  return RunDir(absolute.string());
}

std::string RunDir::SocketPath(v1::Role role) const { return absl::StrCat(path_, "/", RoleName(role), ".sock"); }
std::string RunDir::LockPath(v1::Role role) const { return absl::StrCat(path_, "/", RoleName(role), ".lock"); }

absl::StatusOr<FileLock> RunDir::LockDecision(MonotonicTime deadline) const {
  for (;;) {
    TANDEM_ASSIGN_OR_RETURN(std::optional<FileLock> lock, FileLock::TryTake(path_ + "/pool.lock", LOCK_EX));
    if (lock.has_value()) return std::move(*lock);
    if (MonotonicTime::Now() > deadline)
      return absl::DeadlineExceededError(absl::StrCat("another process holds '", path_, "/pool.lock' for too long"));
    absl::SleepFor(absl::Milliseconds(5));
  }
}

absl::StatusOr<std::optional<FileLock>> RunDir::TryLockMembership(v1::Role role) const {
  return FileLock::TryTake(LockPath(role), LOCK_EX);
}

absl::StatusOr<bool> RunDir::IsMember(v1::Role role) const {
  TANDEM_ASSIGN_OR_RETURN(const std::optional<FileLock> lock, FileLock::TryTake(LockPath(role), LOCK_SH));
  return !lock.has_value();
}

}  // namespace tandem
