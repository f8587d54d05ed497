// trainer_server: turns completions into a better policy, over the pool that it shares with rollout_server. This file only puts
// the rooms together.
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "common/base/log.h"
#include "common/base/units.h"
#include "common/gpu/device_code.h"
#include "common/model/kv_scale_table.h"
#include "common/model/model_source.h"
#include "common/model/prompt_encoder.h"
#include "common/rpc/daemon.h"
#include "common/sharing/pool_member.h"
#include "common/sharing/standing_allocator.h"
#include "common/torch/arena_allocator.h"
#include "kernels/adamw/adamw.h"
#include "trainer_server/checkpoint/durable_file.h"
#include "trainer_server/http/live_page.h"
#include "trainer_server/plan/node_memory.h"
#include "trainer_server/policy/cuda_policy_model.h"
#include "trainer_server/service/job_service.h"

ABSL_FLAG(std::string, checkpoint_bytes, "0",
          "checkpoints of all jobs together kept under --data_dir ('100GiB'); 0: what the disk has");
ABSL_FLAG(int, content_limit_gib, 64, "data sets and adapters kept under --data_dir, in GiB");
ABSL_FLAG(
    std::string, http_address, "auto",
    "where the live page is served, over https with --tls_cert; port 0 picks one; 'off': not served; auto: 127.0.0.1:7072, and "
    "off where --listen is a socket without TLS");
ABSL_FLAG(int, max_queued_jobs, 20000, "jobs that are queued or paused; further ones are refused");
ABSL_FLAG(int, max_queued_jobs_of_submitter, 10000, "of them, those of one submitter");
ABSL_FLAG(int, peer_patience_minutes, 60, "how long a job waits for rollout_server before it is paused");
ABSL_FLAG(std::string, reward_python, "/usr/bin/python3",
          "Python, 3.9 or later, of reward functions and of programs under test: an absolute path, as of a virtual environment");
ABSL_FLAG(int, reward_workers, 0,
          "groups that are scored at a time, each in a worker of its own; 0: one for each two processors");
ABSL_FLAG(std::string, host_bytes, "0",
          "on a GPU: host memory that may be page-locked for layer inputs ('32GiB'); 0: seven eighths of what is free at start");
ABSL_FLAG(bool, deterministic_attention, false,
          "on a GPU: attention whose gradients are the same bit for bit each time, at about half of the speed on Hopper");

namespace tandem {
namespace {

// What the trainer thread computes with on a GPU; nothing on the CPU.
struct Compute {
  std::unique_ptr<Stream> stream;
  std::span<std::byte> workspace, optimizer_scratch;  // of the standing region, for life
  std::unique_ptr<Gemm> gemm;

  static absl::StatusOr<Compute> Create(Device device, StandingAllocator* standing) {
    Compute compute;
    if (device == Device::kCpu) return compute;
    TANDEM_ASSIGN_OR_RETURN(compute.stream, Stream::Create(device));
    TANDEM_ASSIGN_OR_RETURN(compute.workspace, standing->Allocate(kGemmWorkspaceBytes, "gemm_workspace"));
    TANDEM_ASSIGN_OR_RETURN(compute.optimizer_scratch, standing->Allocate(AdamWScratchBytes(), "optimizer_scratch"));
    TANDEM_ASSIGN_OR_RETURN(compute.gemm, Gemm::Create(device, compute.workspace));
    return compute;
  }
};

// LibTorch's memory is in the elastic region for one training phase.
class ArenaPhase : public PhaseMemory {
 public:
  ArenaPhase(std::span<std::byte> elastic, Device device) : scope_(elastic, "activations", device) {}
  std::uint64_t peak_bytes() const override { return scope_.peak_bytes(); }

