// A file whose lock the kernel frees when its holder dies. The file's presence means nothing; only a held lock does.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "common/base/status.h"
#include "common/base/unique_fd.h"

namespace tandem {

// A held flock(2); given back when destroyed or when the process dies.
class FileLock {
 public:
  // `operation`: LOCK_EX or LOCK_SH. Makes the file (0600) where it is missing; absent: another process holds it. Errors:
  // PERMISSION_DENIED (the file cannot be opened, or is a link), INTERNAL.
  static absl::StatusOr<std::optional<FileLock>> TryTake(const std::string& path, int operation);

 private:
  explicit FileLock(UniqueFd fd) : fd_(std::move(fd)) {}

  UniqueFd fd_;
};

}  // namespace tandem
