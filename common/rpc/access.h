// Who may call what. Calls over TLS need a bearer token whose role suffices for the RPC (without a tokens file: a certificate of
// the client CA); calls from within the node, over the loopback device or a socket of the file system, are the operator's. Every
// RPC over TLS, and every local one that changes a job, is one audit line of the log.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/time/time.h"
#include "common/base/clock.h"
#include "common/base/mutex.h"
#include "common/base/status.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/support/server_interceptor.h"

struct ssl_ctx_st;

namespace tandem {

// Each may what those before it may.
enum class AccessRole {
  kView,        // jobs, figures, completions
  kSubmit,      // upload, plan, submit, export, generate; pause, resume, cancel and the priority of own jobs
  kAdminister,  // the same of any job
  kPair,        // the other daemon: no token has it
};
const char* AccessRoleName(AccessRole role);

// An RPC of either daemon and what it takes.
struct RpcAccess {
  std::string_view method;  // "/tandem.v1.JobService/Submit"
  AccessRole least_role;
  bool changes_job = false;                              // audited of local callers too
  std::string (*job_of_request)(const void*) = nullptr;  // of the request message, which is of the RPC's own type
  std::string (*job_of_response)(const void*) = nullptr;
};
std::span<const RpcAccess> RpcAccessTable();
// Null: no RPC of ours, which nobody may call over TLS.
const RpcAccess* FindRpcAccess(std::string_view method);

struct AccessOptions {
  std::string tls_cert = "";  // PEM files; read again within kReloadSeconds of a change
  std::string tls_key = "";
  std::string tls_client_ca = "";  // set: a client must show a certificate that this signed
  std::string tokens_file = "";
  int max_requests_per_second = 100;  // of one name
};
inline constexpr int kReloadSeconds = 1;

// Another text whenever the file, its owner or its mode may have changed; equal while it is absent.
std::string FileVersion(const std::string& path);

// The TLS files of `options` into a context of OpenSSL (an SSL_CTX). Errors: INVALID_ARGUMENT (an expired certificate too),
// NOT_FOUND, PERMISSION_DENIED naming flag and file.
absl::Status LoadTlsFiles(const AccessOptions& options, ssl_ctx_st* context);

// What `listen` and the files allow. Errors: INVALID_ARGUMENT, PERMISSION_DENIED naming flag and cause.
absl::Status CheckAccess(const AccessOptions& options, const std::string& listen);

// A token of the tokens file: a line "HASH ROLE NAME", HASH being the token's SHA-256 in hexadecimal.
struct AccessToken {
  std::string hash;
  AccessRole role;
  std::string name;  // [A-Za-z0-9._@-]{1,64}
};
// Lines that are empty or begin with '#' are skipped. Errors: INVALID_ARGUMENT naming the line.
absl::StatusOr<std::vector<AccessToken>> ParseTokens(std::string_view text);

// The tokens file, read again when it has changed; one that cannot be read or parsed leaves the tokens before it. Thread-safe.
class TokensFile {
 public:
  // Errors: NOT_FOUND, PERMISSION_DENIED (others than its owner may read it), INVALID_ARGUMENT.
  static absl::StatusOr<std::unique_ptr<TokensFile>> Open(const std::string& path);
  // Takes the same time wherever in the file the token stands.
  std::optional<AccessToken> Find(std::string_view token);

 private:
  explicit TokensFile(std::string path) : path_(std::move(path)) {}
  absl::Status Read() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::string path_;
  Mutex mutex_;
  std::vector<AccessToken> tokens_ ABSL_GUARDED_BY(mutex_);
  std::string version_ ABSL_GUARDED_BY(mutex_);  // of the file when it was read: inode, size, time
  MonotonicTime looked_ ABSL_GUARDED_BY(mutex_) = MonotonicTime::InfinitePast();
};

// Calls a second by name: a burst of two seconds' worth, then the rate. Thread-safe; holds at most kMaxNames names, further ones
// share a place.
class RateLimit {
 public:
  static constexpr std::size_t kMaxNames = 4096;
  explicit RateLimit(int per_second) : per_second_(per_second) {}
  enum class Answer { kYes, kNo, kNoAgain };  // kNo: the first refusal since a call was let through
  Answer Take(const std::string& name, MonotonicTime now);

 private:
  struct Bucket {
    double tokens = 0;
    MonotonicTime filled;
    bool is_refusing = false;
  };
  const double per_second_;
  Mutex mutex_;
  std::map<std::string, Bucket> buckets_ ABSL_GUARDED_BY(mutex_);
};

// Who a call is from.
struct Caller {
  std::string name;  // printable
  AccessRole role;
  bool is_local = false;  // from within the node
};
// Of a call from within the node that names no user.
inline constexpr char kUnknownUser[] = "(local)";

// Thread-safe; outlives the server.
class Access {
 public:
  // Requires: CheckAccess was OK. Errors: as TokensFile::Open.
  static absl::StatusOr<std::shared_ptr<Access>> Create(const AccessOptions& options);
  ~Access();

  // Of the listener at --listen: TLS with the checks of each call; plain without --tls_cert.
  std::shared_ptr<grpc::ServerCredentials> Credentials();
  // The audit lines; `access` outlives what is made.
  static std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> MakeAudit(std::shared_ptr<Access> access);

  // Who a call that was let in is from. Errors: UNAUTHENTICATED (its token was taken out of the file meanwhile).
  absl::StatusOr<Caller> CallerOf(const grpc::ServerContextBase& context);
  // `authorization`: the header's value, empty when there is none; `certificate_name`: common name of the client's certificate.
  // Errors: UNAUTHENTICATED (no caller).
  absl::StatusOr<Caller> Identify(std::string_view authorization, const std::string& certificate_name);
  // Whether a call over TLS may go on. Errors: UNAUTHENTICATED, PERMISSION_DENIED, RESOURCE_EXHAUSTED; the log has them.
  absl::Status Admit(std::string_view method, std::string_view authorization, const std::string& certificate_name);

 private:
  explicit Access(const AccessOptions& options) : options_(options), limit_(options.max_requests_per_second) {}

  const AccessOptions options_;
  std::unique_ptr<TokensFile> tokens_;  // null: without a tokens file
  RateLimit limit_;
};

}  // namespace tandem
