// Where the two daemons are and how long a call may take. Every command gets one.
#pragma once

#include <memory>
#include <string>

#include "absl/time/time.h"
#include "common/base/status.h"
#include "grpcpp/grpcpp.h"
#include "proto/job.grpc.pb.h"
#include "proto/rollout.grpc.pb.h"

namespace tandem {

struct Connection {
  std::string trainer_address;
  std::string rollout_address;
  absl::Duration timeout = absl::Seconds(30);  // of a unary call
  bool json = false;                           // print protobuf JSON, one object a line

  std::unique_ptr<v1::JobService::Stub> Trainer() const;
  std::unique_ptr<v1::RolloutService::Stub> Rollout() const;
  // A context whose deadline is `timeout` from now.
  std::unique_ptr<grpc::ClientContext> Context() const;
};

// The server's status as ours, with the address in front when the server could not be reached.
absl::Status CallStatus(const grpc::Status& status, const std::string& server, const std::string& address);

}  // namespace tandem
