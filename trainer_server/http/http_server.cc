#include "trainer_server/http/http_server.h"

#include <openssl/ssl.h>

#include <algorithm>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/ssl/context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/thread_pool.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <boost/beast/ssl.hpp>
#include <chrono>
#include <exception>
#include <optional>
#include <set>
#include <thread>
#include <type_traits>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mutex.h"

namespace tandem {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;
using boost::system::error_code;
using Tcp = asio::ip::tcp;
using PlainStream = beast::tcp_stream;
using TlsStream = beast::ssl_stream<beast::tcp_stream>;

constexpr auto kHandshakeTimeout = std::chrono::seconds(10);
constexpr auto kRequestTimeout = std::chrono::seconds(15);  // from the answer before, idleness included
constexpr auto kResponseTimeout = std::chrono::seconds(30);
constexpr auto kAcceptPause = std::chrono::milliseconds(100);  // where the process has no descriptor left
constexpr unsigned kHttp11 = 11;

// The daemon's certificate and what it demands of clients, read again when a file has changed. Confined to the server's thread.
class TlsFiles {
 public:
  static absl::StatusOr<std::unique_ptr<TlsFiles>> Open(const AccessOptions& options) {
    std::unique_ptr<TlsFiles> files(new TlsFiles(options));
    TANDEM_RETURN_IF_ERROR(files->Read());
    return files;
  }

  // For one connection. Files that cannot be used leave what was before.
  std::shared_ptr<asio::ssl::context> Current() {
    if (MonotonicTime::Now() - looked_ < absl::Seconds(kReloadSeconds)) return context_;
    if (const absl::Status status = Read(); !status.ok())
      TANDEM_LOG(kError, "http", "keeping the certificate as it was: ", status.ToString());
    return context_;
  }

 private:
  explicit TlsFiles(AccessOptions options) : options_(std::move(options)) {}

  std::string Version() const {
    std::string version;
    for (const std::string& path : {options_.tls_cert, options_.tls_key, options_.tls_client_ca})
      absl::StrAppend(&version, FileVersion(path), "\n");
    return version;
  }

  absl::Status Read() {
    looked_ = MonotonicTime::Now();
    const std::string version = Version();
    if (version == version_) return absl::OkStatus();
    version_ = version;
    const auto context = std::make_shared<asio::ssl::context>(asio::ssl::context::tls_server);
    SSL_CTX* const native = context->native_handle();
    SSL_CTX_set_min_proto_version(native, TLS1_2_VERSION);
    TANDEM_RETURN_IF_ERROR(LoadTlsFiles(options_, native));
    if (!options_.tls_client_ca.empty()) {
      SSL_CTX_set_verify(native, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
      // A browser offers those of its certificates that these signed.
      SSL_CTX_set_client_CA_list(native, SSL_load_client_CA_file(options_.tls_client_ca.c_str()));
      constexpr unsigned char kSessions[] = "tandem";  // without it a resumed session of a client with a certificate fails
      SSL_CTX_set_session_id_context(native, kSessions, sizeof kSessions);
    }
    if (context_ != nullptr) TANDEM_LOG(kInfo, "http", "read the certificate again");
    context_ = context;
    return absl::OkStatus();
  }

  const AccessOptions options_;
  std::string version_;
  MonotonicTime looked_ = MonotonicTime::InfinitePast();
  std::shared_ptr<asio::ssl::context> context_;
};

std::string CertificateName(SSL* ssl) {
  X509* const certificate = SSL_get1_peer_certificate(ssl);
  if (certificate == nullptr) return "";
  char name[65] = "";  // RFC 5280: at most 64 characters
  X509_NAME_get_text_by_NID(X509_get_subject_name(certificate), NID_commonName, name, sizeof name);
  X509_free(certificate);
  return name;
}

// The connections that are open. Confined to the server's thread, but for Leave.
class Places {
 public:
  class Holder {
   public:
    virtual ~Holder() = default;
    virtual MonotonicTime silent_since() const = 0;  // of the other side; the infinite future: it waits for us
    virtual void Drop() = 0;
  };
  void Enter(Holder* holder) {
    MutexLock lock(&mutex_);
    holders_.insert(holder);
  }
  void Leave(Holder* holder) {
    MutexLock lock(&mutex_);
    holders_.erase(holder);
  }
  // Whether one more may come; where all places are taken, the connection that has been silent longest is dropped.
  bool MakeRoom() {
    MutexLock lock(&mutex_);
    if (holders_.size() < HttpServer::kMaxConnections) return true;
    Holder* const longest = *std::ranges::min_element(holders_, {}, &Holder::silent_since);
    if (longest->silent_since() == MonotonicTime::InfiniteFuture()) return false;
    longest->Drop();
    return true;
  }

 private:
  Mutex mutex_;
  std::set<Holder*> holders_ ABSL_GUARDED_BY(mutex_);
};

// What a connection needs of the server.
struct Shared {
  asio::thread_pool* workers;
  const HttpServer::Answer* answer;
  Places* places;
};

// One connection, from its handshake to its end; keeps itself alive while something is under way. Confined to the server's
// thread, but for the answer.
template <typename Stream>
class Connection : public Places::Holder, public std::enable_shared_from_this<Connection<Stream>> {
 public:
  static constexpr bool kIsOverTls = std::is_same_v<Stream, TlsStream>;

