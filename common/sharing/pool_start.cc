// Note [Who makes the pool]
// A daemon that has a pool, or is making one, holds the lock of its role in run_dir for life; the kernel frees it when it dies.
// Under the decision lock a starting daemon looks at the peer's: held, so it joins, waiting while the peer loads; free, so it
// takes its own and makes the pool. A joiner takes its own, under the decision lock too, when it has mapped and checked
// everything. If the offerer died by then, the joiner has all the memory and is the pool's keeper, unless a new peer has begun
// another pool meanwhile. So at every moment all daemons with a pool have the same one, and a dead daemon's files decide nothing.
#include "common/sharing/pool_start.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/time/clock.h"
#include "common/base/check.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/units.h"
#include "common/memory/pool_plan.h"
#include "common/model/model_source.h"
#include "common/model/random_model_source.h"
#include "common/rpc/channel.h"
#include "common/sharing/fd_channel.h"
#include "common/sharing/manifest.h"

namespace tandem {
namespace {

constexpr absl::Duration kCallTimeout = absl::Seconds(5);
constexpr absl::Duration kProbeTimeout = absl::Milliseconds(500);
constexpr absl::Duration kHandOverTimeout = absl::Seconds(10);  // of the descriptors; and a token's life
constexpr absl::Duration kRetryInterval = absl::Milliseconds(50);
constexpr absl::Duration kPredecessorTimeout = absl::Seconds(2);  // a killed predecessor is still being taken down
constexpr absl::Duration kLogInterval = absl::Seconds(5);
constexpr std::uint64_t kDeviceStandingBytes = kGiB;  // each daemon's on a GPU
constexpr std::uint64_t kLeastElasticBytes = 256 * kMiB;

bool MayPass(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) || absl::IsCancelled(status) || absl::IsAborted(status);
}

std::string AbsolutePath(const std::string& path) {
  if (path.starts_with(kRandomModelPrefix)) return path;
  std::error_code error;
  const std::filesystem::path absolute = std::filesystem::weakly_canonical(path, error);
  return error ? path : absolute.string();
}

absl::Status ProtectModel(const v1::PoolManifest& manifest, PoolMapping* mapping) {
  for (const v1::RegionKind kind : {v1::REGION_KIND_WEIGHTS, v1::REGION_KIND_MODEL}) {
    const v1::ByteRange range = RangeOf(manifest, kind);
    TANDEM_RETURN_IF_ERROR(mapping->Protect(range.begin_bytes(), range.end_bytes(), Access::kRead));
  }
  return absl::OkStatus();
}

// A GPU's pool is all of its free memory but the reserve. Errors: RESOURCE_EXHAUSTED naming what the GPU has and what is needed.
absl::Status FillDeviceSizes(std::uint64_t reserve_bytes, PoolSizes* sizes) {
  TANDEM_ASSIGN_OR_RETURN(const DeviceMemoryUse use, DriverMemory(Device::kCuda));
  for (std::uint64_t* const bytes : {&sizes->rollout_standing_bytes, &sizes->trainer_standing_bytes}) {
    if (*bytes == 0) *bytes = kDeviceStandingBytes;
  }
  sizes->elastic_on_chunk = true;
  const std::string gpu = absl::StrCat("pool: the GPU ", DeviceName(Device::kCuda), " has ", FormatBytes(use.free_bytes),
                                       " free of ", FormatBytes(use.total_bytes));
  if (sizes->pool_bytes > use.free_bytes)
    return absl::ResourceExhaustedError(absl::StrCat(gpu, "; pool_bytes asks for ", FormatBytes(sizes->pool_bytes)));
  if (sizes->pool_bytes != 0) return absl::OkStatus();
  const std::uint64_t left_bytes = use.free_bytes - std::min(use.free_bytes, reserve_bytes);
  const std::uint64_t chunk_bytes = sizes->chunk_bytes != 0 ? sizes->chunk_bytes : 256 * kMiB;
  const std::uint64_t needed_bytes = sizes->weights_bytes + sizes->model_bytes + sizes->rollout_standing_bytes +
                                     sizes->trainer_standing_bytes + kLeastElasticBytes;
  sizes->pool_bytes = left_bytes / chunk_bytes * chunk_bytes;
  if (sizes->pool_bytes >= needed_bytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      gpu, ", of which ", FormatBytes(reserve_bytes), " stay in reserve; needed are ", FormatBytes(needed_bytes), ": weights ",
      FormatBytes(sizes->weights_bytes), ", rollout standing ", FormatBytes(sizes->rollout_standing_bytes), ", trainer standing ",
      FormatBytes(sizes->trainer_standing_bytes), ", elastic at least ", FormatBytes(kLeastElasticBytes)));
}

