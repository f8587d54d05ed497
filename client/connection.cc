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
  if (absl::IsUnavailable(ours)) return Annotate(ours, absl::StrCat(server, " at ", address));
  return ours;
}

}  // namespace tandem
