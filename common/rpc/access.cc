#include "common/rpc/access.h"

#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "common/base/clock.h"
#include "common/base/hash.h"
#include "common/base/log.h"
#include "common/rpc/channel.h"
#include "grpcpp/security/auth_metadata_processor.h"
#include "grpcpp/security/tls_certificate_provider.h"
#include "grpcpp/security/tls_credentials_options.h"
#include "proto/job.pb.h"

namespace tandem {
namespace {

constexpr std::size_t kMaxTokens = 1024;
constexpr std::uintmax_t kMaxTokensBytes = 1 << 20;
constexpr std::string_view kBearer = "Bearer ";
constexpr char kNobody[] = "(nobody)";

template <typename Message>
std::string JobOf(const void* message) {
  return static_cast<const Message*>(message)->job();
}

constexpr std::array kRpcAccess = {
    RpcAccess{.method = "/tandem.v1.JobService/Upload", .least_role = AccessRole::kSubmit, .changes_job = true},
    RpcAccess{.method = "/tandem.v1.JobService/HasContent", .least_role = AccessRole::kSubmit},
    RpcAccess{.method = "/tandem.v1.JobService/Submit",
              .least_role = AccessRole::kSubmit,
              .changes_job = true,
              .job_of_response = JobOf<v1::SubmitResponse>},
    RpcAccess{.method = "/tandem.v1.JobService/Plan", .least_role = AccessRole::kSubmit},
    RpcAccess{.method = "/tandem.v1.JobService/ListJobs", .least_role = AccessRole::kView},
    RpcAccess{
        .method = "/tandem.v1.JobService/GetJob", .least_role = AccessRole::kView, .job_of_request = JobOf<v1::GetJobRequest>},
    RpcAccess{
        .method = "/tandem.v1.JobService/Describe", .least_role = AccessRole::kView, .job_of_request = JobOf<v1::GetJobRequest>},
    RpcAccess{
        .method = "/tandem.v1.JobService/Watch", .least_role = AccessRole::kView, .job_of_request = JobOf<v1::WatchRequest>},
    RpcAccess{.method = "/tandem.v1.JobService/Cancel",
              .least_role = AccessRole::kSubmit,
              .changes_job = true,
              .job_of_request = JobOf<v1::CancelRequest>},
    RpcAccess{.method = "/tandem.v1.JobService/Pause",
              .least_role = AccessRole::kSubmit,
              .changes_job = true,
              .job_of_request = JobOf<v1::PauseRequest>},
    RpcAccess{.method = "/tandem.v1.JobService/Resume",
              .least_role = AccessRole::kSubmit,
              .changes_job = true,
              .job_of_request = JobOf<v1::ResumeRequest>},
    RpcAccess{.method = "/tandem.v1.JobService/SetPriority",
              .least_role = AccessRole::kSubmit,
              .changes_job = true,
              .job_of_request = JobOf<v1::SetPriorityRequest>},
    RpcAccess{.method = "/tandem.v1.JobService/Completions",
              .least_role = AccessRole::kView,
              .job_of_request = JobOf<v1::CompletionsRequest>},
    RpcAccess{
        .method = "/tandem.v1.JobService/Export", .least_role = AccessRole::kSubmit, .job_of_request = JobOf<v1::ExportRequest>},
    RpcAccess{.method = "/tandem.v1.JobService/GetStatus", .least_role = AccessRole::kView},
    RpcAccess{.method = "/tandem.v1.RolloutService/Generate", .least_role = AccessRole::kSubmit},
    RpcAccess{.method = "/tandem.v1.RolloutService/ActivateAdapter", .least_role = AccessRole::kPair},
    RpcAccess{.method = "/tandem.v1.RolloutService/RetireAdapter", .least_role = AccessRole::kPair},
    RpcAccess{.method = "/tandem.v1.RolloutService/GetStatus", .least_role = AccessRole::kView},
    RpcAccess{.method = "/tandem.v1.PoolService/Attach", .least_role = AccessRole::kPair},
    RpcAccess{.method = "/tandem.v1.PoolService/Ready", .least_role = AccessRole::kPair},
    RpcAccess{.method = "/tandem.v1.PoolService/AcquireLease", .least_role = AccessRole::kPair},
    RpcAccess{.method = "/tandem.v1.PoolService/ReleaseLease", .least_role = AccessRole::kPair},
    RpcAccess{.method = "/grpc.health.v1.Health/Check", .least_role = AccessRole::kView},
    RpcAccess{.method = "/grpc.health.v1.Health/Watch", .least_role = AccessRole::kView},
    RpcAccess{.method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", .least_role = AccessRole::kView},
};

// "JobService.Submit"
std::string RpcName(std::string_view method) {
  const std::string printable = absl::CEscape(absl::string_view(method.data(), std::min<std::size_t>(method.size(), 128)));
  return absl::StrJoin(absl::StrSplit(absl::StripPrefix(absl::StripPrefix(printable, "/"), "tandem.v1."), '/'), ".");
}

absl::Status PrivateFile(const std::string& flag, const std::string& path) {
  struct stat found {};
  if (::stat(path.c_str(), &found) != 0)
    return absl::NotFoundError(absl::StrCat("--", flag, "=", path, ": ", std::strerror(errno)));
  if (!S_ISREG(found.st_mode)) return absl::InvalidArgumentError(absl::StrCat("--", flag, "=", path, " is no regular file"));
  if ((found.st_mode & 077) == 0) return absl::OkStatus();
  return absl::PermissionDeniedError(absl::StrCat("--", flag, "=", path, " has mode 0", absl::Hex(found.st_mode >> 6 & 7),
                                                  absl::Hex(found.st_mode >> 3 & 7), absl::Hex(found.st_mode & 7),
                                                  ": group and others must not touch it (chmod 600)"));
}

absl::Status TlsFault(const std::string& flag, const std::string& path, const char* tried) {
  char reason[256] = "unknown";
  if (const unsigned long code = ERR_peek_last_error(); code != 0) ERR_error_string_n(code, reason, sizeof reason);
  ERR_clear_error();
  return absl::InvalidArgumentError(absl::StrCat("--", flag, "=", path, ": ", tried, ": ", reason));
}

// gRPC reads the files itself, and says of bad ones only that handshakes fail.
absl::Status CheckTlsFiles(const AccessOptions& options) {
  const std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)> context(SSL_CTX_new(TLS_server_method()), &SSL_CTX_free);
  if (context == nullptr) return absl::InternalError("OpenSSL gives no TLS context");
  return LoadTlsFiles(options, context.get());
}

std::string FirstProperty(const grpc::AuthContext* context, const char* property) {
  if (context == nullptr) return "";
  const std::vector<grpc::string_ref> values = context->FindPropertyValues(property);
  return values.empty() ? "" : std::string(values.front().data(), std::min<std::size_t>(values.front().size(), 64));
}

bool IsOverTls(const grpc::AuthContext* context) {
  const std::string type = FirstProperty(context, GRPC_TRANSPORT_SECURITY_TYPE_PROPERTY_NAME);
  return type == GRPC_TLS_TRANSPORT_SECURITY_TYPE || type == GRPC_SSL_TRANSPORT_SECURITY_TYPE;
}

template <typename Metadata>
std::string_view ValueOf(const Metadata& metadata, const char* key) {
  const auto found = metadata.find(key);
  return found == metadata.end() ? std::string_view() : std::string_view(found->second.data(), found->second.size());
}

// Before the call reaches its service: the handler of a refused one never runs.
class Gate : public grpc::AuthMetadataProcessor {
 public:
  explicit Gate(Access* access) : access_(access) {}
  bool IsBlocking() const override { return false; }
  grpc::Status Process(const InputMetadata& metadata, grpc::AuthContext* context, OutputMetadata*, OutputMetadata*) override {
    return ToGrpc(access_->Admit(ValueOf(metadata, ":path"), ValueOf(metadata, "authorization"),
                                 FirstProperty(context, GRPC_X509_CN_PROPERTY_NAME)));
  }