absl::StatusOr<PoolPlan> PlanPool(const PoolMemberOptions& options, PoolSizes sizes, const PoolMemory& memory) {
  if (memory.device() == Device::kCuda) TANDEM_RETURN_IF_ERROR(FillDeviceSizes(options.reserve_bytes, &sizes));
  TANDEM_ASSIGN_OR_RETURN(PoolPlan plan, PoolPlan::Create(sizes, memory.granularity_bytes()));
  if (memory.dies_with_maker()) {
    plan.chunk_bytes *= plan.num_chunks;
    plan.num_chunks = 1;
  }
  return plan;
}

absl::StatusOr<HeldPool> MakePool(const PoolMemberOptions& options, PoolMemory* memory, FileLock membership) {
  const MonotonicTime begin = MonotonicTime::Now();
  const absl::StatusOr<std::unique_ptr<ModelSource>> source = ModelSource::Open(options.model_path);
  if (!source.ok()) return Annotate(source.status(), absl::StrCat("opening model '", options.model_path, "'"));
  ModelDescription description = (*source)->description();
  TANDEM_ASSIGN_OR_RETURN(description.format, ChooseStorageFormat(options.weight_format, options.device, **source));
  const std::string description_bytes = SerializeModelDescription(description);
  const WeightLayout layout = WeightLayout::Create(description.config, description.format);
  TANDEM_ASSIGN_OR_RETURN(const PoolPlan plan, PlanPool(options,
                                                        {.pool_bytes = options.pool_bytes,
                                                         .chunk_bytes = options.chunk_bytes,
                                                         .weights_bytes = layout.total_bytes,
                                                         .model_bytes = description_bytes.size(),
                                                         .rollout_standing_bytes = options.rollout_standing_bytes,
                                                         .trainer_standing_bytes = options.trainer_standing_bytes},
                                                        *memory));
  TANDEM_RETURN_IF_ERROR(RaiseDescriptorLimit(plan.num_chunks));
  TANDEM_ASSIGN_OR_RETURN(std::vector<UniqueFd> chunks, memory->CreateChunks(plan.num_chunks, plan.chunk_bytes));
  TANDEM_ASSIGN_OR_RETURN(std::unique_ptr<PoolMapping> mapping, memory->Map(chunks, plan.chunk_bytes));

  v1::PoolManifest manifest;
  manifest.set_protocol_version(kProtocolVersion);
  manifest.set_pool_id(absl::BytesToHexString(MakeToken()));
  manifest.set_device_uuid(memory->device_uuid());
  manifest.set_transport(memory->transport());
  manifest.set_dies_with_maker(memory->dies_with_maker());
  manifest.set_chunk_bytes(plan.chunk_bytes);
  manifest.set_num_chunks(plan.num_chunks);
  manifest.mutable_regions()->Add(plan.regions.begin(), plan.regions.end());

  TANDEM_LOG(kInfo, "sharing", "loading model=", options.model_path, " weights=", FormatBytes(layout.total_bytes),
             " pool=", FormatBytes(mapping->size_bytes()), " chunks=", plan.num_chunks, "x", FormatBytes(plan.chunk_bytes));
  const Device device = memory->device();
  if (device == Device::kCuda) TANDEM_RETURN_IF_ERROR(ZeroMemory(device, mapping->base(), mapping->size_bytes()));
  const std::span<std::byte> model = SpanOf(*mapping, RangeOf(manifest, v1::REGION_KIND_MODEL));
  TANDEM_RETURN_IF_ERROR(CopyFromHost(device, model.data(), description_bytes.data(), description_bytes.size()));
  const std::span<std::byte> weights = SpanOf(*mapping, RangeOf(manifest, v1::REGION_KIND_WEIGHTS)).first(layout.total_bytes);
  MonotonicTime logged = MonotonicTime::Now();
  const absl::Status loaded = (*source)->LoadWeights(layout, device, weights, [&](std::uint64_t bytes) {
    if (MonotonicTime::Now() - logged < kLogInterval) return;
    logged = MonotonicTime::Now();
    TANDEM_LOG(kInfo, "sharing", "loading weights bytes=", bytes, " of=", layout.total_bytes);
  });
  if (!loaded.ok()) return Annotate(loaded, absl::StrCat("loading model '", options.model_path, "'"));

  v1::WeightManifest* const facts = manifest.mutable_weights();
  facts->set_model_digest((*source)->digest());
  facts->set_family(description.config.family);
  facts->set_name(description.config.name);
  facts->set_format(ToProto(layout.format));
  facts->set_num_tensors(static_cast<std::uint32_t>(layout.Tensors().size()));
  facts->set_bytes(layout.total_bytes);
  facts->set_description_bytes(description_bytes.size());
  TANDEM_ASSIGN_OR_RETURN(*facts->mutable_sample_checksum(), SampleChecksum(device, weights));
  facts->set_source(AbsolutePath(options.model_path));
  manifest.set_layout_hash(LayoutHash(manifest, layout));
  TANDEM_RETURN_IF_ERROR(ProtectModel(manifest, mapping.get()));
  TANDEM_LOG(kInfo, "sharing", "made pool=", manifest.pool_id().substr(0, 8),
             " seconds=", absl::ToDoubleSeconds(MonotonicTime::Now() - begin));
  const LeaseBook lease(RangeOf(manifest, v1::REGION_KIND_ELASTIC),
                        options.role == v1::ROLE_ROLLOUT ? v1::ROLE_ROLLOUT : v1::ROLE_UNSPECIFIED);
  return HeldPool{.membership = std::move(membership),
                  .chunks = std::move(chunks),
                  .mapping = std::move(mapping),
                  .manifest = std::move(manifest),
                  .lease = lease,
                  .peer = ProcessWatch(),
                  .is_made = true};
}

