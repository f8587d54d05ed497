// A real process with a PoolMember and its gRPC server, driven line by line, for tests that kill it. Fork alone would not do:
// gRPC does not survive it.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "absl/time/time.h"
#include "common/base/unique_fd.h"
#include "proto/types.pb.h"

namespace tandem::testing {

struct PoolProcessOptions {
  v1::Role role = v1::ROLE_ROLLOUT;
  std::string run_dir;
  std::string listen;  // "127.0.0.1:port"
  std::string peer;
  std::string model;
  std::string chunk_bytes = "0";
  std::vector<std::string>
      more;  // further words "key=value": strict=1, kill_silent=1, holder_timeout=500ms, start_timeout=5s, nofile=256, ...
};

class PoolProcess {
 public:
  // Starts it and returns at once; the process says "ready made" or "ready joined" when it serves.
  explicit PoolProcess(const PoolProcessOptions& options);
  ~PoolProcess() { Kill(); }
  PoolProcess(const PoolProcess&) = delete;
  PoolProcess& operator=(const PoolProcess&) = delete;

  // The next line that it says; empty when it has died or `timeout` passed.
  std::string ReadLine(absl::Duration timeout = absl::Seconds(20));
  // One command, one line of answer.
  std::string Ask(const std::string& command, absl::Duration timeout = absl::Seconds(20));
  void Send(const std::string& command);
  void Signal(int signal);
  // SIGKILL, and waits for the end. Idempotent.
  void Kill();
  // The wait status once it ends by itself; -1 after `timeout`.
  int Wait(absl::Duration timeout);
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = -1;
  UniqueFd commands_;
  UniqueFd answers_;
  std::string unread_;
};

// A port of 127.0.0.1 that nobody listens at.
int FreePort();

}  // namespace tandem::testing
