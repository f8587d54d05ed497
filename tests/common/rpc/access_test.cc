// Real TLS on the loopback device, with certificates made by openssl. The services behind it answer UNIMPLEMENTED, so that an
// RPC that was let through and one that was refused differ.
#include "common/rpc/access.h"
#include "common/base/clock.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "common/base/hash.h"
#include "common/rpc/channel.h"
#include "grpcpp/impl/codegen/client_unary_call.h"
#include "proto/job.grpc.pb.h"
#include "proto/pool.grpc.pb.h"
#include "proto/rollout.grpc.pb.h"
#include "tests/support/certificates.h"
#include "tests/support/temporary_directory.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;
using testing::MakeAuthority;
using testing::MakeCertificate;
using ::testing::Not;
using testing::ReadText;
using testing::WritePrivate;

constexpr char kGetJob[] = "/tandem.v1.JobService/GetJob";

class GetJobOnly : public v1::JobService::Service {
  grpc::Status GetJob(grpc::ServerContext*, const v1::GetJobRequest* request, v1::JobStatus* response) override {
    response->set_job(request->job());
    return grpc::Status::OK;
  }
  grpc::Status Submit(grpc::ServerContext*, const v1::SubmitRequest*, v1::SubmitResponse* response) override {
    response->set_job("made-1");
    return grpc::Status::OK;
  }
};

class Server {
 public:
  explicit Server(const AccessOptions& options, const std::string& local = "") {
    EXPECT_EQ(CheckAccess(options, "127.0.0.1:0"), absl::OkStatus());
    access_ = Access::Create(options).value();
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", access_->Credentials(), &port);
    if (!local.empty()) builder.AddListeningPort(local, grpc::InsecureServerCredentials());
    std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> interceptors;
    interceptors.push_back(Access::MakeAudit(access_));
    builder.experimental().SetInterceptorCreators(std::move(interceptors));
    builder.RegisterService(&jobs_);
    builder.RegisterService(&rollout_);
    builder.RegisterService(&pool_);
    server_ = builder.BuildAndStart();
    EXPECT_NE(server_, nullptr);
    address_ = absl::StrCat("127.0.0.1:", port);
  }
  ~Server() { server_->Shutdown(GrpcDeadline(MonotonicTime::Now())); }
  const std::string& address() const { return address_; }

 private:
  GetJobOnly jobs_;
  v1::RolloutService::Service rollout_;
  v1::PoolService::Service pool_;
  std::shared_ptr<Access> access_;
  std::unique_ptr<grpc::Server> server_;
  std::string address_;
};

// Sends an empty message, or one that names the job "j-1" where the RPC has one.
grpc::Status Call(const std::shared_ptr<grpc::Channel>& channel, const std::string& method) {
  grpc::ClientContext context;
  context.set_deadline(GrpcDeadline(MonotonicTime::Now() + absl::Seconds(10)));
  v1::GetJobRequest request;
  request.set_job("j-1");
  v1::JobStatus response;
  return grpc::internal::BlockingUnaryCall<v1::GetJobRequest, v1::JobStatus, grpc::protobuf::MessageLite,
                                           grpc::protobuf::MessageLite>(
      channel.get(), grpc::internal::RpcMethod(method.c_str(), grpc::internal::RpcMethod::NORMAL_RPC, channel), &context, request,
      &response);
}

class AccessTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    directory_ = new testing::TemporaryDirectory();
    for (const char* name : {"ca", "other_ca"}) MakeAuthority(directory_->path(), name);
    MakeCertificate(directory_->path(), "ca", "server");
    MakeCertificate(directory_->path(), "ca", "laptop");
    MakeCertificate(directory_->path(), "ca", "expired", -1);
    MakeCertificate(directory_->path(), "other_ca", "stranger");
    WritePrivate(File("tokens"), absl::StrCat("# who\n", Sha256Hex("v"), " view vera\n\n", Sha256Hex("s"), " submit sam\n",
                                              Sha256Hex("a"), "\tadminister  ada@example.org\n"));
  }
  static void TearDownTestSuite() {
    delete directory_;
    directory_ = nullptr;
  }
  static std::string File(const std::string& name) { return directory_->File(name); }
  static AccessOptions Options(bool wants_certificate = true, bool wants_token = true) {
    return {.tls_cert = File("server.pem"),
            .tls_key = File("server.key"),
            .tls_client_ca = wants_certificate ? File("ca.pem") : "",
            .tokens_file = wants_token ? File("tokens") : ""};
  }
  static ChannelSecurity Security(const std::string& ca, const std::string& certificate, const std::string& token) {
    ChannelSecurity security{.ca = ReadText(File(ca + ".pem")), .certificate = "", .key = "", .token = token};
    if (!certificate.empty()) {
      security.certificate = ReadText(File(certificate + ".pem"));
      security.key = ReadText(File(certificate + ".key"));
    }
    return security;
  }
  static testing::TemporaryDirectory* directory_;
};
testing::TemporaryDirectory* AccessTest::directory_ = nullptr;

TEST(RpcAccessTable, NamesEveryRpcOfBothDaemonsOnceAndNoOther) {
  std::vector<std::string> rpcs = {"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch",
                                   "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"};
  for (const char* name : {"JobService", "RolloutService", "PoolService"}) {
    const auto* service = google::protobuf::DescriptorPool::generated_pool()->FindServiceByName(absl::StrCat("tandem.v1.", name));
    ASSERT_NE(service, nullptr) << name;
    for (int i = 0; i < service->method_count(); ++i) {
      rpcs.push_back(absl::StrCat("/", service->full_name(), "/", service->method(i)->name()));
      const RpcAccess* rpc = FindRpcAccess(rpcs.back());
      ASSERT_NE(rpc, nullptr) << rpcs.back() << " has no least role in common/rpc/access.cc";
      // The audit line has the job of every RPC that names one.
      const auto* job = service->method(i)->input_type()->FindFieldByName("job");
      EXPECT_EQ(job != nullptr && rpc->least_role != AccessRole::kPair, rpc->job_of_request != nullptr) << rpcs.back();
    }
  }
  std::vector<std::string> table;
  for (const RpcAccess& rpc : RpcAccessTable()) table.emplace_back(rpc.method);
  EXPECT_THAT(table, ::testing::UnorderedElementsAreArray(rpcs));
}

TEST_F(AccessTest, EachRoleMayWhatTheTableSaysAndNoMore) {
  const Server server(Options());
  const std::vector<std::pair<std::string, AccessRole>> tokens = {
      {"v", AccessRole::kView}, {"s", AccessRole::kSubmit}, {"a", AccessRole::kAdminister}};
  for (const auto& [token, role] : tokens) {
    const auto channel = MakeChannel(server.address(), Security("ca", "laptop", token));
    for (const RpcAccess& rpc : RpcAccessTable()) {
      const grpc::Status status = Call(channel, std::string(rpc.method));
      if (rpc.least_role == AccessRole::kPair) {
        EXPECT_EQ(status.error_code(), grpc::PERMISSION_DENIED) << rpc.method << " by " << token;
        EXPECT_THAT(status.error_message(), HasSubstr("is not served over TLS"));
      } else if (role < rpc.least_role) {
        EXPECT_EQ(status.error_code(), grpc::PERMISSION_DENIED) << rpc.method << " by " << token;
        EXPECT_THAT(status.error_message(), HasSubstr(absl::StrCat("needs the role ", AccessRoleName(rpc.least_role), "; ")));
        EXPECT_THAT(status.error_message(), HasSubstr(absl::StrCat("has the role ", AccessRoleName(role))));
      } else {
        EXPECT_TRUE(status.ok() || status.error_code() == grpc::UNIMPLEMENTED)
            << rpc.method << " by " << token << ": " << status.error_message();
      }
    }
    EXPECT_EQ(Call(channel, "/tandem.v1.JobService/NoSuchRpc").error_code(), grpc::PERMISSION_DENIED);
  }
}