// One daemon's side of the handshake with a living peer.
class Joiner {
 public:
  Joiner(const PoolMemberOptions& options, const RunDir& run_dir, PoolMemory* memory)
      : options_(options),
        run_dir_(run_dir),
        memory_(memory),
        stub_(v1::PoolService::NewStub(MakeChannel(options.peer_address))) {}

  absl::StatusOr<v1::PoolManifest> Attach(absl::Duration timeout) {
    v1::AttachRequest request;
    request.set_protocol_version(kProtocolVersion);
    request.set_role(options_.role);
    request.set_device_uuid(memory_->device_uuid());
    if (options_.weight_format.has_value()) request.set_weight_format(ToProto(*options_.weight_format));
    request.set_pid(::getpid());
    v1::PoolManifest manifest;
    grpc::ClientContext context;
    context.set_deadline(GrpcDeadline(MonotonicTime::Now() + timeout));
    TANDEM_RETURN_IF_ERROR(FromGrpc(stub_->Attach(&context, request, &manifest)));
    return manifest;
  }

  // Errors that MayPass(): try again.
  absl::StatusOr<HeldPool> Join(MonotonicTime deadline) {
    TANDEM_ASSIGN_OR_RETURN(v1::PoolManifest manifest, Attach(kCallTimeout));
    TANDEM_RETURN_IF_ERROR(CheckManifest(manifest, *memory_));
    TANDEM_RETURN_IF_ERROR(CheckModel(manifest.weights()));
    TANDEM_RETURN_IF_ERROR(RaiseDescriptorLimit(manifest.num_chunks()));
    ProcessWatch offerer;
    TANDEM_ASSIGN_OR_RETURN(std::vector<UniqueFd> chunks, Receive(manifest, &offerer));
    TANDEM_ASSIGN_OR_RETURN(std::unique_ptr<PoolMapping> mapping, memory_->Map(chunks, manifest.chunk_bytes()));
    TANDEM_RETURN_IF_ERROR(ProtectModel(manifest, mapping.get()));
    TANDEM_RETURN_IF_ERROR(CheckContent(manifest, memory_->device(), SpanOf(*mapping, RangeOf(manifest, v1::REGION_KIND_WEIGHTS)),
                                        SpanOf(*mapping, RangeOf(manifest, v1::REGION_KIND_MODEL))));
    LeaseBook lease(RangeOf(manifest, v1::REGION_KIND_ELASTIC), v1::ROLE_UNSPECIFIED);
    TANDEM_RETURN_IF_ERROR(lease.Adopt(manifest.lease()));
    TANDEM_ASSIGN_OR_RETURN(FileLock membership, TakeMembership(offerer, deadline));
    manifest.clear_lease();
    manifest.clear_socket_path();
    manifest.clear_token();
    manifest.clear_offered_by();
    HeldPool pool{.membership = std::move(membership),
                  .chunks = std::move(chunks),
                  .mapping = std::move(mapping),
                  .manifest = std::move(manifest),
                  .lease = lease,
                  .peer = std::move(offerer),
                  .is_made = false};
    TANDEM_RETURN_IF_ERROR(SayReady(&pool, deadline));
    return pool;
  }