 private:
  Access* const access_;
};

class AuditLine : public grpc::experimental::Interceptor {
 public:
  AuditLine(Access* access, const RpcAccess* rpc, grpc::ServerContextBase* context)
      : access_(access), rpc_(rpc), context_(context), begin_(MonotonicTime::Now()) {}

  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    using grpc::experimental::InterceptionHookPoints;
    if (rpc_->job_of_request != nullptr && methods->QueryInterceptionHookPoint(InterceptionHookPoints::POST_RECV_MESSAGE)) {
      if (const void* message = methods->GetRecvMessage(); message != nullptr) job_ = rpc_->job_of_request(message);
    }
    if (rpc_->job_of_response != nullptr && methods->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_MESSAGE)) {
      if (const void* message = methods->GetSendMessage(); message != nullptr) job_ = rpc_->job_of_response(message);
    }
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_STATUS)) Write(methods->GetSendStatus());
    methods->Proceed();
  }

 private:
  void Write(const grpc::Status& status) const {
    const absl::StatusOr<Caller> caller = access_->CallerOf(*context_);
    const bool is_local = caller.ok() && caller->is_local;
    if (is_local && !rpc_->changes_job) return;
    const std::string certificate = FirstProperty(context_->auth_context().get(), GRPC_X509_CN_PROPERTY_NAME);
    const char* const role = is_local ? "operator" : caller.ok() ? AccessRoleName(caller->role) : "none";
    // Whatever --log_level is.
    WriteLog(LogLevel::kInfo, "audit",
             absl::StrCat("name=", caller.ok() ? caller->name : kNobody, " role=", role, " certificate='",
                          absl::CEscape(certificate), "' peer=", absl::CEscape(context_->peer()), " rpc=", RpcName(rpc_->method),
                          " job='", absl::CEscape(job_.substr(0, 128)),
                          "' result=", absl::StatusCodeToString(static_cast<absl::StatusCode>(status.error_code())),
                          " seconds=", absl::ToDoubleSeconds(MonotonicTime::Now() - begin_)));
  }

  Access* const access_;
  const RpcAccess* const rpc_;
  grpc::ServerContextBase* const context_;
  const MonotonicTime begin_;
  std::string job_;
};

