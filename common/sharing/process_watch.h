// One other process, by pidfd: it cannot be mistaken for a later process of the same number. Thread-compatible; fd() may be
// polled.
#pragma once

#include <sys/types.h>

#include "common/base/status.h"
#include "common/base/unique_fd.h"

namespace tandem {

class ProcessWatch {
 public:
  ProcessWatch() = default;  // watches nothing
  // Errors: NOT_FOUND (no such process), INTERNAL.
  static absl::StatusOr<ProcessWatch> Open(pid_t pid);

  bool is_open() const { return fd_.is_open(); }
  int fd() const { return fd_.get(); }  // readable once the process has died; -1: watches nothing
  pid_t pid() const { return pid_; }
  // Its memory use has ended. Requires: is_open().
  bool HasDied() const;
  // Stopped by SIGSTOP, a terminal or a debugger: it lives, and does nothing.
  bool IsStopped() const;
  // SIGKILL to that very process. Requires: is_open().
  absl::Status Kill() const;

 private:
  UniqueFd fd_;
  pid_t pid_ = 0;
};

}  // namespace tandem
