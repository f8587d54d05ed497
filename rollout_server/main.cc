// rollout_server: generates completions over the pool that it shares with trainer_server. This file only puts the rooms together.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/units.h"
#include "common/gpu/device_code.h"
#include "common/model/model_source.h"
#include "common/model/peft_adapter.h"
#include "common/model/prompt_encoder.h"
#include "common/rpc/daemon.h"
#include "common/rpc/node_watch.h"
#include "common/sharing/pool_member.h"
#include "rollout_server/engine/engine.h"
#include "rollout_server/model/decoder_model.h"
#include "rollout_server/service/rollout_service.h"

ABSL_FLAG(int, block_tokens, 16, "tokens of one KV block");
ABSL_FLAG(int, max_batch_tokens, 2048, "tokens of one step at most; longer prompts are prefilled in chunks");
ABSL_FLAG(int, max_sequences, 256, "sequences running at a time, in each lane");
ABSL_FLAG(int, max_waiting_sequences, 16384,
          "sequences waiting at a time; beyond it requests are refused with RESOURCE_EXHAUSTED");
ABSL_FLAG(std::string, kv_cache_dtype, "auto",
          "KV cache: auto, on a GPU bf16 or fp8 (E3M4 with scales from the first prompts); auto: bf16, on the CPU fp32");
ABSL_FLAG(int, max_streams, 64, "Generate streams at a time");
ABSL_FLAG(int, max_adapters, 2, "adapters of one step, on a GPU; sequences of more jobs take turns");
ABSL_FLAG(int, max_adapter_rank, 0,
          "rank of any adapter, on a GPU; 0: the largest of 64, 32, 16, 8 that the standing region has room for");