class AuditFactory : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  explicit AuditFactory(std::shared_ptr<Access> access) : access_(std::move(access)) {}
  grpc::experimental::Interceptor* CreateServerInterceptor(grpc::experimental::ServerRpcInfo* rpc) override {
    const RpcAccess* entry = FindRpcAccess(rpc->method());
    if (entry == nullptr || entry->least_role == AccessRole::kPair) return nullptr;
    return new AuditLine(access_.get(), entry, rpc->server_context());  // gRPC owns it
  }

 private:
  const std::shared_ptr<Access> access_;
};

}  // namespace

const char* AccessRoleName(AccessRole role) {
  switch (role) {
    case AccessRole::kView:
      return "view";
    case AccessRole::kSubmit:
      return "submit";
    case AccessRole::kAdminister:
      return "administer";
    case AccessRole::kPair:
      return "pair";
  }
  return "unknown";
}

std::span<const RpcAccess> RpcAccessTable() { return kRpcAccess; }

const RpcAccess* FindRpcAccess(std::string_view method) {
  const auto found = std::ranges::find(kRpcAccess, method, &RpcAccess::method);
  return found == kRpcAccess.end() ? nullptr : &*found;
}

std::string FileVersion(const std::string& path) {
  struct stat found {};
  if (::stat(path.c_str(), &found) != 0) return absl::StrCat("errno ", errno);
  return absl::StrCat(found.st_ino, " ", found.st_ctim.tv_sec, ".", found.st_ctim.tv_nsec);
}

