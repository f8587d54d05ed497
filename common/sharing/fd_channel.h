// Descriptors over a Unix socket (SOCK_SEQPACKET). The joiner connects and shows a token, one packet; the offerer answers with
// packets of a header and at most 253 descriptors each, the most that Linux takes (SCM_MAX_FD).
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "common/base/clock.h"
#include "common/base/status.h"
#include "common/base/unique_fd.h"

namespace tandem {

constexpr std::uint32_t kMaxDescriptorsPerPacket = 253;
constexpr std::size_t kTokenBytes = 32;

// Precedes the descriptors of each packet. Same machine, same byte order.
struct DescriptorPacket {
  std::uint32_t magic = 0x54444650;  // "TDFP"
  std::uint32_t first = 0;           // index of the packet's first descriptor
  std::uint32_t count = 0;           // descriptors of this packet
  std::uint32_t total = 0;           // of all packets
};

// Listens at `path`, mode 0600, non-blocking, in place of what lay there; the path may be longer than a socket address takes.
absl::StatusOr<UniqueFd> ListenUnix(const std::string& path, int backlog);
absl::StatusOr<UniqueFd> ConnectUnix(const std::string& path, MonotonicTime deadline);

struct PeerCredentials {
  pid_t pid = 0;
  uid_t uid = 0;
};
absl::StatusOr<PeerCredentials> PeerCredentialsOf(int socket);

// 32 random bytes.
std::string MakeToken();
absl::Status SendToken(int socket, const std::string& token);

// Sends the packet that begins with descriptor `first`; returns how many descriptors it held, 0 when the socket is full.
// Requires: first < descriptors.size().
absl::StatusOr<std::uint32_t> SendPacket(int socket, std::span<const UniqueFd> descriptors, std::uint32_t first);

// Receives exactly `total` descriptors, close-on-exec. After an error none stays open. Errors: DEADLINE_EXCEEDED, UNAVAILABLE
// (the other end closed), DATA_LOSS (a packet that was cut, or whose header and descriptors disagree), INVALID_ARGUMENT (another
// total).
absl::StatusOr<std::vector<UniqueFd>> ReceiveDescriptors(int socket, std::uint32_t total, MonotonicTime deadline);

}  // namespace tandem
