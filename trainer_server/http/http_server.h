// HTTP/1.1 for a page that people look at: GET and HEAD, answered by one function. TLS by the daemon's certificate where it has
// one, with the same demands on clients as the gRPC listener.
//
// One thread shakes hands, reads and writes; kNumWorkers others answer. All is bounded: connections, the size of a request, which
// has no body, and the time that a handshake, a request, an answer on its way and an idle connection may take.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/base/status.h"
#include "common/rpc/access.h"

namespace tandem {

struct HttpRequest {
  std::string target;  // "/api/jobs?page_size=10"
  std::string host;    // these two: headers, empty where there is none
  std::string authorization;
  std::string certificate_name;  // common name of the client's certificate
  std::string peer;              // "10.0.0.9:39342"
  bool is_over_tls = false;
};

struct HttpResponse {
  unsigned status = 200;
  std::string type = "text/plain; charset=utf-8";
  std::string body;
  std::vector<std::pair<std::string, std::string>> headers = {};  // further ones
};

// "127.0.0.1:7072", "[::1]:7072", "localhost:7072"; port 0 picks one.
struct HttpAddress {
  std::string ip;
  std::uint16_t port = 0;
  bool is_loopback = false;
};
// Errors: INVALID_ARGUMENT.
absl::StatusOr<HttpAddress> ParseHttpAddress(const std::string& address);

class HttpServer {
 public:
  static constexpr std::size_t kMaxConnections = 64;  // a further one takes the place of the one that has been silent longest
  static constexpr std::size_t kMaxHeaderBytes = 16 << 10;
  static constexpr int kNumWorkers = 4;
  using Answer = std::function<HttpResponse(const HttpRequest&)>;

  // `answer` is called on the workers and outlives the server. Of `access` the TLS files are used; they are read again within
  // kReloadSeconds of a change. Errors: INVALID_ARGUMENT (address; a TLS file), UNAVAILABLE (address in use).
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(const std::string& address, const AccessOptions& access,
                                                           Answer answer);
  // Drops open connections; waits for answers under way.
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;
  int port() const;

 private:
  struct State;
  explicit HttpServer(std::unique_ptr<State> state);
  const std::unique_ptr<State> state_;
};

}  // namespace tandem