namespace tandem {
namespace {

// The regions by owner; while this daemon holds the elastic region, it is the KV cache and what is left over.
std::vector<v1::OwnedBytes> Ledger(const PoolMember& pool, std::uint64_t kv_cache_bytes) {
  std::vector<v1::OwnedBytes> ledger;
  for (v1::OwnedBytes& owned : pool.RegionLedger()) {
    if (owned.owner() == "elastic" && owned.role() == v1::ROLE_ROLLOUT) {
      v1::OwnedBytes kv_cache = owned;
      kv_cache.set_owner("kv_cache");
      kv_cache.set_bytes(kv_cache_bytes);
      ledger.push_back(std::move(kv_cache));
      owned.set_owner("elastic_unused");
      owned.set_bytes(owned.bytes() - kv_cache_bytes);
    }
    ledger.push_back(std::move(owned));
  }
  return ledger;
}

// The standing region by owner.
std::vector<v1::OwnedBytes> StandingLedger(const PoolMember& pool, const v1::RolloutMemory& memory) {
  std::vector<v1::OwnedBytes> ledger(memory.standing().begin(), memory.standing().end());
  std::uint64_t free_bytes = pool.region(v1::REGION_KIND_ROLLOUT_STANDING).size();
  for (const v1::OwnedBytes& owned : ledger) free_bytes -= std::min(free_bytes, owned.bytes());
  v1::OwnedBytes& free = ledger.emplace_back();
  free.set_owner("free");
  free.set_bytes(free_bytes);
  return ledger;
}

constexpr absl::Duration kMaxCaptureTime = absl::Seconds(1);  // of a start, which a job may wait for

// What model and sampler are made for. On a GPU both have their memory from the standing region, the model's first.
struct DeviceOptions {
  DecoderModelOptions model;
  SamplerOptions sampler;
};

DType KvDType(Device device) {
  const std::string name = absl::GetFlag(FLAGS_kv_cache_dtype);
  if (name == "auto") return device == Device::kCuda ? DType::kBf16 : DType::kFp32;
  if (device == Device::kCuda && name == "bf16") return DType::kBf16;
  if (device == Device::kCuda && name == "fp8") return DType::kFp8E3m4;
  BadFlag(absl::StrCat("--kv_cache_dtype=", name, " is none of auto, on a GPU bf16 and fp8; the CPU's cache is fp32"));
}

// This daemon's own flags, before anything is started.
void CheckFlags(Device device) {
  IntFlag("block_tokens", absl::GetFlag(FLAGS_block_tokens), 1, 1024);
  const int max_sequences = IntFlag("max_sequences", absl::GetFlag(FLAGS_max_sequences), 1, 8192);
  IntFlag("max_batch_tokens", absl::GetFlag(FLAGS_max_batch_tokens), max_sequences, 1 << 20);
  IntFlag("max_waiting_sequences", absl::GetFlag(FLAGS_max_waiting_sequences), 1, 1 << 20);
  IntFlag("max_streams", absl::GetFlag(FLAGS_max_streams), 1, 4096);
  IntFlag("max_adapters", absl::GetFlag(FLAGS_max_adapters), 1, 64);
  IntFlag("max_adapter_rank", absl::GetFlag(FLAGS_max_adapter_rank), 0, kMaxAdapterRank);
  KvDType(device);
}

absl::StatusOr<DeviceOptions> PlanDevice(const PoolMember& pool, const ModelDescription& description, int block_tokens) {
  const ModelConfig& config = description.config;
  DeviceOptions options;
  options.model.device = pool.device();
  options.model.weight_format = description.format;
  options.model.kv_dtype = KvDType(pool.device());
  options.model.block_tokens = block_tokens;
  const std::uint64_t block_bytes = DecoderModel::BlockBytes(config, block_tokens, options.model.kv_dtype);
  options.model.num_blocks =
      static_cast<int>(std::min<std::uint64_t>(pool.region(v1::REGION_KIND_ELASTIC).size() / block_bytes, 1 << 24));
  if (options.model.num_blocks == 0) {
    return absl::ResourceExhaustedError(absl::StrCat("the elastic region has ",
                                                     FormatBytes(pool.region(v1::REGION_KIND_ELASTIC).size()),
                                                     "; a KV block of --block_tokens=", block_tokens, " takes ",
                                                     FormatBytes(block_bytes), ": raise --pool_bytes or lower --block_tokens"));
  }
  options.model.max_batch_tokens = absl::GetFlag(FLAGS_max_batch_tokens);
  options.model.max_sequences = options.model.max_logit_rows = absl::GetFlag(FLAGS_max_sequences);
  options.model.max_adapters = absl::GetFlag(FLAGS_max_adapters);
  options.sampler = {.device = pool.device(), .vocab_size = config.vocab_size, .max_rows = absl::GetFlag(FLAGS_max_sequences)};
  if (pool.device() == Device::kCpu) return options;

  const std::span<std::byte> region = pool.region(v1::REGION_KIND_ROLLOUT_STANDING);
  const std::uint64_t sampler_bytes = Sampler::WorkspaceBytes(options.sampler);
  std::vector<int> ranks = {64, 32, 16, 8};
  if (absl::GetFlag(FLAGS_max_adapter_rank) > 0) ranks = {absl::GetFlag(FLAGS_max_adapter_rank)};
  std::uint64_t model_bytes = 0;
  for (const int rank : ranks) {
    options.model.max_adapter_rank = rank;
    model_bytes = RoundUp(DecoderModel::WorkspaceBytes(config, options.model), 256);
    if (model_bytes + sampler_bytes <= region.size()) break;
  }
  if (model_bytes + sampler_bytes > region.size()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the rollout server's standing region has ", FormatBytes(region.size()),
                     "; --max_batch_tokens=", options.model.max_batch_tokens, " --max_sequences=", options.model.max_sequences,
                     " --max_adapters=", options.model.max_adapters, " and rank ", options.model.max_adapter_rank, " need ",
                     FormatBytes(model_bytes + sampler_bytes), ": raise --rollout_standing_bytes or lower them"));
  }
  options.model.workspace = region.first(model_bytes);
  options.model.max_capture_time = kMaxCaptureTime;
  options.sampler.workspace = region.subspan(model_bytes, sampler_bytes);
  TANDEM_LOG(kInfo, "main", "workspace size=", FormatBytes(model_bytes + sampler_bytes), " of=", FormatBytes(region.size()),
             " max_adapter_rank=", options.model.max_adapter_rank);
  return options;
}

