// A client of an HTTP listener that says whatever it likes.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "common/base/check.h"
#include "common/base/clock.h"
#include "common/base/unique_fd.h"

namespace tandem::fuzz {

inline constexpr std::size_t kMostAnswered = 1 << 20;

// Sends `request` and takes the answer until the server closes; false: it did not within `limit`.
inline bool Exchange(int port, const std::string& request, absl::Duration limit) {
  const UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  TANDEM_CHECK(::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0, "connect");
  (void)!::send(socket.get(), request.data(), request.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  ::shutdown(socket.get(), SHUT_WR);
  const MonotonicTime deadline = MonotonicTime::Now() + limit;
  for (std::size_t answered = 0; answered < kMostAnswered;) {
    pollfd entry{.fd = socket.get(), .events = POLLIN, .revents = 0};
    const int ready = ::poll(&entry, 1, static_cast<int>(absl::ToInt64Milliseconds(deadline - MonotonicTime::Now())));
    if (ready < 0 && errno == EINTR) continue;  // libFuzzer's clock
    if (ready <= 0) return false;
    char bytes[4096];
    const ssize_t size = ::recv(socket.get(), bytes, sizeof bytes, 0);
    if (size <= 0) return true;
    answered += static_cast<std::size_t>(size);
  }
  return false;
}

inline std::vector<std::string> HttpSeeds(const std::string& target) {
  return {"GET " + target + " HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n",
          "GET " + target + " HTTP/1.0\r\nHost: localhost:80\r\nAccept-Encoding: gzip\r\n\r\n",
          "POST " + target + " HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc",
          "GET /../../etc/passwd HTTP/1.1\r\nHost: 127.0.0.1\r\nRange: bytes=0-\r\n\r\n",
          "HEAD " + target + "?a=%00%2e%2e HTTP/1.1\r\nHost: [::1]\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"};
}

inline std::vector<std::string> HttpWords() {
  return {"GET ",
          "HEAD ",
          "OPTIONS ",
          "PUT ",
          "DELETE ",
          " HTTP/1.1\r\n",
          "\r\n\r\n",
          "Host: ",
          "Content-Length: ",
          "18446744073709551615",
          "Transfer-Encoding: chunked",
          "ffffffff\r\n",
          "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: a\r\n",
          "Expect: 100-continue",
          "Authorization: Basic ",
          "authorization: Bearer ",
          "Cookie: ",
          "%00",
          "%2e%2e/",
          "//",
          "Range: bytes="};
}

}  // namespace tandem::fuzz
