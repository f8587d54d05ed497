// What both daemons do alike: flags, log, signals, gRPC server with health and reflection, metrics. main() is a few lines.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "common/base/status.h"
#include "common/metrics/metrics.h"
#include "common/rpc/access.h"
#include "common/rpc/channel.h"
#include "common/sharing/pool_member.h"
#include "grpcpp/grpcpp.h"

namespace tandem {

// Exit codes: 0 stopped by signal, 1 bad flags, 2 could not start, 3 a background error, 4 poisoned device context.
struct DaemonConfig {
  std::string program;  // "rollout_server"
  v1::Role role = v1::ROLE_UNSPECIFIED;
  std::string listen;  // gRPC address
  AccessOptions access;
  std::string metrics_address;
  std::string data_dir;  // jobs, checkpoints
  PoolMemberOptions pool;
};

// Prints the message and ends with 1, before anything is started.
[[noreturn]] void BadFlag(const std::string& message);
// A flag's size ('64MiB'); ends as BadFlag does where it is none.
std::uint64_t BytesFlag(const char* name, const std::string& text);
// `value`; ends as BadFlag does where it is not in [low, high].
int IntFlag(const char* name, int value, int low, int high);

class Daemon {
 public:
  // Parses the flags that both daemons have, makes the data folder and starts the log. Exits with 1 on a bad flag.
  static DaemonConfig ParseFlags(int argc, char** argv, const std::string& program, v1::Role role,
                                 const std::string& default_listen, const std::string& default_metrics);
  // Where Serve listens for those who may enter the run folder: the peer and the node's own clients.
  static std::string LocalAddress(const DaemonConfig& config);
  // Listens at --listen and, with a pool, for its peer and the node's own clients at RUN_DIR/PROGRAM.grpc, with `access`, which
  // is that of config.access; prints "listening grpc=127.0.0.1:7071 metrics=127.0.0.1:9091" to the log, serves until SIGTERM or
  // SIGINT or until `failed` gives an error, then calls `stop` and shuts down within 5 s. Returns the exit code.
  //
  // `pool` (null: none) is watched: when its health() fails, the daemon stops as after `failed`. On a GPU so is the device:
  // tandem_device_memory_bytes follows the driver's figures, and a poisoned context ends the process at once with
  // kPoisonedContextExitCode, while it serves without `stop`: nothing on the device can be waited for, and the peer carries on.
  // Rooms need do no more than return their errors; a CUDA graph is captured in a mode that lets other threads ask the driver
  // (thread-local or relaxed).
  static int Serve(const DaemonConfig& config, std::shared_ptr<Access> access, Metrics* metrics, const PoolMember* pool,
                   const std::vector<grpc::Service*>& services, const std::function<void(int grpc_port)>& started,
                   const std::function<absl::Status()>& failed, const std::function<void()>& stop);
  // What main returns when all rooms are gone: the code of Serve, or 2 with the error in the log where the daemon came to no
  // serving. Where either left the GPU's context poisoned, ends the process with kPoisonedContextExitCode.
  static int ExitCode(const DaemonConfig& config, const absl::StatusOr<int>& served);
};

}  // namespace tandem
