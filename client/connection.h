// Where the two daemons are, what they are shown, and how long a call may take. Every command gets one.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>

#include "absl/time/time.h"
#include "common/base/status.h"
#include "common/rpc/channel.h"
#include "grpcpp/grpcpp.h"
#include "proto/job.grpc.pb.h"
#include "proto/rollout.grpc.pb.h"

namespace tandem {

// What a user within the node is called: "ada"; "uid-1000" where the login is none that a server takes, as "svc$" or "".
std::string UserNameOf(const std::string& login, uid_t uid);

struct Connection {
  std::string trainer_address;
  std::string rollout_address;
  ChannelSecurity security;
  absl::Duration timeout = absl::Seconds(30);  // of a unary call
  bool json = false;                           // print protobuf JSON, one object a line

  std::unique_ptr<v1::JobService::Stub> Trainer() const;
  std::unique_ptr<v1::RolloutService::Stub> Rollout() const;
  // A context whose deadline is `timeout` from now, or later where `least` is longer. Within the node it names the user.
  std::unique_ptr<grpc::ClientContext> Context(absl::Duration least = absl::ZeroDuration()) const;
};

// Of a command line; empty: not given.
struct ConnectionFlags {
  std::string context;
  std::string trainer, rollout;           // addresses
  std::string ca, cert, key, token_file;  // paths
};
// Flags before environment (TANDEM_TRAINER, _ROLLOUT, _CA, _CERT, _KEY, _TOKEN_FILE, and _TOKEN, the token itself) before the
// context of the configuration file before the defaults 127.0.0.1:7070 and :7071. The file is TANDEM_CONFIG, else
// $XDG_CONFIG_HOME/tandem/config.json, else ~/.config/tandem/config.json:
//   {"context": "node-1", "contexts": {"node-1": {"trainer": "node-1:7070", "ca": "ca.pem", "token_file": "token"}}}
// with paths relative to its folder. The context is --context, else TANDEM_CONTEXT, else the file's; "none": of none of them.
// An address is HOST:PORT or unix:PATH. Errors: NOT_FOUND (file, context), INVALID_ARGUMENT naming flag, variable, or file and
// key, PERMISSION_DENIED (key or token that others may read).
absl::StatusOr<Connection> ResolveConnection(const ConnectionFlags& flags,
                                             const std::function<std::string(const std::string&)>& environment);

// The server's status as ours: with the address and, for gRPC's words, a person's, when it could not be reached or has no such
// call. client/python/tandem/connection.py does the same.
absl::Status CallStatus(const grpc::Status& status, const std::string& server, const std::string& address);

}  // namespace tandem
