// The folder that a pair meets in: locks and the sockets.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "absl/time/time.h"
#include "common/base/clock.h"
#include "common/base/file_lock.h"
#include "common/base/status.h"
#include "proto/types.pb.h"

namespace tandem {

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
  std::string LockPath(v1::Role role) const;

  std::string path_;
};

}  // namespace tandem