 private:
  // The model asked for is the pool's. A path that the maker read too is not opened; nor is one that is no longer there.
  absl::Status CheckModel(const v1::WeightManifest& weights) const {
    if (options_.model_path.empty() || AbsolutePath(options_.model_path) == weights.source()) return absl::OkStatus();
    const absl::StatusOr<std::unique_ptr<ModelSource>> source = ModelSource::Open(options_.model_path);
    if (absl::IsNotFound(source.status())) {
      TANDEM_LOG(kWarning, "sharing", "model=", options_.model_path, " is not there: taking the pool's, ", weights.source());
      return absl::OkStatus();
    }
    if (!source.ok()) return Annotate(source.status(), absl::StrCat("opening model '", options_.model_path, "'"));
    if ((*source)->digest() == weights.model_digest()) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat("pool: model asked for is '", options_.model_path, "' (",
                                                      (*source)->digest(), "), the pool holds '", weights.source(), "' (",
                                                      weights.model_digest(), ")"));
  }

  absl::StatusOr<std::vector<UniqueFd>> Receive(const v1::PoolManifest& manifest, ProcessWatch* offerer) const {
    const MonotonicTime limit = MonotonicTime::Now() + kHandOverTimeout;
    TANDEM_ASSIGN_OR_RETURN(const UniqueFd socket, ConnectUnix(manifest.socket_path(), limit));
    TANDEM_ASSIGN_OR_RETURN(const PeerCredentials peer, PeerCredentialsOf(socket.get()));
    if (peer.uid != ::geteuid())
      return absl::PermissionDeniedError(
          absl::StrCat("socket '", manifest.socket_path(), "' is user ", peer.uid, "'s, not ", ::geteuid(), "'s"));
    absl::StatusOr<ProcessWatch> watch = ProcessWatch::Open(peer.pid);
    if (!watch.ok()) return absl::UnavailableError(watch.status().message());
    *offerer = *std::move(watch);
    TANDEM_RETURN_IF_ERROR(SendToken(socket.get(), manifest.token()));
    return ReceiveDescriptors(socket.get(), manifest.num_chunks(), limit);
  }

  // UNAVAILABLE: the offerer died and another pool has been begun.
  absl::StatusOr<FileLock> TakeMembership(const ProcessWatch& offerer, MonotonicTime deadline) const {
    TANDEM_ASSIGN_OR_RETURN(const FileLock decision, run_dir_.LockDecision(deadline));
    TANDEM_ASSIGN_OR_RETURN(std::optional<FileLock> membership, run_dir_.TryLockMembership(options_.role));
    if (!membership.has_value())
      return absl::AlreadyExistsError(
          absl::StrCat("another ", RoleName(options_.role), " has a pool in '", run_dir_.path(), "'"));
    if (offerer.HasDied()) {
      TANDEM_ASSIGN_OR_RETURN(const bool has_new_peer, run_dir_.IsMember(PeerOf(options_.role)));
      if (has_new_peer) return absl::UnavailableError("the offerer died, its successor has another pool");
    }
    return std::move(*membership);
  }

  // An offerer that dies now leaves this daemon as the pool's keeper.
  absl::Status SayReady(HeldPool* pool, MonotonicTime deadline) {
    v1::ReadyRequest request;
    request.set_pool_id(pool->manifest.pool_id());
    request.set_role(options_.role);
    request.set_sample_checksum(pool->manifest.weights().sample_checksum());
    for (;;) {
      v1::ReadyResponse response;
      grpc::ClientContext context;
      context.set_deadline(GrpcDeadline(std::min(deadline, MonotonicTime::Now() + kCallTimeout)));
      const absl::Status status = FromGrpc(stub_->Ready(&context, request, &response));
      if (status.ok()) return pool->lease.Adopt(response.lease());
      if (pool->peer.HasDied()) break;
      if (!absl::IsUnavailable(status) && !absl::IsDeadlineExceeded(status)) return status;
      if (MonotonicTime::Now() > deadline) return status;
      absl::SleepFor(kRetryInterval);
    }
    if (pool->manifest.dies_with_maker())
      return absl::UnavailableError("the offerer died during the handshake, and its memory with it");
    TANDEM_LOG(kWarning, "sharing",
               "the offerer died during the handshake: keeping pool=", pool->manifest.pool_id().substr(0, 8));
    pool->lease.EndLeaseOf(PeerOf(options_.role), v1::ROLE_UNSPECIFIED);
    if (options_.role == v1::ROLE_ROLLOUT) pool->lease.TakeIfFree(v1::ROLE_ROLLOUT);
    pool->peer = ProcessWatch();
    return absl::OkStatus();
  }

  const PoolMemberOptions& options_;
  const RunDir& run_dir_;
  PoolMemory* const memory_;
  const std::unique_ptr<v1::PoolService::Stub> stub_;
};

}  // namespace