  Connection(Stream stream, std::shared_ptr<asio::ssl::context> context, const Shared& shared)
      : context_(std::move(context)), stream_(std::move(stream)), shared_(shared) {
    shared_.places->Enter(this);
  }
  ~Connection() override { shared_.places->Leave(this); }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  MonotonicTime silent_since() const override { return silent_since_; }
  void Drop() override {
    silent_since_ = MonotonicTime::InfiniteFuture();
    error_code ignored;
    socket().close(ignored);
  }

  void Begin() {
    error_code error;
    const Tcp::endpoint peer = socket().remote_endpoint(error);
    if (error) return;
    peer_ = absl::StrCat(peer.address().to_string(), ":", peer.port());
    if constexpr (kIsOverTls) {
      beast::get_lowest_layer(stream_).expires_after(kHandshakeTimeout);
      stream_.async_handshake(asio::ssl::stream_base::server, [self = this->shared_from_this()](error_code failed) {
        if (failed) return;
        self->certificate_name_ = CertificateName(self->stream_.native_handle());
        self->Read();
      });
    } else {
      Read();
    }
  }

 private:
  Tcp::socket& socket() { return beast::get_lowest_layer(stream_).socket(); }

  void Read() {
    silent_since_ = MonotonicTime::Now();
    parser_.emplace();
    parser_->header_limit(HttpServer::kMaxHeaderBytes);
    parser_->body_limit(std::uint64_t{0});
    beast::get_lowest_layer(stream_).expires_after(kRequestTimeout);
    http::async_read(stream_, buffer_, *parser_, [self = this->shared_from_this()](error_code failed, std::size_t) {
      self->silent_since_ = MonotonicTime::InfiniteFuture();
      if (!failed) return self->Dispatch();
      if (failed == http::error::end_of_stream) return self->End();
      if (failed == http::error::header_limit)
        return self->Write({.status = 431, .body = "the request's headers are too long\n"}, false, false);
      if (failed == http::error::body_limit)
        return self->Write({.status = 413, .body = "requests have no body here\n"}, false, false);
      if (failed.category() == http::make_error_code(http::error::bad_target).category())
        return self->Write({.status = 400, .body = "this is no HTTP request\n"}, false, false);
    });
  }

  void Dispatch() {
    const http::request<http::empty_body> request = parser_->release();
    const bool is_head = request.method() == http::verb::head, keeps_alive = request.keep_alive();
    if (!is_head && request.method() != http::verb::get) {
      HttpResponse refused{.status = 405, .body = "the page is read only: GET and HEAD\n", .headers = {{"Allow", "GET, HEAD"}}};
      return Write(std::move(refused), is_head, keeps_alive);
    }
    const auto header = [&request](http::field field) { return std::string(request[field]); };
    HttpRequest asked{.target = std::string(request.target()),
                      .host = header(http::field::host),
                      .authorization = header(http::field::authorization),
                      .certificate_name = certificate_name_,
                      .peer = peer_,
                      .is_over_tls = kIsOverTls};
    asio::post(*shared_.workers, [self = this->shared_from_this(), asked = std::move(asked), is_head, keeps_alive] {
      HttpResponse response;
      try {
        response = (*self->shared_.answer)(asked);
      } catch (const std::exception& error) {
        TANDEM_LOG(kError, "http", "no answer because=", error.what());
        response = {.status = 500, .body = "the answer failed; the log says why\n"};
      }
      asio::post(self->stream_.get_executor(), [self, response = std::move(response), is_head, keeps_alive]() mutable {
        self->Write(std::move(response), is_head, keeps_alive);
      });
    });
  }

  void Write(HttpResponse response, bool is_head, bool keeps_alive) {
    const auto message = std::make_shared<http::response<http::string_body>>(http::int_to_status(response.status), kHttp11);
    message->set(http::field::content_type, response.type);
    for (const auto& [name, value] : response.headers) message->insert(name, value);
    message->keep_alive(keeps_alive);
    message->content_length(response.body.size());
    if (!is_head) message->body() = std::move(response.body);
    silent_since_ = MonotonicTime::Now();
    beast::get_lowest_layer(stream_).expires_after(kResponseTimeout);
    const auto written = [self = this->shared_from_this(), message](error_code failed, std::size_t) {
      if (failed) return;
      if (message->need_eof()) return self->End();
      self->Read();
    };
    if (!is_head) return http::async_write(stream_, *message, written);
    const auto headers = std::make_shared<http::response_serializer<http::string_body>>(*message);
    http::async_write_header(stream_, *headers,
                             [written, headers](error_code failed, std::size_t size) { written(failed, size); });
  }

  void End() {
    if constexpr (kIsOverTls) {
      beast::get_lowest_layer(stream_).expires_after(kHandshakeTimeout);
      stream_.async_shutdown([self = this->shared_from_this()](error_code) {});
    } else {
      error_code ignored;
      socket().shutdown(Tcp::socket::shutdown_send, ignored);
    }
  }