// What a job's memory plan needs to know of this daemon.
v1::RolloutMemory DescribeMemory(const ModelConfig& config, const DeviceOptions& options) {
  v1::RolloutMemory memory;
  memory.set_block_tokens(static_cast<std::uint32_t>(options.model.block_tokens));
  memory.set_kv_block_bytes(DecoderModel::BlockBytes(config, options.model.block_tokens, options.model.kv_dtype));
  memory.set_max_sequences(static_cast<std::uint32_t>(options.model.max_sequences));
  const auto add = [&memory](const char* owner, std::uint64_t size_bytes) {
    v1::OwnedBytes* owned = memory.add_standing();
    owned->set_owner(owner);
    owned->set_bytes(size_bytes);
    owned->set_role(v1::ROLE_ROLLOUT);
    owned->set_in_pool(true);
  };
  for (const WorkspacePart& part : DecoderModel::WorkspaceParts(config, options.model)) add(part.owner, part.size_bytes);
  if (options.model.device == Device::kCuda) add("rollout_sampler", Sampler::WorkspaceBytes(options.sampler));
  return memory;
}

absl::StatusOr<int> Run(const DaemonConfig& config) {
  CheckFlags(config.pool.device);
  TANDEM_ASSIGN_OR_RETURN(const std::shared_ptr<Access> access, Access::Create(config.access));
  TANDEM_ASSIGN_OR_RETURN(const std::unique_ptr<Metrics> metrics, Metrics::Create(config.metrics_address));
  TANDEM_ASSIGN_OR_RETURN(const std::unique_ptr<PoolMember> pool, PoolMember::Start(config.pool));
  const v1::PoolManifest manifest = pool->manifest();
  TANDEM_ASSIGN_OR_RETURN(const ModelDescription description, ReadModelDescription(*pool));
  TANDEM_ASSIGN_OR_RETURN(const std::shared_ptr<const Tokenizer> tokenizer, Tokenizer::Create(description.tokenizer));
  TANDEM_ASSIGN_OR_RETURN(const std::shared_ptr<const PromptEncoder> encoder, PromptEncoder::Create(tokenizer));

  const std::span<std::byte> elastic = pool->region(v1::REGION_KIND_ELASTIC);
  const int block_tokens = absl::GetFlag(FLAGS_block_tokens);
  TANDEM_ASSIGN_OR_RETURN(const DeviceOptions device_options, PlanDevice(*pool, description, block_tokens));
  const int num_blocks = device_options.model.num_blocks;
  const std::uint64_t block_bytes = DecoderModel::BlockBytes(description.config, block_tokens, device_options.model.kv_dtype);
  const WeightLayout layout = WeightLayout::Create(description.config, description.format);
  const MonotonicTime begin = MonotonicTime::Now();
  TANDEM_ASSIGN_OR_RETURN(const std::unique_ptr<DecoderModel> model,
                          DecoderModel::Create(description.config, layout, pool->region(v1::REGION_KIND_WEIGHTS).data(), elastic,
                                               device_options.model));
  const bool is_on_gpu = pool->device() == Device::kCuda;
  if (is_on_gpu) {
    const CapturedSteps steps = model->captured_steps();
    TANDEM_LOG(kInfo, "main", "decode steps captured graphs=", steps.count, " size=", FormatBytes(steps.size_bytes),
               " seconds=", absl::ToDoubleSeconds(MonotonicTime::Now() - begin));
  }
  TANDEM_LOG(kInfo, "main", "compute device=", DescribeDevice(pool->device()), " weights=", StorageFormatName(description.format),
             " products=",
             !is_on_gpu                        ? "fp32"
             : IsQuantized(description.format) ? "bf16(dequantised; few rows from the codes)"
                                               : "bf16",
             " kv_cache=", DTypeName(device_options.model.kv_dtype),
             " attention=", is_on_gpu ? "FlashInfer's prefill template" : "own(paged)");
  TANDEM_LOG(kInfo, "main", "kv_cache blocks=", num_blocks, " block_tokens=", block_tokens,
             " tokens=", std::int64_t{num_blocks} * block_tokens, " bytes=", FormatBytes(num_blocks * block_bytes));

  const std::uint64_t kv_cache_bytes = num_blocks * block_bytes;
  for (const v1::OwnedBytes& owned : Ledger(*pool, kv_cache_bytes)) {
    TANDEM_LOG(kInfo, "main", "ledger owner=", owned.owner(), " size=", FormatBytes(owned.bytes()));
  }

  TANDEM_ASSIGN_OR_RETURN(const std::unique_ptr<Sampler> sampler, Sampler::Create(device_options.sampler));

  EngineOptions engine_options;
  engine_options.num_blocks = num_blocks;
  engine_options.block_tokens = block_tokens;
  engine_options.block_bytes = block_bytes;
  engine_options.max_batch_tokens = absl::GetFlag(FLAGS_max_batch_tokens);
  engine_options.max_sequences = absl::GetFlag(FLAGS_max_sequences);
  engine_options.max_waiting_sequences = absl::GetFlag(FLAGS_max_waiting_sequences);
  engine_options.vocab_size = description.config.vocab_size;
  engine_options.end_token_ids = description.config.end_token_ids;
  engine_options.model_digest = manifest.weights().model_digest();
  engine_options.lease_epoch = pool->lease().epoch();
  engine_options.is_paused = !pool->holds_elastic();
  engine_options.device = pool->device();
  engine_options.runs_ahead = is_on_gpu;
  if (is_on_gpu) engine_options.max_adapters = device_options.model.max_adapters;
  TANDEM_ASSIGN_OR_RETURN(const std::unique_ptr<Engine> engine,
                          Engine::Create(std::move(engine_options), model.get(), sampler.get(), tokenizer, metrics.get()));

  RolloutServiceOptions service_options;
  service_options.limits = {.vocab_size = description.config.vocab_size,
                            .max_positions = description.config.max_positions,
                            .pool_tokens = static_cast<std::uint64_t>(num_blocks) * block_tokens,
                            .max_sequences = static_cast<std::uint64_t>(absl::GetFlag(FLAGS_max_waiting_sequences))};
  service_options.config = description.config;
  service_options.device = manifest.device_uuid();
  const v1::RolloutMemory memory = DescribeMemory(description.config, device_options);
  service_options.memory = memory;
  service_options.trainer_region = pool->region(v1::REGION_KIND_TRAINER_STANDING);
  service_options.trainer_region_begin_bytes = pool->offset_of(service_options.trainer_region.data());
  service_options.pool_device = pool->device();
  if (is_on_gpu) service_options.max_adapter_rank = device_options.model.max_adapter_rank;
  service_options.max_streams = absl::GetFlag(FLAGS_max_streams);
  RolloutService service(std::move(service_options), engine.get(), encoder, [&pool, kv_cache_bytes] {
    return PoolReport{.ledger = Ledger(*pool, kv_cache_bytes), .lease_epoch = pool->lease().epoch()};
  });

  PoolEvents events;
  events.on_peer_attached = [](v1::Role, int pid) { TANDEM_LOG(kInfo, "main", "trainer attached pid=", pid); };
  events.on_peer_lost = [&](v1::Role) {
    TANDEM_LOG(kWarning, "main", "trainer lost");
    if (const absl::Status status = engine->PeerLost(); !status.ok()) TANDEM_LOG(kError, "main", status.ToString());
  };
  events.on_yield_elastic = [&](v1::StreamMode mode, MonotonicTime deadline) { return engine->YieldElastic(mode, deadline); };
  events.on_elastic_returned = [&] {
    if (const absl::Status status = engine->ReturnElastic(pool->lease().epoch()); !status.ok()) {
      TANDEM_LOG(kError, "main", status.ToString());
    }
  };
  ExportMemory(*pool, v1::ROLE_ROLLOUT, StandingLedger(*pool, memory), metrics.get());
  return Daemon::Serve(
      config, access, metrics.get(), pool.get(), {&service, pool->service()}, [&](int) { pool->Offer(events); },
      [&] { return engine->error(); },
      [&] {
        engine->Stop();  // first: it answers a yield that the pool still waits for
        pool->Stop();
      });
}

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) {
  const tandem::DaemonConfig config =
      tandem::Daemon::ParseFlags(argc, argv, "rollout_server", tandem::v1::ROLE_ROLLOUT, "127.0.0.1:7071", "127.0.0.1:9091");
  return tandem::Daemon::ExitCode(config, tandem::Run(config));
}
