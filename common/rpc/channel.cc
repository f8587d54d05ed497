#include "common/rpc/channel.h"

#include "absl/strings/match.h"

namespace tandem {

grpc::Status ToGrpc(const absl::Status& status) {
  // absl and gRPC number their codes alike.
  return grpc::Status(static_cast<grpc::StatusCode>(status.raw_code()), std::string(status.message()));
}

absl::Status FromGrpc(const grpc::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

bool IsRemoteAddress(const std::string& address) {
  return !absl::StartsWith(address, "127.") && !absl::StartsWith(address, "localhost:") && !absl::StartsWith(address, "[::1]:") &&
         !absl::StartsWith(address, "unix:");
}

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address, const ChannelSecurity& security) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(4 << 20);
  arguments.SetMaxSendMessageSize(4 << 20);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 30000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20000);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 2000);  // in fact the time that one attempt may take
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  if (security.ca.empty() || absl::StartsWith(address, "unix:"))
    return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
  grpc::SslCredentialsOptions tls;
  tls.pem_root_certs = security.ca;
  tls.pem_cert_chain = security.certificate;
  tls.pem_private_key = security.key;
  std::shared_ptr<grpc::ChannelCredentials> credentials = grpc::SslCredentials(tls);
  if (!security.token.empty())
    credentials = grpc::CompositeChannelCredentials(credentials, grpc::AccessTokenCredentials(security.token));
  return grpc::CreateCustomChannel(address, credentials, arguments);
}

}  // namespace tandem