v1::Role PeerOf(v1::Role role) { return role == v1::ROLE_ROLLOUT ? v1::ROLE_TRAINER : v1::ROLE_ROLLOUT; }

v1::ByteRange RangeOf(const v1::PoolManifest& manifest, v1::RegionKind kind) {
  for (const v1::Region& region : manifest.regions()) {
    if (region.kind() == kind) return region.range();
  }
  TANDEM_CHECK(false, "no region ", static_cast<int>(kind));
  return {};
}

std::span<std::byte> SpanOf(const PoolMapping& mapping, const v1::ByteRange& range) {
  return {mapping.base() + range.begin_bytes(), range.end_bytes() - range.begin_bytes()};
}

absl::StatusOr<HeldPool> FindOrMakePool(const PoolMemberOptions& options, const RunDir& run_dir, PoolMemory* memory) {
  const MonotonicTime begin = MonotonicTime::Now();
  const MonotonicTime deadline = begin + options.start_timeout;
  const char* const peer_name = RoleName(PeerOf(options.role));
  absl::Status last;
  MonotonicTime logged = MonotonicTime::InfinitePast();
  for (;;) {
    Joiner joiner(options, run_dir, memory);  // with a channel of its own: a used one waits longer after each failure
    bool has_peer = false;
    std::optional<FileLock> membership;
    {
      TANDEM_ASSIGN_OR_RETURN(const FileLock decision, run_dir.LockDecision(deadline));
      TANDEM_ASSIGN_OR_RETURN(has_peer, run_dir.IsMember(PeerOf(options.role)));
      TANDEM_ASSIGN_OR_RETURN(membership, run_dir.TryLockMembership(options.role));
      if (!membership.has_value()) {
        last =
            absl::AlreadyExistsError(absl::StrCat("another ", RoleName(options.role), " has a pool in '", run_dir.path(), "'"));
        if (MonotonicTime::Now() - begin > kPredecessorTimeout) return last;
      } else if (!has_peer && !options.model_path.empty()) {
        // A daemon that answers here has a pool for life, and is none of this folder's.
        if (joiner.Attach(kProbeTimeout).ok())
          return absl::FailedPreconditionError(absl::StrCat("the ", peer_name, " at ", options.peer_address,
                                                            " has a pool in another run_dir than '", run_dir.path(),
                                                            "': give both daemons the same"));
      } else {
        membership.reset();
      }
    }
    if (membership.has_value()) return MakePool(options, memory, std::move(*membership));
    if (has_peer) {
      absl::StatusOr<HeldPool> pool = joiner.Join(deadline);
      if (pool.ok()) {
        TANDEM_LOG(kInfo, "sharing", "joined pool=", pool->manifest.pool_id().substr(0, 8), " of ", peer_name,
                   " seconds=", absl::ToDoubleSeconds(MonotonicTime::Now() - begin));
        return pool;
      }
      if (!MayPass(pool.status())) return Annotate(pool.status(), absl::StrCat("joining the ", peer_name, "'s pool"));
      last = pool.status();
    } else if (last.ok()) {
      last = absl::UnavailableError(
          absl::StrCat("no ", peer_name, " has a pool in '", run_dir.path(), "', and no model is given to make one"));
    }
    if (MonotonicTime::Now() > deadline)
      return absl::DeadlineExceededError(
          absl::StrCat("no pool within ", absl::FormatDuration(options.start_timeout), ": ", last.message()));
    if (MonotonicTime::Now() - logged > kLogInterval) {
      logged = MonotonicTime::Now();
      TANDEM_LOG(kInfo, "sharing", "waiting for the ", peer_name, "'s pool because=", std::string(last.message()));
    }
    absl::SleepFor(kRetryInterval);
  }
}

}  // namespace tandem