  const std::shared_ptr<asio::ssl::context> context_;  // of this connection, whatever the files are now
  Stream stream_;
  const Shared shared_;
  MonotonicTime silent_since_ = MonotonicTime::Now();
  std::string peer_, certificate_name_;
  beast::flat_buffer buffer_{HttpServer::kMaxHeaderBytes};
  std::optional<http::request_parser<http::empty_body>> parser_;
};

}  // namespace

absl::StatusOr<HttpAddress> ParseHttpAddress(const std::string& address) {
  const auto fault = [&address] {
    return absl::InvalidArgumentError(absl::StrCat("'", address, "' is no ADDRESS:PORT, as 127.0.0.1:7072 or [::1]:7072"));
  };
  const std::size_t colon = address.rfind(':');
  if (colon == std::string::npos) return fault();
  HttpAddress parsed{.ip = address.substr(0, colon)};
  const std::string port = address.substr(colon + 1);
  std::uint32_t number = 0;
  if (port.empty() || port.find_first_not_of("0123456789") != std::string::npos || !absl::SimpleAtoi(port, &number) ||
      number > UINT16_MAX)
    return fault();
  parsed.port = static_cast<std::uint16_t>(number);
  if (parsed.ip == "localhost") parsed.ip = "127.0.0.1";
  const bool has_brackets = parsed.ip.size() > 2 && parsed.ip.front() == '[' && parsed.ip.back() == ']';
  if (has_brackets) parsed.ip = parsed.ip.substr(1, parsed.ip.size() - 2);
  error_code error;
  const asio::ip::address ip = asio::ip::make_address(parsed.ip, error);
  if (error || ip.is_v6() != has_brackets) return fault();
  parsed.is_loopback = ip.is_loopback();
  return parsed;
}

struct HttpServer::State {
  State() : workers(kNumWorkers), acceptor(loop), pause(loop) {}

  absl::Status Listen(const std::string& text) {
    TANDEM_ASSIGN_OR_RETURN(const HttpAddress address, ParseHttpAddress(text));
    const Tcp::endpoint endpoint(asio::ip::make_address(address.ip), address.port);
    error_code error;
    acceptor.open(endpoint.protocol(), error);
    if (!error) acceptor.set_option(Tcp::acceptor::reuse_address(true), error);
    if (!error) acceptor.bind(endpoint, error);
    if (!error) acceptor.listen(static_cast<int>(kMaxConnections), error);
    if (!error) port = acceptor.local_endpoint(error).port();
    if (error) return absl::UnavailableError(absl::StrCat("serving the page at '", text, "': ", error.message()));
    return absl::OkStatus();
  }

  void Accept() {
    acceptor.async_accept([this](error_code failed, Tcp::socket socket) {
      if (failed == asio::error::operation_aborted) return;
      if (failed) {
        pause.expires_after(kAcceptPause);
        pause.async_wait([this](error_code stopped) {
          if (!stopped) Accept();
        });
        return;
      }
      Accept();  // first: what follows may throw
      if (places.MakeRoom()) Serve(std::move(socket));
    });
  }

  void Serve(Tcp::socket socket) {
    const Shared shared{&workers, &answer, &places};
    if (tls == nullptr) {
      std::make_shared<Connection<PlainStream>>(PlainStream(std::move(socket)), nullptr, shared)->Begin();
      return;
    }
    const std::shared_ptr<asio::ssl::context> context = tls->Current();
    std::make_shared<Connection<TlsStream>>(TlsStream(std::move(socket), *context), context, shared)->Begin();
  }

  void Run() {
    while (!loop.stopped()) {
      try {
        loop.run();
      } catch (const std::exception& error) { TANDEM_LOG(kError, "http", "a connection ended because=", error.what()); }
    }
  }

  Answer answer;
  Places places;
  std::unique_ptr<TlsFiles> tls;  // null: plain
  asio::thread_pool workers;
  asio::io_context loop{1};
  Tcp::acceptor acceptor;
  asio::steady_timer pause;
  int port = 0;
  std::thread thread;
};

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(const std::string& address, const AccessOptions& access,
                                                              Answer answer) {
  auto state = std::make_unique<State>();
  state->answer = std::move(answer);
  if (!access.tls_cert.empty()) { TANDEM_ASSIGN_OR_RETURN(state->tls, TlsFiles::Open(access)); }
  TANDEM_RETURN_IF_ERROR(state->Listen(address));
  state->Accept();
  state->thread = std::thread([loop = state.get()] { loop->Run(); });
  return std::unique_ptr<HttpServer>(new HttpServer(std::move(state)));
}

HttpServer::HttpServer(std::unique_ptr<State> state) : state_(std::move(state)) {}

HttpServer::~HttpServer() {
  state_->loop.stop();
  if (state_->thread.joinable()) state_->thread.join();
  state_->workers.join();
}

int HttpServer::port() const { return state_->port; }

}  // namespace tandem
