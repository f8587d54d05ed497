#include "client/connection.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <fstream>
#include <map>
#include <string>

#include "tests/support/certificates.h"
#include "tests/support/temporary_directory.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;

class ConnectionTest : public ::testing::Test {
 protected:
  void Write(const std::string& name, const std::string& text, mode_t mode = 0600) {
    std::ofstream(directory_.File(name)) << text;
    ASSERT_EQ(::chmod(directory_.File(name).c_str(), mode), 0);
  }
  void SetUp() override {
    environment_["TANDEM_CONFIG"] = directory_.File("config.json");
    Write("ca.pem", "-----BEGIN CERTIFICATE-----\n", 0644);
    Write("cert.pem", "c", 0644);
    Write("key.pem", "k");
    Write("token", " secret\n");
    Write("config.json", R"({"context": "one", "contexts": {
      "one": {"trainer": "one:7070", "rollout": "one:7071", "ca": "ca.pem", "cert": "cert.pem", "key": "key.pem", "token_file": "token"},
      "two": {"trainer": "two:7070"}}})");
  }
  absl::StatusOr<Connection> Resolve(const ConnectionFlags& flags = {}) const {
    return ResolveConnection(flags, [this](const std::string& name) {
      const auto found = environment_.find(name);
      return found == environment_.end() ? std::string() : found->second;
    });
  }
  std::string Why(const ConnectionFlags& flags = {}) const { return std::string(Resolve(flags).status().message()); }

  testing::TemporaryDirectory directory_;
  std::map<std::string, std::string> environment_;
};

TEST_F(ConnectionTest, FlagsGoBeforeEnvironmentBeforeFileBeforeDefaults) {
  Connection found = Resolve().value();
  EXPECT_EQ(found.trainer_address, "one:7070");
  EXPECT_EQ(found.rollout_address, "one:7071");
  EXPECT_EQ(found.security.ca, "-----BEGIN CERTIFICATE-----\n");
  EXPECT_EQ(found.security.certificate, "c");
  EXPECT_EQ(found.security.key, "k");
  EXPECT_EQ(found.security.token, "secret");

  environment_["TANDEM_TRAINER"] = "three:7070";
  environment_["TANDEM_TOKEN"] = "other";
  found = Resolve().value();
  EXPECT_EQ(found.trainer_address, "three:7070");
  EXPECT_EQ(found.rollout_address, "one:7071");
  EXPECT_EQ(found.security.token, "other");
  ConnectionFlags flags;
  flags.trainer = "four:7070";
  flags.token_file = directory_.File("token");
  found = Resolve(flags).value();
  EXPECT_EQ(found.trainer_address, "four:7070");
  EXPECT_EQ(found.security.token, "secret");

  environment_ = {{"TANDEM_CONFIG", directory_.File("config.json")}, {"TANDEM_CONTEXT", "two"}};
  found = Resolve().value();
  EXPECT_EQ(found.trainer_address, "two:7070");
  EXPECT_EQ(found.rollout_address, "127.0.0.1:7071");
  EXPECT_EQ(found.security.ca, "");
  flags = {};
  flags.context = "one";
  EXPECT_EQ(Resolve(flags).value().trainer_address, "one:7070");
  flags.context = "none";
  EXPECT_EQ(Resolve(flags).value().trainer_address, "127.0.0.1:7070");

  // The usual place, where the file may be absent.
  environment_ = {{"HOME", directory_.path()}};
  EXPECT_EQ(Resolve().value().trainer_address, "127.0.0.1:7070");
  ASSERT_EQ(::mkdir(directory_.File(".config").c_str(), 0700) + ::mkdir(directory_.File(".config/tandem").c_str(), 0700), 0);
  Write(".config/tandem/config.json", R"({"context": "x", "contexts": {"x": {"trainer": "five:7070"}}})");
  EXPECT_EQ(Resolve().value().trainer_address, "five:7070");
}

// Others make gRPC abort, or are nobody to the server.
TEST(UserNameOf, IsTheLoginOrTheUidWhereNoServerTakesThat) {
  for (const char* login : {"ada", "ada@example.org", "a.b-c_9"}) EXPECT_EQ(UserNameOf(login, 1000), login);
  for (const std::string& login : {std::string("j\xc3\xb6rg"), std::string("DOM\\joe"), std::string("svc$"),
                                   std::string("two words"), std::string("a\n"), std::string(), std::string(65, 'x')})
    EXPECT_EQ(UserNameOf(login, 1000), "uid-1000") << login;
}

