// A daemon of no rooms, in a process of its own: this binary, started again with flags.
#include "common/rpc/daemon.h"
#include "common/base/clock.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "common/rpc/channel.h"
#include "google/protobuf/wrappers.pb.h"
#include "grpcpp/impl/codegen/client_unary_call.h"
#include "proto/job.grpc.pb.h"

namespace tandem {
namespace {

absl::StatusOr<int> ServeNothing(const DaemonConfig& config) {
  if (config.pool.model_path == "absent") return absl::NotFoundError("no such model");
  const auto access = Access::Create(config.access);
  const auto metrics = Metrics::Create(config.metrics_address);
  std::atomic<bool> is_stopped = false;
  const MonotonicTime begin = MonotonicTime::Now();
  v1::JobService::Service unimplemented;
  return Daemon::Serve(
      config, *access, metrics->get(), nullptr, {&unimplemented},
      [](int port) { std::printf("port %d\n", port), std::fflush(stdout); },
      [&] {
        const bool fails = config.pool.model_path == "fail" && MonotonicTime::Now() - begin > absl::Milliseconds(100);
        return fails ? absl::InternalError("engine gave up") : absl::OkStatus();
      },
      [&] {
        is_stopped = true;
        std::printf("stop\n");
        std::fflush(stdout);
      });
}

int RunDaemon(int argc, char** argv) {
  const DaemonConfig config = Daemon::ParseFlags(argc, argv, "rollout_server", v1::ROLE_ROLLOUT, "127.0.0.1:0", "off");
  return Daemon::ExitCode(config, ServeNothing(config));
}

class DaemonProcess {
 public:
  explicit DaemonProcess(std::vector<std::string> flags) {
    static int serial = 0;
    folder_ = absl::StrCat("/tmp/tandem_daemon_test_", ::getpid(), "_", serial++);
    flags.insert(flags.begin(), {"/proc/self/exe", "--data_dir=" + folder_ + "/data"});
    std::vector<char*> argv;
    for (std::string& flag : flags) argv.push_back(flag.data());
    argv.push_back(nullptr);
    int out[2];
    EXPECT_EQ(::pipe(out), 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::dup2(out[1], STDOUT_FILENO);
      ::dup2(out[1], STDERR_FILENO);
      ::setenv("TANDEM_DAEMON_TEST", "1", 1);
      ::execv(argv[0], argv.data());
      ::_exit(127);
    }
    ::close(out[1]);
    out_ = out[0];
  }
  ~DaemonProcess() {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
    ::close(out_);
    std::filesystem::remove_all(folder_);
  }
  // What it wrote, once it holds `part`, or has ended, or after 10 s.
  std::string ReadUntil(const std::string& part) {
    const MonotonicTime deadline = MonotonicTime::Now() + absl::Seconds(10);
    while (text_.find(part) == std::string::npos && MonotonicTime::Now() < deadline) {
      pollfd entry{.fd = out_, .events = POLLIN, .revents = 0};
      if (::poll(&entry, 1, 100) <= 0) continue;
      char buffer[4096];
      const ssize_t size = ::read(out_, buffer, sizeof buffer);
      if (size <= 0) break;
      text_.append(buffer, static_cast<std::size_t>(size));
    }
    return text_;
  }
  int ExitCode() {
    int status = -1;
    ::waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  int Port() {
    const std::string text = ReadUntil("port ");
    return std::atoi(text.substr(text.find("port ") + 5).c_str());
  }
  void Signal(int signal) const { ::kill(pid_, signal); }
  const std::string& folder() const { return folder_; }
  pid_t pid() const { return pid_; }

 private:
  std::string folder_, text_;
  pid_t pid_ = -1;
  int out_ = -1;
};

TEST(Daemon, ServesUntilSignalThenStopsWithZero) {
  for (const int signal : {SIGTERM, SIGINT}) {
    DaemonProcess daemon({});
    const int port = daemon.Port();
    ASSERT_GT(port, 0);
    EXPECT_NE(daemon.ReadUntil("listening").find(absl::StrCat("listening grpc=127.0.0.1:", port, " metrics=off")),
              std::string::npos);
    EXPECT_TRUE(std::filesystem::is_directory(daemon.folder() + "/data"));
    const auto channel = MakeChannel(absl::StrCat("127.0.0.1:", port));
    EXPECT_TRUE(channel->WaitForConnected(GrpcDeadline(MonotonicTime::Now() + absl::Seconds(5))));
    daemon.Signal(signal);
    EXPECT_NE(daemon.ReadUntil("stopped").find("stop\n"), std::string::npos);
    EXPECT_EQ(daemon.ExitCode(), 0);
  }
}

TEST(Daemon, TakenAddressIsAnErrorNotAShare) {
  DaemonProcess first({});
  const int port = first.Port();
  DaemonProcess second({absl::StrCat("--listen=127.0.0.1:", port)});
  EXPECT_NE(second.ReadUntil("cannot listen").find("cannot listen at --listen=127.0.0.1:"), std::string::npos);
  EXPECT_EQ(second.ExitCode(), 2);
}

TEST(Daemon, FoldersOfDataHaveOneDaemonAtATime) {
  DaemonProcess first({});
  ASSERT_GT(first.Port(), 0);
  const std::string folder = "--data_dir=" + first.folder() + "/data";
  DaemonProcess second({folder});
  const std::string said = second.ReadUntil("is in use by");
  EXPECT_NE(said.find(absl::StrCat("is in use by rollout_server, process ", first.pid())), std::string::npos) << said;
  EXPECT_EQ(second.ExitCode(), 1);
  DaemonProcess third({folder});
  absl::SleepFor(absl::Milliseconds(100));
  first.Signal(SIGKILL);
  EXPECT_GT(third.Port(), 0) << "it waits a little for one that ends";
}

TEST(Daemon, PoolsBeyondTheHostsMemoryAreRefused) {
  DaemonProcess daemon({"--device=cpu", "--pool_bytes=900000GiB"});
  EXPECT_NE(daemon.ReadUntil("of which there are").find("--pool_bytes=900000GiB: without a GPU"), std::string::npos);
  EXPECT_EQ(daemon.ExitCode(), 1);
}

TEST(Daemon, BackgroundErrorEndsItWithThree) {
  DaemonProcess daemon({"--model=fail"});
  EXPECT_NE(daemon.ReadUntil("engine gave up").find("engine gave up"), std::string::npos);
  EXPECT_EQ(daemon.ExitCode(), 3);
}

TEST(Daemon, AnErrorBeforeItServesEndsItWithTwo) {
  DaemonProcess daemon({"--model=absent"});
  EXPECT_NE(daemon.ReadUntil("no such model").find("could not start: NOT_FOUND: no such model"), std::string::npos);
  EXPECT_EQ(daemon.ExitCode(), 2);
}

TEST(Daemon, BadFlagsEndItWithOneByName) {
  for (const auto& [flag, part] :
       std::vector<std::pair<std::string, std::string>>{{"--pool_bytes=many", "--pool_bytes"},
                                                        {"--log_level=loud", "loud"},
                                                        {"--device=abacus", "abacus"},
                                                        {"--weights=int3", "int3"},
                                                        {"--listen=0.0.0.0:0", "--tls_cert, --tls_key"},
                                                        {"--listen=127.0.0.1", "--listen=127.0.0.1 is no ADDRESS:PORT"},
                                                        {"--listen=27171", "--listen=27171 is no ADDRESS:PORT"},
                                                        {"--listen=127.0.0.1:70000", "70000 is no ADDRESS:PORT"},
                                                        {"--metrics=on", "--metrics=on is no ADDRESS:PORT"},
                                                        {"--no_such_flag=1", "no_such_flag"},
                                                        {"word", "'word'"}}) {
    DaemonProcess daemon({flag});
    EXPECT_NE(daemon.ReadUntil(part).find(part), std::string::npos) << flag;
    EXPECT_EQ(daemon.ExitCode(), 1) << flag;
  }
}

TEST(Daemon, ARoomsOwnSizesAreReadAsTheSharedOnesAre) {
  EXPECT_EQ(BytesFlag("host_bytes", "32GiB"), std::uint64_t{32} << 30);
  EXPECT_EXIT(BytesFlag("host_bytes", "xx"), ::testing::ExitedWithCode(1), "--host_bytes: 'xx' is not a size");
  EXPECT_EQ(IntFlag("max_streams", 4096, 1, 4096), 4096);
  EXPECT_EXIT(IntFlag("max_streams", 4097, 1, 4096), ::testing::ExitedWithCode(1), "--max_streams: 4097; must be 1 to 4096");
  EXPECT_EXIT(IntFlag("max_streams", 0, 1, 4096), ::testing::ExitedWithCode(1), "--max_streams: 0; must be 1 to 4096");
}

template <typename Request>
grpc::Status Call(const std::shared_ptr<grpc::Channel>& channel, const char* method, const Request& request,
                  grpc_compression_algorithm compression = GRPC_COMPRESS_NONE) {
  grpc::ClientContext context;
  context.set_deadline(GrpcDeadline(MonotonicTime::Now() + absl::Seconds(60)));
  context.set_compression_algorithm(compression);
  v1::JobStatus response;
  return grpc::internal::BlockingUnaryCall<Request, v1::JobStatus, grpc::protobuf::MessageLite, grpc::protobuf::MessageLite>(
      channel.get(), grpc::internal::RpcMethod(method, grpc::internal::RpcMethod::NORMAL_RPC, channel), &context, request,
      &response);
}

TEST(Daemon, AMessageThatCannotBeReadIsALineOfTheLog) {
  DaemonProcess daemon({});
  google::protobuf::BytesValue request;  // of GetJobRequest's form, but that its first field is any bytes
  request.set_value("job\xff");
  const auto channel = MakeChannel(absl::StrCat("127.0.0.1:", daemon.Port()));
  EXPECT_FALSE(Call(channel, "/tandem.v1.JobService/GetJob", request).ok());
  const std::string said = daemon.ReadUntil("invalid UTF-8");
  EXPECT_NE(said.find(" W rollout_server protobuf: String field 'tandem.v1.GetJobRequest.job' contains invalid UTF-8"),
            std::string::npos)
      << said;
  EXPECT_EQ(said.find("libprotobuf"), std::string::npos) << said;
}

// The largest that the daemon's memory has been, in MiB.
std::size_t PeakMib(pid_t pid) {
  std::ifstream status(absl::StrCat("/proc/", pid, "/status"));
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("VmHWM:", 0) == 0) return std::strtoull(line.c_str() + 6, nullptr, 10) / 1024;
  }
  return 0;
}

// Zeros compress a thousandfold: what is small on the wire must not become what fills the node.
TEST(Daemon, AMessageThatUnfoldsIsRefusedBeforeItDoes) {
  DaemonProcess daemon({});
  grpc::ChannelArguments arguments;
  arguments.SetMaxSendMessageSize(-1);
  const auto channel =
      grpc::CreateCustomChannel(absl::StrCat("127.0.0.1:", daemon.Port()), grpc::InsecureChannelCredentials(), arguments);
  EXPECT_TRUE(Call(channel, "/grpc.health.v1.Health/Check", v1::GetJobRequest()).ok());
  const std::size_t before = PeakMib(daemon.pid());
  v1::GetJobRequest request;  // a health check's request has a string as its first field too
  request.set_job(std::string(std::size_t{128} << 20, '\0'));
  for (const grpc_compression_algorithm algorithm : {GRPC_COMPRESS_GZIP, GRPC_COMPRESS_DEFLATE}) {
    const grpc::Status status = Call(channel, "/grpc.health.v1.Health/Check", request, algorithm);
    EXPECT_FALSE(status.ok());
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED) << status.error_message();
  }
  EXPECT_LT(PeakMib(daemon.pid()), before + 64);
  // It goes on, and plain messages are served.
  request.clear_job();
  EXPECT_TRUE(Call(channel, "/grpc.health.v1.Health/Check", request).ok());
}

TEST(Channel, StatusesCrossUnchanged) {
  for (int code = 0; code <= 16; ++code) {
    const absl::Status status(static_cast<absl::StatusCode>(code), code == 0 ? "" : "why");
    EXPECT_EQ(FromGrpc(ToGrpc(status)), status);
  }
}

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) {
  if (std::getenv("TANDEM_DAEMON_TEST") != nullptr) return tandem::RunDaemon(argc, argv);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
