// The folder that a pair meets in: locks that the kernel frees when their holder dies, and the sockets. A file's presence means
// nothing; only a held lock does.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "absl/time/time.h"
#include "common/base/clock.h"
#include "common/base/status.h"
#include "common/base/unique_fd.h"
#include "proto/types.pb.h"

namespace tandem {

// A held flock(2); given back when destroyed or when the process dies.
class FileLock {
 public:
  explicit FileLock(UniqueFd fd) : fd_(std::move(fd)) {}

 private:
  UniqueFd fd_;
};

// Thread-safe.
class RunDir {
 public:
  // Makes the folder (0700) where it is missing. Errors: PERMISSION_DENIED (another owner, or others may write),
  // INVALID_ARGUMENT.
  static absl::StatusOr<RunDir> Open(const std::string& path);

  const std::string& path() const { return path_; }
  std::string SocketPath(v1::Role role) const;  // "<path>/rollout_server.sock"

  // Held while deciding who makes the pool. Errors: DEADLINE_EXCEEDED.
  absl::StatusOr<FileLock> LockDecision(MonotonicTime deadline) const;
  // Held for life by a daemon that has a pool. Absent: another process of that role has it.
  absl::StatusOr<std::optional<FileLock>> TryLockMembership(v1::Role role) const;
  // Does a living process of that role have a pool?
  absl::StatusOr<bool> IsMember(v1::Role role) const;

 private:
  explicit RunDir(std::string path) : path_(std::move(path)) {}
  absl::StatusOr<std::optional<FileLock>> TryLock(const std::string& name, int operation) const;

  std::string path_;
};

}  // namespace tandem
