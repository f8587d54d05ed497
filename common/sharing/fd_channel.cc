#include "common/sharing/fd_channel.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "absl/time/clock.h"
#include "common/base/check.h"
#include "common/base/clock.h"

namespace tandem {
namespace {

// Holds the socket's folder open, so that an address of any length fits the 108 bytes of sockaddr_un.
struct ShortAddress {
  UniqueFd folder;
  sockaddr_un address{};
};

absl::StatusOr<ShortAddress> Shorten(const std::string& path) {
  const std::filesystem::path file(path);
  ShortAddress result;
  result.folder = UniqueFd(::open(file.parent_path().c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (!result.folder.is_open())
    return absl::UnavailableError(absl::StrCat("socket '", path, "': its folder cannot be opened: ", std::strerror(errno)));
  const std::string text = absl::StrCat("/proc/self/fd/", result.folder.get(), "/", file.filename().string());
  if (text.size() >= sizeof result.address.sun_path)
    return absl::InvalidArgumentError(absl::StrCat("socket '", path, "': the name is too long"));
  result.address.sun_family = AF_UNIX;
  std::memcpy(result.address.sun_path, text.c_str(), text.size() + 1);
  return result;
}

int TimeoutMs(MonotonicTime deadline) {
  const absl::Duration left = deadline - MonotonicTime::Now();
  if (left <= absl::ZeroDuration()) return 0;
  return static_cast<int>(std::min<std::int64_t>(absl::ToInt64Milliseconds(left) + 1, 60'000));
}

}  // namespace

absl::StatusOr<UniqueFd> ListenUnix(const std::string& path, int backlog) {
  TANDEM_ASSIGN_OR_RETURN(const ShortAddress at, Shorten(path));
  UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  ::unlink(path.c_str());
  // fchmod before bind sets the mode that the file is born with.
  if (!fd.is_open() || ::fchmod(fd.get(), 0600) != 0 ||
      ::bind(fd.get(), reinterpret_cast<const sockaddr*>(&at.address), sizeof at.address) != 0 ||
      ::listen(fd.get(), backlog) != 0)
    return absl::UnavailableError(absl::StrCat("listening at '", path, "': ", std::strerror(errno)));
  return fd;
}

absl::StatusOr<UniqueFd> ConnectUnix(const std::string& path, MonotonicTime deadline) {
  TANDEM_ASSIGN_OR_RETURN(const ShortAddress at, Shorten(path));
  UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  while (fd.is_open() && ::connect(fd.get(), reinterpret_cast<const sockaddr*>(&at.address), sizeof at.address) != 0) {
    if (errno == EINTR) continue;
    if (errno != EAGAIN || MonotonicTime::Now() > deadline)  // EAGAIN: the backlog is full
      return absl::UnavailableError(absl::StrCat("connecting to '", path, "': ", std::strerror(errno)));
    absl::SleepFor(absl::Milliseconds(5));
  }
  if (!fd.is_open()) return absl::UnavailableError(absl::StrCat("socket for '", path, "': ", std::strerror(errno)));
  return fd;
}

absl::StatusOr<PeerCredentials> PeerCredentialsOf(int socket) {
  ucred credentials{};
  socklen_t size = sizeof credentials;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0)
    return absl::InternalError(absl::StrCat("credentials of a socket's peer: ", std::strerror(errno)));
  return PeerCredentials{.pid = credentials.pid, .uid = credentials.uid};
}

std::string MakeToken() {
  std::string token(kTokenBytes, '\0');
  const ssize_t size = ::getrandom(token.data(), token.size(), 0);  // never short for 256 bytes or fewer: getrandom(2)
  TANDEM_CHECK(size == static_cast<ssize_t>(token.size()), "getrandom: ", std::strerror(errno));
  return token;
}

absl::Status SendToken(int socket, const std::string& token) {
  if (::send(socket, token.data(), token.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(token.size())) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("showing the token: ", std::strerror(errno)));
}

absl::StatusOr<std::uint32_t> SendPacket(int socket, std::span<const UniqueFd> descriptors, std::uint32_t first) {
  TANDEM_CHECK(first < descriptors.size(), first, " of ", descriptors.size());
  DescriptorPacket header{.first = first,
                          .count = std::min(kMaxDescriptorsPerPacket, static_cast<std::uint32_t>(descriptors.size()) - first),
                          .total = static_cast<std::uint32_t>(descriptors.size())};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxDescriptorsPerPacket * sizeof(int))] = {};
  iovec bytes{.iov_base = &header, .iov_len = sizeof header};
  msghdr message{};
  message.msg_iov = &bytes;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = CMSG_SPACE(header.count * sizeof(int));
  cmsghdr* const part = CMSG_FIRSTHDR(&message);
  part->cmsg_level = SOL_SOCKET;
  part->cmsg_type = SCM_RIGHTS;
  part->cmsg_len = CMSG_LEN(header.count * sizeof(int));
  for (std::uint32_t i = 0; i < header.count; ++i) {
    const int fd = descriptors[first + i].get();
    std::memcpy(CMSG_DATA(part) + i * sizeof fd, &fd, sizeof fd);
  }
  ssize_t sent;
  do { sent = ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT); } while (sent < 0 && errno == EINTR);
  if (sent == static_cast<ssize_t>(sizeof header)) return header.count;
  // ETOOMANYREFS: too many descriptors in flight; it passes as the receiver reads.
  if (sent < 0 && (errno == EAGAIN || errno == ENOBUFS || errno == ETOOMANYREFS)) return 0;
  return absl::UnavailableError(absl::StrCat("sending descriptors ", first, " to ", first + header.count, " of ", header.total,
                                             ": ", std::strerror(errno)));
}

absl::StatusOr<std::vector<UniqueFd>> ReceiveDescriptors(int socket, std::uint32_t total, MonotonicTime deadline) {
  std::vector<UniqueFd> descriptors;
  descriptors.reserve(total);
  while (descriptors.size() < total) {
    const std::string done = absl::StrCat("receiving descriptors, ", descriptors.size(), " of ", total, " here: ");
    pollfd entry{.fd = socket, .events = POLLIN, .revents = 0};
    const int ready = ::poll(&entry, 1, TimeoutMs(deadline));
    if (ready < 0 && errno != EINTR) return absl::InternalError(absl::StrCat(done, std::strerror(errno)));
    if (ready <= 0) {
      if (MonotonicTime::Now() >= deadline) return absl::DeadlineExceededError(absl::StrCat(done, "the other end is silent"));
      continue;
    }
    DescriptorPacket header;
    alignas(cmsghdr) char control[CMSG_SPACE(kMaxDescriptorsPerPacket * sizeof(int))];
    iovec bytes{.iov_base = &header, .iov_len = sizeof header};
    msghdr message{};
    message.msg_iov = &bytes;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    const ssize_t size = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (size < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (size < 0) return absl::UnavailableError(absl::StrCat(done, std::strerror(errno)));
    // Whatever came is owned first, so that every error closes it.
    const std::size_t before = descriptors.size();
    for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr; part = CMSG_NXTHDR(&message, part)) {
      if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
      for (std::size_t at = 0; at + sizeof(int) <= part->cmsg_len - CMSG_LEN(0); at += sizeof(int)) {
        int fd;
        std::memcpy(&fd, CMSG_DATA(part) + at, sizeof fd);
        descriptors.emplace_back(fd);
      }
    }
    if (size == 0) return absl::UnavailableError(absl::StrCat(done, "the other end closed (it died, or refused the token)"));
    if ((message.msg_flags & (MSG_CTRUNC | MSG_TRUNC)) != 0)
      return absl::DataLossError(absl::StrCat(done, "a packet was cut (is RLIMIT_NOFILE too low?)"));
    const std::size_t came = descriptors.size() - before;
    if (size != static_cast<ssize_t>(sizeof header) || header.magic != DescriptorPacket{}.magic || header.first != before ||
        header.count != came || came == 0)
      return absl::DataLossError(absl::StrCat(done, "a packet of ", size, " bytes says descriptors ", header.first, " + ",
                                              header.count, " and holds ", came));
    if (header.total != total || descriptors.size() > total)
      return absl::InvalidArgumentError(absl::StrCat(done, "the other end sends ", header.total));
  }
  return descriptors;
}

}  // namespace tandem