absl::Status LoadTlsFiles(const AccessOptions& options, ssl_ctx_st* context) {
  SSL_CTX_set_default_passwd_cb(context, [](char*, int, int, void*) { return 0; });  // never asks at the terminal
  ERR_clear_error();
  if (SSL_CTX_use_certificate_chain_file(context, options.tls_cert.c_str()) != 1)
    return TlsFault("tls_cert", options.tls_cert, "no PEM certificate chain");
  TANDEM_RETURN_IF_ERROR(PrivateFile("tls_key", options.tls_key));
  if (SSL_CTX_use_PrivateKey_file(context, options.tls_key.c_str(), SSL_FILETYPE_PEM) != 1)
    return TlsFault("tls_key", options.tls_key, "no PEM key without a passphrase that fits the certificate");
  if (X509_cmp_current_time(X509_get0_notAfter(SSL_CTX_get0_certificate(context))) < 0)
    return absl::InvalidArgumentError(absl::StrCat("--tls_cert=", options.tls_cert, ": the certificate has expired"));
  if (!options.tls_client_ca.empty() && SSL_CTX_load_verify_file(context, options.tls_client_ca.c_str()) != 1)
    return TlsFault("tls_client_ca", options.tls_client_ca, "no PEM certificates");
  return absl::OkStatus();
}

absl::Status CheckAccess(const AccessOptions& options, const std::string& listen) {
  const bool has_tls = !options.tls_cert.empty();
  if (has_tls != !options.tls_key.empty())
    return absl::InvalidArgumentError("--tls_cert and --tls_key are given together or not at all");
  if (!has_tls && !options.tls_client_ca.empty())
    return absl::InvalidArgumentError("--tls_client_ca needs --tls_cert and --tls_key");
  if (!has_tls && !options.tokens_file.empty())
    return absl::InvalidArgumentError("--tokens_file needs --tls_cert and --tls_key: a token must not travel in plain text");
  if (!has_tls && IsRemoteAddress(listen))
    return absl::InvalidArgumentError(
        absl::StrCat("--listen=", listen,
                     " can be reached from other machines: give --tls_cert, --tls_key, and --tokens_file or --tls_client_ca; or "
                     "listen at 127.0.0.1"));
  if (has_tls && options.tokens_file.empty() && options.tls_client_ca.empty())
    return absl::InvalidArgumentError(
        "--tls_cert without --tokens_file or --tls_client_ca would let anyone in: give one of them, or both");
  if (options.max_requests_per_second < 1)
    return absl::InvalidArgumentError(
        absl::StrCat("--max_requests_per_second=", options.max_requests_per_second, " is not 1 or more"));
  if (has_tls) TANDEM_RETURN_IF_ERROR(CheckTlsFiles(options));
  if (!options.tokens_file.empty()) TANDEM_RETURN_IF_ERROR(TokensFile::Open(options.tokens_file).status());
  return absl::OkStatus();
}

absl::StatusOr<std::vector<AccessToken>> ParseTokens(std::string_view text) {
  std::vector<AccessToken> tokens;
  int line_number = 0;
  for (const absl::string_view line : absl::StrSplit(absl::string_view(text.data(), text.size()), '\n')) {
    ++line_number;
    const std::vector<std::string> words = absl::StrSplit(line, absl::ByAnyChar(" \t\r"), absl::SkipEmpty());
    if (words.empty() || words[0][0] == '#') continue;
    const auto fault = [&](const auto&... parts) {  // never the words themselves: one may be a token
      return absl::InvalidArgumentError(absl::StrCat("line ", line_number, ": ", parts...));
    };
    if (words.size() != 3) return fault(words.size(), " words; must be HASH ROLE NAME");
    AccessToken token{.hash = words[0], .role = AccessRole::kView, .name = words[2]};
    if (token.hash.size() != 64 || token.hash.find_first_not_of("0123456789abcdef") != std::string::npos)
      return fault("HASH is not 64 lower-case hexadecimal digits, a token's SHA-256");
    if (words[1] == "submit") token.role = AccessRole::kSubmit;
    if (words[1] == "administer") token.role = AccessRole::kAdminister;
    if (words[1] != AccessRoleName(token.role)) return fault("ROLE is none of view, submit, administer");
    if (!IsUserName(token.name)) return fault("NAME is not 1 to 64 of A-Z, a-z, 0-9, '.', '_', '@', '-'");
    if (std::ranges::find(tokens, token.hash, &AccessToken::hash) != tokens.end()) return fault("the same HASH again");
    if (tokens.size() == kMaxTokens) return fault("more than ", kMaxTokens, " tokens");
    tokens.push_back(std::move(token));
  }
  return tokens;
}

