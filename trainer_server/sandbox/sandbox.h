// Runs Python where it can harm nothing: in bubblewrap, as nobody, without network, over a read-only root that holds Python and
// the files given, with a bounded scratch folder. Rewards run their functions and the model's programs here. Thread-safe.
//
// Note [Who stops what] Namespaces hide the node: its files, processes, network and shared memory. rlimits bound each process
// (address space, CPU time, files, file sizes) and the number of processes. A filter refuses the system calls that make memory
// outside of both. SandboxedProcess bounds what is left: wall time, memory of all processes together, output.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "common/base/mutex.h"
#include "common/base/status.h"
#include "trainer_server/sandbox/sandboxed_process.h"

namespace tandem {

struct SandboxFile {
  std::string path;  // inside, absolute
  std::string bytes;
};

struct SandboxCommand {
  std::vector<std::string> arguments;  // of Python
  std::vector<SandboxFile> files;      // read-only
  std::optional<std::string> input;    // standard input; absent: a channel that the caller writes to
  std::uint64_t memory_bytes = 0;      // address space of each process; memory of all together, with the scratch folder
  std::uint64_t scratch_bytes = 64 << 20;
  int max_processes = 128;                             // threads included
  int max_files = 1024;                                // open in one process
  absl::Duration cpu_time = absl::InfiniteDuration();  // of each process
};

class Sandbox {
 public:
  // Asks `python`, an absolute path, where its parts lie, and runs one sandbox with it. Blocks for at most 20 s. Errors:
  // FAILED_PRECONDITION saying what is missing (bubblewrap, Python, user namespaces) and what to do.
  static absl::StatusOr<std::shared_ptr<const Sandbox>> Create(const std::string& python);

  // The process dies with the thread that started it. Errors: RESOURCE_EXHAUSTED (no process or descriptor to be had).
  absl::StatusOr<std::unique_ptr<SandboxedProcess>> Start(const SandboxCommand& command) const;

 private:
  Sandbox() = default;
  absl::Status FindPrograms(const std::string& python);
  absl::Status FindPythonParts(const std::string& python);
  absl::Status TryOut() const;

  std::string choom_, setpriv_, bubblewrap_, prlimit_;  // setpriv_ empty: this process is no root
  std::string python_;                                  // the program itself, links resolved
  std::vector<std::string> python_parts_;               // folders and files outside /usr that it needs
};

// Makes the sandbox when it is first asked for; a failure is tried again next time, so that an operator who installs what is
// missing need not restart. Thread-safe.
class SandboxSource {
 public:
  explicit SandboxSource(std::string python) : python_(std::move(python)) {}
  absl::StatusOr<std::shared_ptr<const Sandbox>> Get();

 private:
  const std::string python_;
  Mutex mutex_;
  std::shared_ptr<const Sandbox> sandbox_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tandem
