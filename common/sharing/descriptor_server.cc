#include "common/sharing/descriptor_server.h"

#include <openssl/crypto.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/sharing/fd_channel.h"

namespace tandem {

absl::StatusOr<std::unique_ptr<DescriptorServer>> DescriptorServer::Create(const std::string& path,
                                                                           std::span<const UniqueFd> descriptors) {
  TANDEM_ASSIGN_OR_RETURN(UniqueFd listener, ListenUnix(path, static_cast<int>(kMaxConnections)));
  return std::unique_ptr<DescriptorServer>(new DescriptorServer(path, descriptors, std::move(listener)));
}

DescriptorServer::~DescriptorServer() { ::unlink(path_.c_str()); }

std::string DescriptorServer::IssueToken(pid_t pid) {
  MutexLock lock(&mutex_);
  accepted_.reset();
  token_ = MakeToken();
  token_pid_ = pid;
  token_end_ = MonotonicTime::Now() + kTokenLife;
  return token_;
}

std::optional<ProcessWatch> DescriptorServer::TakeAccepted() {
  MutexLock lock(&mutex_);
  return std::exchange(accepted_, std::nullopt);
}

void DescriptorServer::AppendPoll(std::vector<pollfd>* entries) const {
  if (MonotonicTime::Now() >= accept_time_) entries->push_back({.fd = listener_.get(), .events = POLLIN, .revents = 0});
  for (const Connection& connection : connections_) {
    const short events = connection.is_accepted ? POLLOUT : POLLIN;
    entries->push_back({.fd = connection.fd.get(), .events = events, .revents = 0});
  }
}

MonotonicTime DescriptorServer::next_deadline() const {
  MonotonicTime next = MonotonicTime::Now() < accept_time_ ? accept_time_ : MonotonicTime::InfiniteFuture();
  for (const Connection& connection : connections_) next = std::min(next, connection.deadline);
  return next;
}

void DescriptorServer::Serve() {
  Accept();
  for (auto it = connections_.begin(); it != connections_.end();) it = Advance(&*it) ? std::next(it) : connections_.erase(it);
}

void DescriptorServer::Accept() {
  for (;;) {
    UniqueFd fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd.is_open()) {  // nobody waits, or the joiner went away, or no descriptor is free
      if (errno == EMFILE || errno == ENFILE) accept_time_ = MonotonicTime::Now() + kAcceptPause;
      return;
    }
    if (connections_.size() == kMaxConnections) {
      auto silent = std::find_if(connections_.begin(), connections_.end(), [](const Connection& c) { return !c.is_accepted; });
      if (silent == connections_.end()) continue;
      connections_.erase(silent);
    }
    connections_.push_back({.fd = std::move(fd), .deadline = MonotonicTime::Now() + kSilence});
  }
}

bool DescriptorServer::Advance(Connection* connection) {
  if (!connection->is_accepted) {
    const absl::Status status = ReadToken(connection);
    if (!status.ok()) {
      TANDEM_LOG(kWarning, "sharing", "connection refused because=", std::string(status.message()));
      return false;
    }
  }
  while (connection->is_accepted && connection->sent < descriptors_.size()) {
    const absl::StatusOr<std::uint32_t> count = SendPacket(connection->fd.get(), descriptors_, connection->sent);
    if (!count.ok()) {
      TANDEM_LOG(kWarning, "sharing", "joiner lost because=", std::string(count.status().message()));
      return false;
    }
    if (*count == 0) break;
    connection->sent += *count;
    connection->deadline = MonotonicTime::Now() + kSilence;
  }
  if (connection->is_accepted && connection->sent == descriptors_.size()) return false;  // what was sent stays readable
  if (MonotonicTime::Now() < connection->deadline) return true;
  TANDEM_LOG(kWarning, "sharing", "connection closed: silent for ", absl::FormatDuration(kSilence));
  return false;
}

absl::Status DescriptorServer::ReadToken(Connection* connection) {
  char shown[kTokenBytes + 1];
  const ssize_t size = ::recv(connection->fd.get(), shown, sizeof shown, MSG_DONTWAIT);
  if (size < 0 && (errno == EAGAIN || errno == EINTR)) return absl::OkStatus();
  if (size <= 0) return absl::UnavailableError("it closed before it showed a token");
  TANDEM_ASSIGN_OR_RETURN(const PeerCredentials peer, PeerCredentialsOf(connection->fd.get()));
  if (peer.uid != ::geteuid())
    return absl::PermissionDeniedError(absl::StrCat("process ", peer.pid, " is of user ", peer.uid, ", not ", ::geteuid()));
  MutexLock lock(&mutex_);
  if (token_.empty() || static_cast<std::size_t>(size) != token_.size() ||
      CRYPTO_memcmp(shown, token_.data(), token_.size()) != 0)
    return absl::PermissionDeniedError(absl::StrCat("process ", peer.pid, " shows a wrong token of ", size, " bytes"));
  token_.clear();  // good for one showing, right or wrong
  if (MonotonicTime::Now() > token_end_)
    return absl::PermissionDeniedError(
        absl::StrCat("process ", peer.pid, " shows a token older than ", absl::FormatDuration(kTokenLife)));
  if (peer.pid != token_pid_)
    return absl::PermissionDeniedError(absl::StrCat("process ", peer.pid, " shows the token of process ", token_pid_));
  TANDEM_ASSIGN_OR_RETURN(accepted_, ProcessWatch::Open(peer.pid));
  connection->is_accepted = true;
  connection->deadline = MonotonicTime::Now() + kSilence;
  return absl::OkStatus();
}

}  // namespace tandem