TEST_F(AccessTest, MissingAndWrongTokensAreUnauthenticatedAndSaidSo) {
  const Server server(Options());
  grpc::Status status = Call(MakeChannel(server.address(), Security("ca", "laptop", "")), kGetJob);
  EXPECT_EQ(status.error_code(), grpc::UNAUTHENTICATED);
  EXPECT_THAT(status.error_message(), HasSubstr("no token came with the call: name a token file"));
  for (const std::string token : {"w", "vv", "V"}) {
    status = Call(MakeChannel(server.address(), Security("ca", "laptop", token)), kGetJob);
    EXPECT_EQ(status.error_code(), grpc::UNAUTHENTICATED) << token;
    EXPECT_THAT(status.error_message(), HasSubstr("does not know the token"));
  }
  // The hash itself is no token.
  EXPECT_EQ(Call(MakeChannel(server.address(), Security("ca", "laptop", Sha256Hex("v"))), kGetJob).error_code(),
            grpc::UNAUTHENTICATED);
}

TEST_F(AccessTest, WrongCertificatesDoNotConnect) {
  const Server server(Options());
  EXPECT_TRUE(Call(MakeChannel(server.address(), Security("ca", "laptop", "v")), kGetJob).ok());
  const std::vector<std::pair<std::string, ChannelSecurity>> cases = {
      {"the server's CA is another", Security("other_ca", "laptop", "a")},
      {"no client certificate", Security("ca", "", "a")},
      {"client certificate of another CA", Security("ca", "stranger", "a")},
      {"expired client certificate", Security("ca", "expired", "a")},
      {"plain text", ChannelSecurity()}};
  for (const auto& [name, security] : cases) {
    EXPECT_EQ(Call(MakeChannel(server.address(), security), kGetJob).error_code(), grpc::UNAVAILABLE) << name;
  }
  // A client over TLS of a server that speaks plain text.
  const Server plain(AccessOptions{});
  EXPECT_TRUE(Call(MakeChannel(plain.address()), kGetJob).ok());
  EXPECT_EQ(Call(MakeChannel(plain.address(), Security("ca", "laptop", "a")), kGetJob).error_code(), grpc::UNAVAILABLE);
}

TEST_F(AccessTest, ACertificateOfTheClientCaAloneAdministers) {
  const Server server(Options(true, false));
  EXPECT_EQ(Call(MakeChannel(server.address(), Security("ca", "laptop", "")), "/tandem.v1.JobService/Cancel").error_code(),
            grpc::UNIMPLEMENTED);
  EXPECT_EQ(Call(MakeChannel(server.address(), Security("ca", "laptop", "")), "/tandem.v1.PoolService/AcquireLease").error_code(),
            grpc::PERMISSION_DENIED);
  EXPECT_EQ(Call(MakeChannel(server.address(), Security("ca", "", "")), kGetJob).error_code(), grpc::UNAVAILABLE);
}

TEST_F(AccessTest, CertificatesAreReadAgainWithoutARestart) {
  MakeCertificate(directory_->path(), "ca", "renewed");
  AccessOptions options = Options(false);
  options.tls_cert = File("renewed.pem");
  options.tls_key = File("renewed.key");
  const Server server(options);
  EXPECT_TRUE(Call(MakeChannel(server.address(), Security("ca", "", "v")), kGetJob).ok());
  MakeCertificate(directory_->path(), "other_ca", "renewed");
  const MonotonicTime deadline = MonotonicTime::Now() + absl::Seconds(20);
  bool is_renewed = false;
  while (!is_renewed && MonotonicTime::Now() < deadline) {
    is_renewed = Call(MakeChannel(server.address(), Security("other_ca", "", "v")), kGetJob).ok();
    if (!is_renewed) absl::SleepFor(absl::Milliseconds(100));
  }
  EXPECT_TRUE(is_renewed);
  EXPECT_EQ(Call(MakeChannel(server.address(), Security("ca", "", "s")), kGetJob).error_code(), grpc::UNAVAILABLE);
}

