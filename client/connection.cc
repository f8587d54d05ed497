#include "client/connection.h"

#include "common/rpc/channel.h"

namespace tandem {

std::unique_ptr<v1::JobService::Stub> Connection::Trainer() const {
  return v1::JobService::NewStub(MakeChannel(trainer_address));
}
std::unique_ptr<v1::RolloutService::Stub> Connection::Rollout() const {
  return v1::RolloutService::NewStub(MakeChannel(rollout_address));
}

std::unique_ptr<grpc::ClientContext> Connection::Context() const {
  auto context = std::make_unique<grpc::ClientContext>();
  context->set_deadline(absl::ToChronoTime(absl::Now() + timeout));
  return context;
}

absl::Status CallStatus(const grpc::Status& status, const std::string& server, const std::string& address) {
  const absl::Status ours = FromGrpc(status);
  if (!absl::IsUnavailable(ours)) return ours;
  // gRPC's own words are of attempts and addresses.
  if (ours.message().find("failed to connect") == ours.message().npos)
    return Annotate(ours, absl::StrCat(server, " at ", address));
  return absl::UnavailableError(
      absl::StrCat(server, " at ", address,
                   " does not answer: it is not running there, or still starting; tandem status --wait=60s waits for it"));
}

}  // namespace tandem
