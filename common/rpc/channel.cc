#include "common/rpc/channel.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/time/time.h"
#include "common/model/utf8.h"

namespace tandem {

bool IsUserName(std::string_view name) {
  return !name.empty() && name.size() <= 64 && std::ranges::all_of(name, [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' || c == '@' || c == '-';
  });
}

grpc::Status ToGrpc(const absl::Status& status) {
  // absl and gRPC number their codes alike. Messages quote what came; a client in Python takes UTF-8 alone.
  return grpc::Status(static_cast<grpc::StatusCode>(status.raw_code()),
                      ReplaceIllFormed({status.message().data(), status.message().size()}));
}

absl::Status FromGrpc(const grpc::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

gpr_timespec GrpcDeadline(MonotonicTime deadline) {
  if (deadline == MonotonicTime::InfiniteFuture()) return gpr_inf_future(GPR_CLOCK_MONOTONIC);
  const timespec time = absl::ToTimespec(deadline - MonotonicTime());
  return {.tv_sec = time.tv_sec, .tv_nsec = static_cast<std::int32_t>(time.tv_nsec), .clock_type = GPR_CLOCK_MONOTONIC};
}

MonotonicTime DeadlineOf(const grpc::ServerContext& context) {
  const gpr_timespec deadline = gpr_convert_clock_type(context.raw_deadline(), GPR_CLOCK_MONOTONIC);
  if (gpr_time_cmp(deadline, gpr_inf_future(GPR_CLOCK_MONOTONIC)) == 0) return MonotonicTime::InfiniteFuture();
  return MonotonicTime() + absl::Seconds(deadline.tv_sec) + absl::Nanoseconds(deadline.tv_nsec);
}

bool IsRemoteAddress(const std::string& address) {
  return !absl::StartsWith(address, "127.") && !absl::StartsWith(address, "localhost:") && !absl::StartsWith(address, "[::1]:") &&
         !absl::StartsWith(address, "unix:");
}

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address, const ChannelSecurity& security) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(4 << 20);
  arguments.SetMaxSendMessageSize(4 << 20);
  arguments.SetInt(GRPC_COMPRESSION_CHANNEL_ENABLED_ALGORITHMS_BITSET, 1 << GRPC_COMPRESS_NONE);  // as the daemons; see daemon.cc
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveMs);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);  // no bound: a stream may be silent for hours
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