TEST_F(AccessTest, TokensAreReadAgainAndABadFileChangesNothing) {
  AccessOptions options = Options(false);
  options.tokens_file = File("changing");
  WritePrivate(options.tokens_file, Sha256Hex("one") + " view vera\n");
  const Server server(options);
  const auto call = [&](const std::string& token) {
    return Call(MakeChannel(server.address(), Security("ca", "", token)), kGetJob).error_code();
  };
  EXPECT_EQ(call("one"), grpc::OK);
  EXPECT_EQ(call("two"), grpc::UNAUTHENTICATED);
  WritePrivate(options.tokens_file, Sha256Hex("two") + " view vera\n");
  absl::SleepFor(absl::Seconds(kReloadSeconds) + absl::Milliseconds(100));
  EXPECT_EQ(call("two"), grpc::OK);
  EXPECT_EQ(call("one"), grpc::UNAUTHENTICATED);
  WritePrivate(options.tokens_file, "nonsense\n");
  absl::SleepFor(absl::Seconds(kReloadSeconds) + absl::Milliseconds(100));
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(call("two"), grpc::OK);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("keeping the tokens as they were"));
}

TEST_F(AccessTest, TooManyCallsOfOneNameAreRefusedAndOfOthersNot) {
  AccessOptions options = Options(false);
  options.max_requests_per_second = 2;
  const Server server(options);
  const auto vera = MakeChannel(server.address(), Security("ca", "", "v"));
  ::testing::internal::CaptureStderr();
  grpc::Status status;
  int let_through = 0, refused = 0;
  for (int i = 0; i < 20; ++i) {
    status = Call(vera, kGetJob);
    (status.ok() ? let_through : refused) += 1;
  }
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_GE(let_through, 4);
  ASSERT_GT(refused, 0);
  EXPECT_EQ(status.error_code(), grpc::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr("vera: more than --max_requests_per_second=2 calls a second"));
  EXPECT_TRUE(Call(MakeChannel(server.address(), Security("ca", "", "s")), kGetJob).ok());
  const std::string line = "refused name=vera role=view certificate='' rpc=JobService.GetJob result=RESOURCE_EXHAUSTED";
  int lines = 0;
  for (std::size_t at = log.find(line); at != std::string::npos; at = log.find(line, at + 1)) ++lines;
  EXPECT_GE(lines, 1);
  EXPECT_LE(lines, 1 + let_through - 4);  // refusals in a row are one line
}

TEST(RateLimit, LetsABurstThroughThenTheRateAndIsBounded) {
  RateLimit limit(10);
  MonotonicTime now = MonotonicTime::Now();
  for (int i = 0; i < 20; ++i) EXPECT_EQ(limit.Take("a", now), RateLimit::Answer::kYes) << i;
  EXPECT_EQ(limit.Take("a", now), RateLimit::Answer::kNo);
  EXPECT_EQ(limit.Take("a", now), RateLimit::Answer::kNoAgain);
  EXPECT_EQ(limit.Take("b", now), RateLimit::Answer::kYes);
  now = now + absl::Milliseconds(150);
  EXPECT_EQ(limit.Take("a", now), RateLimit::Answer::kYes);
  EXPECT_EQ(limit.Take("a", now), RateLimit::Answer::kNo);
  EXPECT_EQ(limit.Take("a", now), RateLimit::Answer::kNoAgain);
  for (std::size_t i = 0; i < 2 * RateLimit::kMaxNames; ++i) limit.Take(absl::StrCat("n", i), now);
  // Names beyond the bound share one place, which is empty by now.
  EXPECT_NE(limit.Take("yet another", now), RateLimit::Answer::kYes);
}

