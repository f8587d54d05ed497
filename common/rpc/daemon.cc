#include "common/rpc/daemon.h"

#include <malloc.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <system_error>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/flags/usage_config.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/time/clock.h"
#include "common/base/check.h"
#include "common/base/clock.h"
#include "common/base/file_lock.h"
#include "common/base/log.h"
#include "common/base/units.h"
#include "common/gpu/device_code.h"
#include "common/rpc/channel.h"
#include "common/rpc/clock_watch.h"
#include "common/rpc/node_watch.h"
#include "google/protobuf/stubs/logging.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/health_check_service_interface.h"

ABSL_FLAG(std::string, listen, "",
          "gRPC address; port 0 picks one. Default 127.0.0.1:7071 (rollout_server), :7070 (trainer_server)");
ABSL_FLAG(std::string, metrics, "",
          "address of /metrics; 'off': not served. Default 127.0.0.1:9091 (rollout_server), :9090 (trainer_server)");
ABSL_FLAG(std::string, peer, "", "gRPC address of the other daemon of the pair; default unix:RUN_DIR/PROGRAM.grpc of the other");
ABSL_FLAG(std::string, tls_cert, "", "PEM certificate chain of --listen, which speaks TLS then; read again when it changes");
ABSL_FLAG(std::string, tls_key, "", "its PEM key, which nobody else may read; read again when it changes");
ABSL_FLAG(
    std::string, tls_client_ca, "",
    "PEM certificates: a client must show one that these signed; without --tokens_file it may do all. Read again when changed");
ABSL_FLAG(
    std::string, tokens_file, "",
    "who may call what over TLS: lines 'HASH ROLE NAME', HASH the token's SHA-256, ROLE view, submit or administer. Read again "
    "when it changes");
ABSL_FLAG(int, max_requests_per_second, 100, "calls over TLS by one name; twice as many at once");
ABSL_FLAG(std::string, run_dir, "",
          "lock and sockets of the pair, the same for both; default $XDG_RUNTIME_DIR/tandem or /tmp/tandem-UID");
ABSL_FLAG(std::string, data_dir, "", "jobs and checkpoints; default $HOME/.local/share/tandem/PROGRAM");
ABSL_FLAG(std::string, model, "", "model directory or GGUF file; read only by the daemon that makes the pool");
ABSL_FLAG(
    std::string, random_weights, "",
    "in place of --model, for benches: random weights in the shape of smollm2-135m, qwen2.5-1.5b, llama-3.1-8b or qwen3-8b; "
    "'qwen3-8b:409600': of so many positions");
ABSL_FLAG(std::string, device, "auto",
          "auto, cpu or cuda; auto: cuda where a GPU is visible that this build has code for. The same for both daemons");
ABSL_FLAG(
    std::string, weights, "auto",
    "format of the base weights: auto (fp32 on the CPU; on a GPU bf16, or fp8 as a checkpoint with block scales has it; a joiner "
    "takes what is there), fp32, bf16, fp8, fp8_block or nf4");
ABSL_FLAG(std::string, pool_transport, "auto",
          "how device memory is shared: auto (exported descriptors: whoever lives keeps it) or cuda_ipc (for drivers that cannot "
          "export; the memory dies with the daemon that made it). The same for both daemons");
ABSL_FLAG(
    std::string, pool_bytes, "0",
    "size of the pool ('3GiB'); 0: on a GPU its free memory less --reserve_bytes, else what model and standing regions need, "
    "and 1.5 GiB elastic");
ABSL_FLAG(std::string, reserve_bytes, "3GiB", "device memory outside the pool, for both daemons' contexts, modules and graphs");
ABSL_FLAG(std::string, chunk_bytes, "0", "size of a chunk; 0: 64 MiB for pools below 8 GiB, else 256 MiB");
ABSL_FLAG(std::string, rollout_standing_bytes, "0", "the rollout server's standing region; 0: 64 MiB, on a GPU 1 GiB");
ABSL_FLAG(std::string, trainer_standing_bytes, "0",
          "the trainer's standing region: adapter slots, masters, moments; 0: 256 MiB, on a GPU 1 GiB");
