// A process in the sandbox, as its caller moves bytes to and from it under limits. Confined to one thread at a time; ends with
// its owner: all processes of the sandbox are killed.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "absl/time/time.h"
#include "common/base/clock.h"
#include "common/base/unique_fd.h"

namespace tandem {

// Why a Pump ended.
enum class PumpEnd {
  kDone,         // is_done said so
  kExited,       // the process ended
  kTimeLimit,    // the deadline passed
  kMemoryLimit,  // its processes and its scratch folder together hold more than memory_bytes
  kOutputLimit,  // it wrote more than max_output_bytes
  kInterrupted,
};

struct Pump {
  std::string_view input;                                // written to the channel, if the process has one
  std::function<bool(std::string_view output)> is_done;  // of the output so far; empty: until the process ends
  MonotonicTime deadline;
  std::size_t max_output_bytes = 1 << 20;
  std::size_t max_error_bytes = 16 << 20;  // of standard error, whose end alone is kept; beyond: kOutputLimit
  std::function<bool()> is_interrupted;    // asked ten times a second; may be empty
};

class SandboxedProcess {
 public:
  struct Pipes {
    UniqueFd input;  // a socket; closed where the process has no channel
    UniqueFd output, errors;
  };
  struct MemoryLimits {
    std::uint64_t memory_bytes = 0;   // of all processes and the scratch folder together
    std::uint64_t scratch_bytes = 0;  // size of the scratch folder, /tmp, which is in memory; 0: there is none
  };
  // `pid` leads a process group.
  SandboxedProcess(pid_t pid, Pipes pipes, MemoryLimits limits);
  ~SandboxedProcess();
  SandboxedProcess(const SandboxedProcess&) = delete;
  SandboxedProcess& operator=(const SandboxedProcess&) = delete;

  // Moves bytes until one of the ends; what was read of standard output is in `output`. After kDone it may be called again.
  PumpEnd Run(const Pump& pump, std::string* output);
  bool is_alive() const;
  // The exit code, or 128 and the signal that ended it. Waits for at most a second, then kills. After kExited.
  int ExitCode();
  // The last of what was written to standard error, trimmed; at most 4 KiB.
  std::string error_tail() const;
  pid_t pid() const { return pid_; }

 private:
  void Kill() noexcept;
  bool ReadErrors();  // false when nothing was there
  bool HoldsTooMuch() const;

  pid_t pid_;
  Pipes pipes_;
  const MemoryLimits limits_;
  UniqueFd exit_;  // readable when the process has ended
  int wait_status_ = -1;
  std::string error_tail_;
  std::size_t error_bytes_ = 0;
};

}  // namespace tandem