TEST_F(AccessTest, EveryCallOverTlsIsAnAuditLineAndLocalOnesThatChangeJobs) {
  const std::string socket = "unix:" + File("local.grpc");
  const Server server(Options(), socket);
  const auto remote = MakeChannel(server.address(), Security("ca", "laptop", "s"));
  const auto local = MakeChannel(socket, Security("ca", "laptop", "s"));
  const auto log_of = [](const std::shared_ptr<grpc::Channel>& channel, const std::string& method) {
    ::testing::internal::CaptureStderr();
    Call(channel, method);
    absl::SleepFor(absl::Milliseconds(20));
    return ::testing::internal::GetCapturedStderr();
  };
  EXPECT_THAT(log_of(remote, kGetJob),
              ::testing::MatchesRegex(
                  ".* I .* audit: name=sam role=submit certificate='laptop' peer=ipv4:127.0.0.1:[0-9]+ rpc=JobService.GetJob "
                  "job='j-1' result=OK seconds=[0-9.e-]+\n"));
  EXPECT_THAT(log_of(remote, "/tandem.v1.JobService/Submit"), HasSubstr("rpc=JobService.Submit job='made-1' result=OK"));
  const auto viewer = MakeChannel(server.address(), Security("ca", "laptop", "v"));
  EXPECT_THAT(log_of(viewer, "/tandem.v1.JobService/Cancel"),
              HasSubstr(" W tandem audit: refused name=vera role=view certificate='laptop' rpc=JobService.Cancel "
                        "result=PERMISSION_DENIED\n"));
  EXPECT_THAT(
      log_of(local, "/tandem.v1.JobService/Cancel"),
      ::testing::ContainsRegex("name=\\(local\\) role=operator certificate='' peer=unix:.* rpc=JobService.Cancel job='j-1' "
                               "result=UNIMPLEMENTED"));
  EXPECT_EQ(log_of(local, kGetJob), "");
  const auto log_of_user = [&](const std::shared_ptr<grpc::Channel>& channel, const std::string& user) {
    ::testing::internal::CaptureStderr();
    grpc::ClientContext context;
    context.AddMetadata(kUserHeader, user);
    v1::SubmitResponse response;
    v1::JobService::NewStub(channel)->Submit(&context, v1::SubmitRequest(), &response);
    absl::SleepFor(absl::Milliseconds(20));
    return ::testing::internal::GetCapturedStderr();
  };
  EXPECT_THAT(log_of_user(local, "eve"), HasSubstr("name=eve role=operator"));
  for (const std::string& user : {std::string("two words"), std::string("x name=ada role=administer"), std::string(65, 'x')})
    EXPECT_THAT(log_of_user(local, user), HasSubstr("name=(local) role=operator")) << user;
  EXPECT_THAT(log_of_user(remote, "eve"), HasSubstr("name=sam role=submit")) << "over TLS the header says nothing";
  EXPECT_EQ(log_of(local, "/tandem.v1.PoolService/AcquireLease"), "");
  EXPECT_EQ(Call(local, "/tandem.v1.PoolService/AcquireLease").error_code(), grpc::UNIMPLEMENTED);
}

