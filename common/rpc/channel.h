// gRPC's status and ours, and how every channel of the project is made.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "common/base/clock.h"
#include "common/base/status.h"
#include "grpcpp/grpcpp.h"

namespace tandem {

// The header in which a client within the node names its user. It is believed: whoever can set it has every right.
inline constexpr char kUserHeader[] = "tandem-user";
// What it may say, and what names a token: [A-Za-z0-9._@-]{1,64}.
bool IsUserName(std::string_view name);

grpc::Status ToGrpc(const absl::Status& status);
absl::Status FromGrpc(const grpc::Status& status);

// For ClientContext::set_deadline and Server::Shutdown.
gpr_timespec GrpcDeadline(MonotonicTime deadline);
// The caller's; the infinite future where it set none.
MonotonicTime DeadlineOf(const grpc::ServerContext& context);

// What a client shows and demands over TLS; all empty: a plain connection.
struct ChannelSecurity {
  std::string ca;           // PEM: who may have signed the server's certificate; set: TLS
  std::string certificate;  // PEM chain of the client and its key: both or none
  std::string key;
  std::string token;  // sent with each call as "authorization: Bearer TOKEN"
};
// After so long without a word either end of a connection pings the other; one that answers nothing for as long again is given
// up. So a connection that broke without a word is found in two of them by both ends, if a call is under way.
inline constexpr int kKeepaliveMs = 10'000;
// Beyond the machine: false for the loopback device and for sockets of the file system ("unix:PATH").
bool IsRemoteAddress(const std::string& address);
// A channel with bounded messages (4 MiB) and keepalive, that reconnects within a second of the server's return. "unix:PATH" is
// plain whatever `security` says.
std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address, const ChannelSecurity& security = {});

}  // namespace tandem