TEST_F(ConnectionTest, FaultsNameFileKeyAndWhatToDo) {
  ConnectionFlags flags;
  flags.context = "three";
  EXPECT_THAT(Why(flags), HasSubstr("config.json: no context 'three'; there are: one, two"));
  for (const auto& [text, part] : std::map<std::string, std::string>{
           {"[1]", "not a JSON object"},
           {"{", "is not JSON"},
           {"{\"contexts\": " + std::string(100, '['), "nested deeper than 64"},
           {R"({"contextz": {}})", "'contextz' is not \"context\""},
           {R"({"context": 3})", "'context' is not \"context\" with a name"},
           {R"({"context": "a", "contexts": {"a": 3}})", "context 'a' is not an object"},
           {R"({"context": "a", "contexts": {"a": {"tokenfile": "x"}}})", "context 'a': 'tokenfile' is none of trainer, rollout"},
           {R"({"context": "a", "contexts": {"a": {"trainer": 3}}})", "context 'a': 'trainer' is none of"}}) {
    Write("config.json", text);
    EXPECT_THAT(Why(), HasSubstr(part)) << text;
  }
  environment_["TANDEM_CONFIG"] = directory_.File("absent.json");
  EXPECT_THAT(Why(), HasSubstr("configuration file: cannot read " + directory_.File("absent.json")));

  environment_.clear();
  flags = {};
  flags.token_file = directory_.File("token");
  EXPECT_THAT(Why(flags), HasSubstr("over TLS only: give ca"));
  flags.ca = directory_.File("ca.pem");
  EXPECT_EQ(Why(flags), "");
  flags.cert = directory_.File("cert.pem");
  EXPECT_THAT(Why(flags), HasSubstr("cert and key are given together"));
  flags.key = directory_.File("key.pem");
  EXPECT_EQ(Why(flags), "");
  for (const char* name : {"key.pem", "token"}) {
    ASSERT_EQ(::chmod(directory_.File(name).c_str(), 0640), 0);
    EXPECT_THAT(Why(flags), HasSubstr("others may read " + directory_.File(name) + ": chmod 600"));
    ASSERT_EQ(::chmod(directory_.File(name).c_str(), 0600), 0);
  }
  Write("token", "two words");
  EXPECT_THAT(Why(flags), HasSubstr("more than one word"));
  flags.ca = directory_.File("token");
  Write("token", "one");
  EXPECT_THAT(Why(flags), HasSubstr("has no PEM certificate"));
}

TEST_F(ConnectionTest, AddressesAreHostAndPortOrASocket) {
  environment_ = {{"HOME", directory_.path()}};
  ConnectionFlags flags;
  for (const char* address : {"127.0.0.1:7070", "node-1:1", "node-1.example.org:65535", "[::1]:7070", "[fe80::1%eth0]:7070",
                              "unix:/run/trainer.grpc", "unix:trainer.grpc"}) {
    flags.trainer = address;
    EXPECT_EQ(Why(flags), "") << address;
  }
  for (const char* address : {"127.0.0.1",
                              "node-1",
                              ":7070",
                              ":99999",
                              "node-1:0",
                              "node-1:65536",
                              "node-1:99999999999",
                              "node-1:",
                              "node-1:x",
                              "node-1:-1",
                              "node-1:+1",
                              "node-1: 1",
                              "::1:7070",
                              "[::1]",
                              "[]:7070",
                              "[node-1]:7070",
                              "http://127.0.0.1:27070",
                              "http://node-1",
                              "two words:7070",
                              "unix:"}) {
    const std::string words = absl::StrCat("'", address, "'; must be HOST:PORT with a port of 1 to 65535, or unix:PATH");
    flags = {};
    flags.trainer = address;
    EXPECT_EQ(Why(flags), "--trainer: " + words);
    flags = {};
    flags.rollout = address;
    EXPECT_EQ(Why(flags), "--rollout: " + words);
    environment_["TANDEM_ROLLOUT"] = address;
    EXPECT_EQ(Why(), "TANDEM_ROLLOUT: " + words);
    environment_.erase("TANDEM_ROLLOUT");
  }
  environment_["TANDEM_CONFIG"] = directory_.File("config.json");
  Write("config.json", R"({"context": "x", "contexts": {"x": {"trainer": "node-1"}, "y": {"trainer": "node-1:7070"}}})");
  EXPECT_EQ(Why(), directory_.File("config.json") +
                       ": context 'x': trainer: 'node-1'; must be HOST:PORT with a port of 1 to 65535, or unix:PATH");
  flags = {};
  flags.context = "y";
  EXPECT_EQ(Why(flags), "");
}

