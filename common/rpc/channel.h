// gRPC's status and ours, and how every channel of the project is made.
#pragma once

#include <memory>
#include <string>

#include "common/base/status.h"
#include "grpcpp/grpcpp.h"

namespace tandem {

grpc::Status ToGrpc(const absl::Status& status);
absl::Status FromGrpc(const grpc::Status& status);

// What a client shows and demands over TLS; all empty: a plain connection.
struct ChannelSecurity {
  std::string ca;           // PEM: who may have signed the server's certificate; set: TLS
  std::string certificate;  // PEM chain of the client and its key: both or none
  std::string key;
  std::string token;  // sent with each call as "authorization: Bearer TOKEN"
};
// Beyond the machine: false for the loopback device and for sockets of the file system ("unix:PATH").
bool IsRemoteAddress(const std::string& address);
// A channel with bounded messages (4 MiB) and keepalive, that reconnects within a second of the server's return. "unix:PATH" is
// plain whatever `security` says.
std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address, const ChannelSecurity& security = {});

}  // namespace tandem