absl::StatusOr<std::unique_ptr<TokensFile>> TokensFile::Open(const std::string& path) {
  std::unique_ptr<TokensFile> file(new TokensFile(path));
  MutexLock lock(&file->mutex_);
  TANDEM_RETURN_IF_ERROR(file->Read());
  return file;
}

absl::Status TokensFile::Read() {
  looked_ = MonotonicTime::Now();
  const std::string version = FileVersion(path_);
  if (version == version_) return absl::OkStatus();
  version_ = version;
  TANDEM_RETURN_IF_ERROR(PrivateFile("tokens_file", path_));
  std::error_code error;
  if (const std::uintmax_t size_bytes = std::filesystem::file_size(path_, error); !error && size_bytes > kMaxTokensBytes)
    return absl::InvalidArgumentError(
        absl::StrCat("--tokens_file=", path_, " has ", size_bytes, " bytes; the limit is ", kMaxTokensBytes));
  std::ifstream file(path_, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (!file) return absl::PermissionDeniedError(absl::StrCat("--tokens_file=", path_, " cannot be read"));
  absl::StatusOr<std::vector<AccessToken>> tokens = ParseTokens(text);
  if (!tokens.ok()) return Annotate(tokens.status(), absl::StrCat("--tokens_file=", path_));
  tokens_ = *std::move(tokens);
  return absl::OkStatus();
}

std::optional<AccessToken> TokensFile::Find(std::string_view token) {
  const std::string hash = Sha256Hex(token);
  MutexLock lock(&mutex_);
  if (MonotonicTime::Now() - looked_ >= absl::Seconds(kReloadSeconds)) {
    const std::string version = version_;
    if (const absl::Status status = Read(); !status.ok())
      TANDEM_LOG(kError, "audit", "keeping the tokens as they were: ", status.ToString());
    else if (version != version_)
      TANDEM_LOG(kInfo, "audit", "read --tokens_file again tokens=", tokens_.size());
  }
  const AccessToken* found = nullptr;
  for (const AccessToken& known : tokens_) {
    if (CRYPTO_memcmp(known.hash.data(), hash.data(), hash.size()) == 0) found = &known;
  }
  return found == nullptr ? std::nullopt : std::optional<AccessToken>(*found);
}

RateLimit::Answer RateLimit::Take(const std::string& name, MonotonicTime now) {
  MutexLock lock(&mutex_);
  const double most = 2 * per_second_;
  const bool has_room = buckets_.size() < kMaxNames || buckets_.contains(name);
  const auto [found, is_new] = buckets_.try_emplace(has_room ? name : "", Bucket{.tokens = most, .filled = now});
  Bucket& bucket = found->second;
  bucket.tokens = std::min(most, bucket.tokens + per_second_ * absl::ToDoubleSeconds(now - bucket.filled));
  bucket.filled = now;
  if (bucket.tokens < 1) return std::exchange(bucket.is_refusing, true) ? Answer::kNoAgain : Answer::kNo;
  bucket.tokens -= 1;
  bucket.is_refusing = false;
  return Answer::kYes;
}

Access::~Access() = default;

absl::StatusOr<std::shared_ptr<Access>> Access::Create(const AccessOptions& options) {
  std::shared_ptr<Access> access(new Access(options));
  if (!options.tokens_file.empty()) { TANDEM_ASSIGN_OR_RETURN(access->tokens_, TokensFile::Open(options.tokens_file)); }
  return access;
}

std::shared_ptr<grpc::ServerCredentials> Access::Credentials() {
  if (options_.tls_cert.empty()) return grpc::InsecureServerCredentials();
  grpc::experimental::TlsServerCredentialsOptions tls(std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
      options_.tls_key, options_.tls_cert, options_.tls_client_ca, kReloadSeconds));
  tls.watch_identity_key_cert_pairs();
  if (options_.tls_client_ca.empty()) {
    tls.set_cert_request_type(GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE);
  } else {
    tls.watch_root_certs();
    tls.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  }
  std::shared_ptr<grpc::ServerCredentials> credentials = grpc::experimental::TlsServerCredentials(tls);
  credentials->SetAuthMetadataProcessor(std::make_shared<Gate>(this));
  return credentials;
}