ABSL_FLAG(bool, strict_leases, false,
          "protect the elastic range (on a GPU: unmap its chunks) while it is not leased, so that a stray access dies at once");
ABSL_FLAG(absl::Duration, start_timeout, absl::Minutes(10), "how long to wait for a peer that is loading weights");
ABSL_FLAG(absl::Duration, holder_timeout, absl::Minutes(2),
          "after which a peer that is stopped (SIGSTOP, a debugger) is reported");
ABSL_FLAG(bool, kill_silent_holder, false, "kill such a holder and take its memory back");
ABSL_FLAG(std::string, log_level, "info", "debug, info, warning or error");

namespace tandem {
namespace {

constexpr int kMaxHeaps = 4;
constexpr absl::Duration kDataDirPatience = absl::Seconds(5);
constexpr int kMaxMessageBytes = 4 << 20;
constexpr std::size_t kMaxSocketAddress = sizeof(sockaddr_un::sun_path) - 1 + sizeof("unix:") - 1;
volatile std::sig_atomic_t stop_signal = 0;  // written by the handler alone

std::uint64_t HostMemoryBytes() {
  return static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

std::string EnvironmentOr(const char* name, const std::string& fallback) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : fallback;
}

Device DeviceFlag() {
  const std::string device = absl::GetFlag(FLAGS_device);
  if (device == "cpu") return Device::kCpu;
  if (device != "auto" && device != "cuda") BadFlag(absl::StrCat("--device=", device, " is none of auto, cpu, cuda"));
  if (HasCudaDevice()) {
    const absl::Status status = CheckDeviceCode();
    if (status.ok()) return Device::kCuda;
    if (device == "cuda") BadFlag(absl::StrCat("--device=cuda: ", status.message()));
    return Device::kCpu;
  }
  if (device == "cuda")
    BadFlag(
        "--device=cuda: no GPU is visible: the driver is missing, CUDA_VISIBLE_DEVICES hides it, or this build has no device "
        "code");
  return Device::kCpu;
}

// After a context is poisoned every call of the driver fails: there is nothing to finish, and what is on disk is whole.
void EndIfPoisoned(Device device) {
  const absl::Status health = ContextHealth(device);
  if (health.ok() || absl::IsResourceExhausted(health)) return;  // no memory for a context is no fault of one
  TANDEM_LOG(kError, "daemon", "ending with code ", kPoisonedContextExitCode,
             ": the device context is poisoned: ", health.ToString());
  std::_Exit(kPoisonedContextExitCode);
}

// "127.0.0.1:0" with the port that was picked; a socket's path as it is.
std::string WithPort(const std::string& address, int port) {
  if (address.starts_with("unix:")) return address;
  return absl::StrCat(address.substr(0, address.rfind(':')), ":", port);
}

// Where a daemon serves those who may enter the run folder: its peer and the node's own clients.
std::string SocketIn(const std::string& run_dir, const std::string& program) {
  return absl::StrCat("unix:", run_dir, "/", program, ".grpc");
}

}  // namespace

void BadFlag(const std::string& message) {
  std::fprintf(stderr, "%s\n", message.c_str());
  std::exit(1);
}

int IntFlag(const char* name, int value, int low, int high) {
  if (value < low || value > high) BadFlag(absl::StrCat("--", name, ": ", value, "; must be ", low, " to ", high));
  return value;
}

std::uint64_t BytesFlag(const char* name, const std::string& text) {
  const absl::StatusOr<std::uint64_t> bytes = ParseBytes(text);
  if (!bytes.ok()) BadFlag(absl::StrCat("--", name, ": ", bytes.status().message()));
  return *bytes;
}

namespace {

// HOST:PORT, or a socket's path where `may_be_socket`.
void CheckAddressFlag(const char* name, const std::string& address, bool may_be_socket) {
  if (may_be_socket && address.starts_with("unix:")) return;
  const std::size_t colon = address.rfind(':');
  int port = -1;
  if (colon == std::string::npos || colon == 0 || !absl::SimpleAtoi(address.substr(colon + 1), &port) || port < 0 || port > 65535)
    BadFlag(absl::StrCat("--", name, "=", address, " is no ADDRESS:PORT, as 127.0.0.1:7070"));
}

// Jobs are taken up by whoever finds them in the folder: one process at a time. One that was killed may take a while to end.
void LockDataDir(const std::string& data_dir, const std::string& program) {
  const std::string path = absl::StrCat(data_dir, "/", program, ".lock");
  static std::optional<FileLock> held;  // for as long as the process lives
  for (const MonotonicTime deadline = MonotonicTime::Now() + kDataDirPatience;; absl::SleepFor(absl::Milliseconds(20))) {
    absl::StatusOr<std::optional<FileLock>> lock = FileLock::TryTake(path, LOCK_EX);
    if (!lock.ok()) BadFlag(absl::StrCat("--data_dir=", data_dir, ": ", lock.status().message()));
    held = *std::move(lock);
    if (held.has_value() || MonotonicTime::Now() > deadline) break;
  }
  if (!held.has_value()) {
    std::string holder = "?";
    std::ifstream(path) >> holder;
    BadFlag(absl::StrCat("--data_dir=", data_dir, " is in use by ", program, ", process ", holder, ": give each its own"));
  }
  std::ofstream(path) << ::getpid();
}

}  // namespace

DaemonConfig Daemon::ParseFlags(int argc, char** argv, const std::string& program, v1::Role role,
                                const std::string& default_listen, const std::string& default_metrics) {
  absl::SetProgramUsageMessage(absl::StrCat(program, ": one half of a Tandem pair"));
  absl::FlagsUsageConfig usage;
  usage.contains_help_flags = [](absl::string_view file) {  // all of ours, not only those of the file with main()
    return absl::EndsWith(file, "common/rpc/daemon.cc") || absl::EndsWith(file, "_server/main.cc");
  };
  usage.version_string = [program] { return absl::StrCat(program, " ", TANDEM_VERSION, "\n"); };
  absl::SetFlagsUsageConfig(usage);
  const std::vector<char*> rest = absl::ParseCommandLine(argc, argv);
  // glibc would give each of many threads a heap of its own, which keeps the most that a job ever needed of it.
  ::mallopt(M_ARENA_MAX, kMaxHeaps);
  if (rest.size() > 1) BadFlag(absl::StrCat("'", rest[1], "' is no flag: ", program, " takes flags only"));
  LogLevel level = LogLevel::kInfo;
  if (!ParseLogLevel(absl::GetFlag(FLAGS_log_level), &level))
    BadFlag(absl::StrCat("--log_level=", absl::GetFlag(FLAGS_log_level), " is none of debug, info, warning, error"));

  const auto or_default = [](const std::string& value, const std::string& fallback) { return value.empty() ? fallback : value; };
  DaemonConfig config;
  config.program = program;
  config.role = role;
  config.listen = or_default(absl::GetFlag(FLAGS_listen), default_listen);
  config.access.tls_cert = absl::GetFlag(FLAGS_tls_cert);
  config.access.tls_key = absl::GetFlag(FLAGS_tls_key);
  config.access.tls_client_ca = absl::GetFlag(FLAGS_tls_client_ca);
  config.access.tokens_file = absl::GetFlag(FLAGS_tokens_file);
  config.access.max_requests_per_second = absl::GetFlag(FLAGS_max_requests_per_second);
  CheckAddressFlag("listen", config.listen, /*may_be_socket=*/true);
  if (const absl::Status status = CheckAccess(config.access, config.listen); !status.ok()) BadFlag(std::string(status.message()));
  config.metrics_address = or_default(absl::GetFlag(FLAGS_metrics), default_metrics);
  if (config.metrics_address == "off") {
    config.metrics_address.clear();
  } else {
    CheckAddressFlag("metrics", config.metrics_address, /*may_be_socket=*/false);
  }
  config.data_dir =
      or_default(absl::GetFlag(FLAGS_data_dir), absl::StrCat(EnvironmentOr("HOME", "/tmp"), "/.local/share/tandem/", program));
  config.pool.role = role;
  config.pool.device = DeviceFlag();
  if (const std::string weights = absl::GetFlag(FLAGS_weights); weights != "auto") {
    config.pool.weight_format = ParseStorageFormat(weights);
    if (!config.pool.weight_format.has_value())
      BadFlag(absl::StrCat("--weights=", weights, " is none of auto, fp32, bf16, fp8, fp8_block, nf4"));
  }
  const std::string transport = absl::GetFlag(FLAGS_pool_transport);
  if (transport != "auto" && transport != "cuda_ipc")
    BadFlag(absl::StrCat("--pool_transport=", transport, " is none of auto, cuda_ipc"));
  config.pool.use_cuda_ipc = transport == "cuda_ipc";
  const std::string runtime_dir = EnvironmentOr("XDG_RUNTIME_DIR", "");
  config.pool.run_dir = or_default(absl::GetFlag(FLAGS_run_dir), runtime_dir.empty() ? absl::StrCat("/tmp/tandem-", ::getuid())
                                                                                     : absl::StrCat(runtime_dir, "/tandem"));
  if (const std::string own = SocketIn(config.pool.run_dir, program); own.size() > kMaxSocketAddress)
    BadFlag(absl::StrCat("--run_dir=", config.pool.run_dir, " is ", own.size() - kMaxSocketAddress,
                         " characters too long for the name of a socket in it"));
  const char* const peer_program = role == v1::ROLE_TRAINER ? "rollout_server" : "trainer_server";
  config.pool.peer_address = or_default(absl::GetFlag(FLAGS_peer), SocketIn(config.pool.run_dir, peer_program));
  config.pool.model_path = absl::GetFlag(FLAGS_model);
  if (const std::string shape = absl::GetFlag(FLAGS_random_weights); !shape.empty()) {
    if (!config.pool.model_path.empty()) BadFlag("--model and --random_weights exclude each other");
    config.pool.model_path = absl::StrCat("random:", shape);
  }
  config.pool.pool_bytes = BytesFlag("pool_bytes", absl::GetFlag(FLAGS_pool_bytes));
  if (const std::uint64_t host_bytes = HostMemoryBytes();
      config.pool.device == Device::kCpu && config.pool.pool_bytes > host_bytes)
    BadFlag(absl::StrCat("--pool_bytes=", absl::GetFlag(FLAGS_pool_bytes),
                         ": without a GPU the pool is host memory, of which there are ", FormatBytes(host_bytes)));
  config.pool.reserve_bytes = BytesFlag("reserve_bytes", absl::GetFlag(FLAGS_reserve_bytes));
  config.pool.chunk_bytes = BytesFlag("chunk_bytes", absl::GetFlag(FLAGS_chunk_bytes));
  config.pool.rollout_standing_bytes = BytesFlag("rollout_standing_bytes", absl::GetFlag(FLAGS_rollout_standing_bytes));
  config.pool.trainer_standing_bytes = BytesFlag("trainer_standing_bytes", absl::GetFlag(FLAGS_trainer_standing_bytes));
  config.pool.strict_leases = absl::GetFlag(FLAGS_strict_leases);
  config.pool.start_timeout = absl::GetFlag(FLAGS_start_timeout);
  config.pool.holder_timeout = absl::GetFlag(FLAGS_holder_timeout);
  config.pool.kill_silent_holder = absl::GetFlag(FLAGS_kill_silent_holder);

  std::error_code error;
  std::filesystem::create_directories(config.data_dir, error);
  if (error) BadFlag(absl::StrCat("--data_dir=", config.data_dir, ": ", error.message()));
  ::signal(SIGPIPE, SIG_IGN);
  StartLog(program, level);
  LockDataDir(config.data_dir, program);
  // Of each message that cannot be read; else they stand between the log's lines in a form of their own.
  google::protobuf::SetLogHandler([](google::protobuf::LogLevel, const char*, int, const std::string& message) {
    TANDEM_LOG(kWarning, "protobuf", message);
  });
  if (absl::GetFlag(FLAGS_device) == "auto" && HasCudaDevice() && config.pool.device == Device::kCpu)
    TANDEM_LOG(kWarning, "daemon", "running on the CPU: ", CheckDeviceCode().ToString());
  return config;
}

std::string Daemon::LocalAddress(const DaemonConfig& config) { return SocketIn(config.pool.run_dir, config.program); }

int Daemon::Serve(const DaemonConfig& config, std::shared_ptr<Access> access, Metrics* metrics, const PoolMember* pool,
                  const std::vector<grpc::Service*>& services, const std::function<void(int grpc_port)>& started,
                  const std::function<absl::Status()>& failed, const std::function<void()>& stop) {
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(config.listen, access->Credentials(), &port);
  // Note [Two listeners]
  // The pair's own calls, which no token may make, go over a socket in the run folder, which is the user's alone (0700): no
  // certificate has to be right for the pair to work, and none that leaks opens the pool.
  if (pool != nullptr) builder.AddListeningPort(LocalAddress(config), grpc::InsecureServerCredentials());
  std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> interceptors;
  interceptors.push_back(Access::MakeAudit(std::move(access)));
  builder.experimental().SetInterceptorCreators(std::move(interceptors));
  builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
  builder.SetMaxSendMessageSize(kMaxMessageBytes);
  // gRPC unfolds a compressed message whole before it looks at its size.
  for (const grpc_compression_algorithm algorithm : {GRPC_COMPRESS_DEFLATE, GRPC_COMPRESS_GZIP})
    builder.SetCompressionAlgorithmSupportStatus(algorithm, false);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);  // a second daemon on the address must fail, not share it
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, kKeepaliveMs / 2);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);  // a client that is gone frees its streams
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveMs);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);  // no bound: a watched job may be queued for hours
  for (grpc::Service* service : services) builder.RegisterService(service);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr || port == 0) {
    TANDEM_LOG(kError, "daemon", "cannot listen at --listen=", config.listen,
               pool == nullptr ? "" : absl::StrCat(", or at ", LocalAddress(config), " for the node's own"),
               ": is the address local, and free?");
    stop();
    return 2;
  }
  // A handler, not a blocked mask: rooms have started threads already, and any thread may be given the signal. Once only, so
  // that a second Ctrl-C ends a shutdown that hangs.
  struct sigaction action {};
  action.sa_handler = [](int signal) { stop_signal = signal; };
  action.sa_flags = SA_RESTART | SA_RESETHAND;
  ::sigaction(SIGTERM, &action, nullptr);
  ::sigaction(SIGINT, &action, nullptr);

  TANDEM_LOG(kInfo, "daemon", "listening grpc=", WithPort(config.listen, port), config.access.tls_cert.empty() ? "" : " tls=on",
             " metrics=", config.metrics_address.empty() ? "off" : WithPort(config.metrics_address, metrics->port()));
  started(port);
  absl::Status background;
  ClockWatch clock;
  NodeWatch node(pool, config.data_dir, metrics);
  while (stop_signal == 0) {
    background = failed();
    if (background.ok()) background = clock.health();
    if (background.ok() && pool != nullptr) background = pool->health();
    if (!background.ok()) break;
    if (node.Look() && pool != nullptr) EndIfPoisoned(pool->device());
    clock.Sleep(absl::Milliseconds(50));
  }
  if (pool != nullptr) EndIfPoisoned(pool->device());
  if (background.ok())
    TANDEM_LOG(kInfo, "daemon", "stopping signal=", static_cast<int>(stop_signal));
  else
    TANDEM_LOG(kError, "daemon", "stopping after ", background.ToString());
  server->GetHealthCheckService()->SetServingStatus(false);
  stop();
  // Streams have been ended by `stop`; idle channels of others would keep the server for the whole time.
  server->Shutdown(GrpcDeadline(MonotonicTime::Now() + absl::Seconds(1)));
  server->Wait();
  if (pool != nullptr) EndIfPoisoned(pool->device());
  TANDEM_LOG(kInfo, "daemon", "stopped");
  return background.ok() ? 0 : 3;
}

int Daemon::ExitCode(const DaemonConfig& config, const absl::StatusOr<int>& served) {
  if (!served.ok()) TANDEM_LOG(kError, "daemon", "could not start: ", served.status().ToString());
  EndIfPoisoned(config.pool.device);
  return served.value_or(2);
}

}  // namespace tandem