std::string Told(grpc::StatusCode code, const std::string& words, const std::string& server = "trainer_server") {
  return std::string(CallStatus(grpc::Status(code, words), server, "node-1:7070").message());
}

// The words are those of gRPC 1.51. The same for Python: python_tools_test.py.
TEST(CallStatus, TellsGrpcsWordsAsAPersonWould) {
  for (const char* words : {"", "Method not found!", "Received http2 header with status: 404"}) {
    EXPECT_EQ(Told(grpc::StatusCode::UNIMPLEMENTED, words),
              "trainer_server at node-1:7070: what answers there is none (is it the rollout_server, or another version?)");
  }
  EXPECT_EQ(Told(grpc::StatusCode::UNIMPLEMENTED, "", "rollout_server"),
            "rollout_server at node-1:7070: what answers there is none (is it the trainer_server, or another version?)");
  EXPECT_EQ(Told(grpc::StatusCode::UNIMPLEMENTED, "target_modules is not a list"), "target_modules is not a list") << "its own";
  const auto failed = [](const std::string& words) {
    return Told(grpc::StatusCode::UNAVAILABLE,
                "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.1:7070: " + words);
  };
  EXPECT_THAT(failed("Failed to connect to remote host: Connection refused"),
              HasSubstr("trainer_server at node-1:7070 does not answer: it is not running there, or still starting"));
  EXPECT_EQ(
      failed("Peer name node-1 is not in peer certificate"),
      "trainer_server at node-1:7070: the server's certificate does not name node-1: reach it at an address that it names, or "
      "give it one of this name");
  EXPECT_THAT(failed("Ssl handshake failed: SSL_ERROR_SSL"), HasSubstr("no agreement on TLS"));
  EXPECT_THAT(failed("Socket closed"), HasSubstr("no agreement on TLS"));
  EXPECT_THAT(failed("Failed parsing HTTP/2"), HasSubstr("what answers there does not speak gRPC"));
  EXPECT_EQ(Told(grpc::StatusCode::UNAVAILABLE, "DNS resolution failed for node-1:7070: C-ares status is not ARES_SUCCESS"),
            "trainer_server at node-1:7070: no address is known for its host");
  EXPECT_EQ(Told(grpc::StatusCode::UNAVAILABLE, "stopping"), "trainer_server at node-1:7070: stopping");
  EXPECT_EQ(Told(grpc::StatusCode::NOT_FOUND, "no job 'x'"), "no job 'x'");
}

// What gRPC really says.
TEST_F(ConnectionTest, ACertificateThatLacksTheServersNameIsSaidToLackIt) {
  testing::MakeAuthority(directory_.path(), "authority");
  testing::MakeCertificate(directory_.path(), "authority", "server");
  grpc::SslServerCredentialsOptions tls;
  tls.pem_key_cert_pairs = {{testing::ReadText(directory_.File("server.key")), testing::ReadText(directory_.File("server.pem"))}};
  v1::JobService::Service service;
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.2:0", grpc::SslServerCredentials(tls), &port);
  builder.RegisterService(&service);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  ASSERT_NE(port, 0);
  Connection connection;
  connection.trainer_address = absl::StrCat("127.0.0.2:", port);
  connection.security.ca = testing::ReadText(directory_.File("authority.pem"));
  v1::ListJobsResponse response;
  const absl::Status status =
      CallStatus(connection.Trainer()->ListJobs(connection.Context().get(), v1::ListJobsRequest(), &response), "trainer_server",
                 "node-1:7070");
  server->Shutdown(GrpcDeadline(MonotonicTime::Now() + absl::Seconds(1)));
  EXPECT_THAT(std::string(status.message()), HasSubstr("node-1:7070: the server's certificate does not name 127.0.0.2:"));
}

}  // namespace
}  // namespace tandem