std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> Access::MakeAudit(std::shared_ptr<Access> access) {
  return std::make_unique<AuditFactory>(std::move(access));
}

absl::StatusOr<Caller> Access::CallerOf(const grpc::ServerContextBase& context) {
  const std::shared_ptr<const grpc::AuthContext> security = context.auth_context();
  if (IsOverTls(security.get())) {
    return Identify(ValueOf(context.client_metadata(), "authorization"),
                    FirstProperty(security.get(), GRPC_X509_CN_PROPERTY_NAME));
  }
  const std::string user(ValueOf(context.client_metadata(), kUserHeader));
  return Caller{.name = IsUserName(user) ? user : kUnknownUser, .role = AccessRole::kAdminister, .is_local = true};
}

absl::StatusOr<Caller> Access::Identify(std::string_view authorization, const std::string& certificate_name) {
  if (tokens_ == nullptr) {
    return Caller{.name = certificate_name.empty() ? "(certificate without a common name)" : absl::CEscape(certificate_name),
                  .role = AccessRole::kAdminister};
  }
  if (authorization.empty())
    return absl::UnauthenticatedError(
        "no token came with the call: name a token file (token_file, --token_file) or set TANDEM_TOKEN");
  if (!authorization.starts_with(kBearer)) return absl::UnauthenticatedError("the header 'authorization' is not 'Bearer TOKEN'");
  const std::optional<AccessToken> token = tokens_->Find(authorization.substr(kBearer.size()));
  if (!token.has_value())
    return absl::UnauthenticatedError("this server does not know the token: mistyped, taken back, or another node's");
  return Caller{.name = token->name, .role = token->role};
}

absl::Status Access::Admit(std::string_view method, std::string_view authorization, const std::string& certificate_name) {
  const absl::StatusOr<Caller> caller = Identify(authorization, certificate_name);
  const std::string name = caller.ok() ? caller->name : kNobody;
  const char* const role = caller.ok() ? AccessRoleName(caller->role) : "none";
  const RateLimit::Answer answer = limit_.Take(name, MonotonicTime::Now());
  const RpcAccess* const rpc = FindRpcAccess(method);
  absl::Status status;
  if (answer != RateLimit::Answer::kYes) {
    status = absl::ResourceExhaustedError(absl::StrCat(caller.ok() ? name : "callers without a token",
                                                       ": more than --max_requests_per_second=", options_.max_requests_per_second,
                                                       " calls a second"));
  } else if (!caller.ok()) {
    status = caller.status();
  } else if (rpc == nullptr || rpc->least_role == AccessRole::kPair) {
    status = absl::PermissionDeniedError(absl::StrCat(RpcName(method), " is not served over TLS"));
  } else if (caller->role < rpc->least_role) {
    status = absl::PermissionDeniedError(
        absl::StrCat(RpcName(method), " needs the role ", AccessRoleName(rpc->least_role), "; ", name, " has the role ", role));
  }
  if (!status.ok() && answer != RateLimit::Answer::kNoAgain) {
    WriteLog(LogLevel::kWarning, "audit",
             absl::StrCat("refused name=", name, " role=", role, " certificate='", absl::CEscape(certificate_name),
                          "' rpc=", RpcName(method), " result=", absl::StatusCodeToString(status.code())));
  }
  return status;
}

}  // namespace tandem