 private:
  const ArenaScope scope_;
};

int RewardWorkers() {
  const int given = IntFlag("reward_workers", absl::GetFlag(FLAGS_reward_workers), 0, 1024);
  const auto processors = static_cast<int>(std::thread::hardware_concurrency());
  return given > 0 ? given : std::max(processors / 2, 1);
}

JobStore::Limits QueueLimits() {
  constexpr int kMost = 1000000;
  const int of_submitter = absl::GetFlag(FLAGS_max_queued_jobs_of_submitter);
  return {.max_queued = IntFlag("max_queued_jobs", absl::GetFlag(FLAGS_max_queued_jobs), 1, kMost),
          .max_queued_of_submitter = IntFlag("max_queued_jobs_of_submitter", of_submitter, 1, kMost)};
}

// Of the live page; empty: not served.
std::string HttpAddressFlag(const DaemonConfig& config) {
  std::string address = absl::GetFlag(FLAGS_http_address);
  // Who keeps other users of the node away by a socket means the page too.
  if (address == "auto")
    address = config.listen.rfind("unix:", 0) == 0 && config.access.tls_cert.empty() ? "off" : "127.0.0.1:7072";
  if (address == "off") return "";
  if (const absl::Status status = LivePage::CheckAddress(address, config.access); !status.ok())
    BadFlag(std::string(status.message()));
  return address;
}

std::uint64_t HostLimitBytes() {
  const std::uint64_t given = BytesFlag("host_bytes", absl::GetFlag(FLAGS_host_bytes));
  return given > 0 ? given : LayerInputHostLimit();
}

std::string RewardPythonFlag() {
  const std::string path = absl::GetFlag(FLAGS_reward_python);
  if (!path.starts_with('/')) BadFlag(absl::StrCat("--reward_python=", path, " is no absolute path, as /usr/bin/python3"));
  if (::access(path.c_str(), X_OK) != 0)
    TANDEM_LOG(kWarning, "main", "no program at --reward_python=", path, ": jobs that need it are refused");
  return path;
}

absl::StatusOr<int> Run(const DaemonConfig& config) {
  const std::uint64_t host_limit_bytes = HostLimitBytes();
  const std::string reward_python = RewardPythonFlag();
  const int reward_workers = RewardWorkers();
  const std::uint64_t checkpoint_bytes = BytesFlag("checkpoint_bytes", absl::GetFlag(FLAGS_checkpoint_bytes));
  const std::string http_address = HttpAddressFlag(config);
  const JobStore::Limits queue_limits = QueueLimits();
  const std::uint64_t content_limit = IntFlag("content_limit_gib", absl::GetFlag(FLAGS_content_limit_gib), 1, 1 << 20) * kGiB;
  const int patience_minutes = IntFlag("peer_patience_minutes", absl::GetFlag(FLAGS_peer_patience_minutes), 1, 60 * 24 * 30);
  TANDEM_ASSIGN_OR_RETURN(const std::shared_ptr<Access> access, Access::Create(config.access));
  TANDEM_ASSIGN_OR_RETURN(const std::unique_ptr<Metrics> metrics, Metrics::Create(config.metrics_address));
  LivePage page(access, Daemon::LocalAddress(config), config.pool.peer_address);
  std::unique_ptr<HttpServer> http;
  if (!http_address.empty()) {
    TANDEM_ASSIGN_OR_RETURN(http, HttpServer::Start(http_address, config.access,
                                                    [&page](const HttpRequest& request) { return page.Answer(request); }));
  }
  TANDEM_ASSIGN_OR_RETURN(const std::unique_ptr<PoolMember> pool, PoolMember::Start(config.pool));
  const v1::PoolManifest manifest = pool->manifest();

  TANDEM_ASSIGN_OR_RETURN(const ModelDescription description, ReadModelDescription(*pool));
  TANDEM_ASSIGN_OR_RETURN(const std::shared_ptr<const Tokenizer> tokenizer, Tokenizer::Create(description.tokenizer));
  TANDEM_ASSIGN_OR_RETURN(const std::shared_ptr<const PromptEncoder> encoder, PromptEncoder::Create(tokenizer));
  const WeightLayout layout = WeightLayout::Create(description.config, description.format);

  TANDEM_RETURN_IF_ERROR(MakeDirectories(config.data_dir + "/jobs"));
  TANDEM_ASSIGN_OR_RETURN(const std::unique_ptr<JobStore> store, JobStore::Open(config.data_dir + "/jobs.sqlite", queue_limits));
  TANDEM_ASSIGN_OR_RETURN(const std::unique_ptr<ContentStore> content,
                          ContentStore::Open(config.data_dir + "/content", content_limit));
  const std::span<std::byte> standing_region = pool->region(v1::REGION_KIND_TRAINER_STANDING);
  const Device device = pool->device();
  const std::unique_ptr<StandingAllocator> standing = StandingAllocator::Create(standing_region, v1::ROLE_TRAINER, device);
  TANDEM_ASSIGN_OR_RETURN(const Compute compute, Compute::Create(device, standing.get()));
  RolloutPeer peer({.address = config.pool.peer_address,
                    .is_attached = [&pool] { return pool->is_peer_attached(); },
                    .patience = absl::Minutes(patience_minutes)});

  SandboxSource sandbox(reward_python);
  LoopEnvironment environment;
  environment.sandbox = &sandbox;
  environment.reward_workers = reward_workers;
  environment.checkpoint_quota = {.jobs_directory = config.data_dir + "/jobs", .limit_bytes = checkpoint_bytes};
  environment.model = description.config;
  environment.tokenizer = tokenizer;
  environment.encoder = encoder;
  environment.member = pool.get();
  environment.standing = standing.get();
  environment.peer = &peer;
  environment.content = content.get();
  environment.metrics = metrics.get();
  environment.device = {device, compute.stream.get(), compute.optimizer_scratch.data()};
  std::vector<v1::OwnedBytes> fixed = standing->Ledger();  // no job has anything there yet
  std::erase_if(fixed, [](const v1::OwnedBytes& owned) { return owned.owner() == "free"; });
  const AttentionOptions attention = CudaAttentionOptions(description.config, absl::GetFlag(FLAGS_deterministic_attention));
  NodeMemoryReader node_memory({description.config, description.format, attention, std::move(fixed), host_limit_bytes},
                               pool.get(), &peer);
  environment.node_memory = [&node_memory] { return node_memory.Read(); };
  const std::byte* const weights = pool->region(v1::REGION_KIND_WEIGHTS).data();
  std::span<std::byte> kv_scales = pool->region(v1::REGION_KIND_ROLLOUT_STANDING);
  if (kv_scales.size() < KvScaleTable::Bytes(description.config)) kv_scales = {};  // nor has a cache in fp8 room there
  const PolicyDevice policy_device{.device = device,
                                   .stream = compute.stream.get(),
                                   .gemm = compute.gemm.get(),
                                   .kv_scales = kv_scales,
                                   .attention = attention,
                                   .host_limit_bytes = host_limit_bytes};
  environment.make_policy = [&description, &layout, weights, policy_device](const AdapterMemory& memory,
                                                                            const PolicyOptions& options) {
    return PolicyModel::Create(description.config, layout, weights, memory, options, policy_device);
  };
  environment.enter_arena = [device](std::span<std::byte> elastic) { return std::make_unique<ArenaPhase>(elastic, device); };
  TANDEM_LOG(kInfo, "main", "compute device=", DescribeDevice(device), " weights=", StorageFormatName(description.format),
             " products=",
             device == Device::kCpu            ? "fp32"
             : IsQuantized(description.format) ? "bf16(dequantised)"
                                               : "bf16",
             " attention=",
             device == Device::kCpu ? "own(packed)" : CudaAttentionName(description.config, description.format, attention));
  JobRunner runner(store.get(), environment, {.directory = config.data_dir});
  const JobSurroundings surroundings{description.config, encoder, content.get(), environment.node_memory, &sandbox};
  JobService service({.surroundings = surroundings,
                      .model = description,
                      .model_path = config.pool.model_path,
                      .device = manifest.device_uuid(),
                      .member = pool.get(),
                      .access = access},
                     store.get(), content.get(), &runner);
  for (const v1::OwnedBytes& owned : runner.Ledger()) {
    TANDEM_LOG(kInfo, "main", "ledger owner=", owned.owner(), " bytes=", owned.bytes(), " (", FormatBytes(owned.bytes()), ")");
  }

  PoolEvents events;
  events.on_peer_attached = [&runner](v1::Role, int pid) {
    TANDEM_LOG(kInfo, "main", "rollout_server attached pid=", pid);
    runner.OnPeerAttached();
  };
  events.on_peer_lost = [](v1::Role) { TANDEM_LOG(kWarning, "main", "rollout_server lost"); };
  return Daemon::Serve(
      config, access, metrics.get(), pool.get(), {&service, pool->service()},
      [&](int) {
        if (http != nullptr)
          TANDEM_LOG(kInfo, "main", "live page at ", config.access.tls_cert.empty() ? "http://" : "https://",
                     http_address.substr(0, http_address.rfind(':')), ":", http->port(), "/");
        pool->Offer(events);
        runner.Start();
      },
      [&] { return runner.background_error(); },
      [&] {
        runner.Stop();
        pool->Stop();
      });
}

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) {
  const tandem::DaemonConfig config =
      tandem::Daemon::ParseFlags(argc, argv, "trainer_server", tandem::v1::ROLE_TRAINER, "127.0.0.1:7070", "127.0.0.1:9090");
  return tandem::Daemon::ExitCode(config, tandem::Run(config));
}
