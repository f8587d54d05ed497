// gRPC's status and ours, and how every channel of the project is made.
#pragma once

#include <memory>
#include <string>

#include "common/base/status.h"
#include "grpcpp/grpcpp.h"

namespace tandem {

grpc::Status ToGrpc(const absl::Status& status);
absl::Status FromGrpc(const grpc::Status& status);
// An insecure channel with bounded messages (4 MiB) and keepalive, that reconnects within a second of the server's return.
std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address);

}  // namespace tandem