TEST_F(AccessTest, WhatIsUnsafeOrCannotWorkIsRefusedAtStart) {
  const auto why = [](const AccessOptions& options, const std::string& listen) {
    return std::string(CheckAccess(options, listen).message());
  };
  for (const std::string listen : {"127.0.0.1:7070", "127.9.9.9:7070", "localhost:7070", "[::1]:7070", "unix:/run/x.sock"})
    EXPECT_EQ(why({}, listen), "") << listen;
  for (const std::string listen :
       {"0.0.0.0:7070", "[::]:7070", "10.0.0.1:7070", "node:7070", "unix-abstract:x", "dns:///127.0.0.1:1"}) {
    EXPECT_THAT(why({}, listen), HasSubstr("give --tls_cert, --tls_key, and --tokens_file or --tls_client_ca")) << listen;
    EXPECT_EQ(why(Options(), listen), "") << listen;
  }
  EXPECT_THAT(why(Options(false, false), "0.0.0.0:7070"), HasSubstr("would let anyone in"));
  AccessOptions options = Options();
  options.tls_key = "";
  EXPECT_THAT(why(options, "0.0.0.0:1"), HasSubstr("--tls_cert and --tls_key are given together"));
  EXPECT_THAT(why({.tokens_file = File("tokens")}, "127.0.0.1:1"), HasSubstr("--tokens_file needs --tls_cert"));
  EXPECT_THAT(why({.tls_client_ca = File("ca.pem")}, "127.0.0.1:1"), HasSubstr("--tls_client_ca needs --tls_cert"));
  options = Options();
  options.tls_cert = File("absent.pem");
  EXPECT_THAT(why(options, "0.0.0.0:1"), HasSubstr("--tls_cert=" + options.tls_cert));
  options = Options();
  options.tls_key = File("laptop.key");
  EXPECT_THAT(why(options, "0.0.0.0:1"), HasSubstr("that fits the certificate"));
  options = Options();
  options.tls_cert = File("expired.pem");
  options.tls_key = File("expired.key");
  EXPECT_THAT(why(options, "0.0.0.0:1"), HasSubstr("the certificate has expired"));
  options = Options();
  options.tls_client_ca = File("tokens");
  EXPECT_THAT(why(options, "0.0.0.0:1"), HasSubstr("--tls_client_ca=" + options.tls_client_ca + ": no PEM certificates"));
  options = Options();
  options.max_requests_per_second = 0;
  EXPECT_THAT(why(options, "0.0.0.0:1"), HasSubstr("--max_requests_per_second=0"));

  options = Options();
  options.tokens_file = File("shown");
  WritePrivate(options.tokens_file, "");
  for (const mode_t mode : {0640, 0604, 0620}) {
    ASSERT_EQ(::chmod(options.tokens_file.c_str(), mode), 0);
    EXPECT_THAT(why(options, "0.0.0.0:1"), HasSubstr("group and others must not touch it")) << mode;
  }
  options = Options();
  ASSERT_EQ(::chmod(options.tls_key.c_str(), 0644), 0);
  EXPECT_THAT(why(options, "0.0.0.0:1"), HasSubstr("--tls_key=" + options.tls_key + " has mode 0644"));
  ASSERT_EQ(::chmod(options.tls_key.c_str(), 0600), 0);
}

TEST(ParseTokens, FaultsNameTheLineAndNeverShowIt) {
  const std::string hash = Sha256Hex("secret");
  const auto why = [](const std::string& text) { return std::string(ParseTokens(text).status().message()); };
  EXPECT_EQ(why(""), "");
  EXPECT_EQ(why(hash + " view a\r\n# x\n"), "");
  EXPECT_THAT(why("# x\nsecret view a\n"), HasSubstr("line 2: HASH is not 64"));
  EXPECT_THAT(why("secret view a\n"), Not(HasSubstr("secret")));
  EXPECT_THAT(why(hash + " view\n"), HasSubstr("line 1: 2 words; must be HASH ROLE NAME"));
  EXPECT_THAT(why(hash + " root a\n"), HasSubstr("ROLE is none of view, submit, administer"));
  EXPECT_THAT(why(hash + " pair a\n"), HasSubstr("ROLE is none of"));
  EXPECT_THAT(why(hash + " view a\"b\n"), HasSubstr("NAME is not"));
  EXPECT_THAT(why(hash + " view a\n" + hash + " submit b\n"), HasSubstr("line 2: the same HASH again"));
  std::string many;
  for (int i = 0; i <= 1024; ++i) absl::StrAppend(&many, Sha256Hex(absl::StrCat(i)), " view a\n");
  EXPECT_THAT(why(many), HasSubstr("line 1025: more than 1024 tokens"));
}

}  // namespace
}  // namespace tandem
