#include "common/sharing/pool_member.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <deque>
#include <thread>
#include <utility>

#include "common/base/check.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mutex.h"
#include "common/memory/lease_book.h"
#include "common/rpc/channel.h"
#include "common/sharing/descriptor_server.h"
#include "common/sharing/manifest.h"
#include "common/sharing/pool_start.h"
#include "common/sharing/run_dir.h"

// Note [Who knows the lease]
// The rollout server's book is the truth while it lives and is attached; the trainer's is a copy that its own calls keep up to
// date. A trainer that loses the answer of an acquisition does not know whether it was granted: it remembers the epoch that the
// grant would have (`doubtful_epoch_`), and releases that epoch before it asks anew. A grant whose caller has gone is undone by
// the server. While no rollout server is attached the trainer's book is the only one; a rollout server that attaches takes the
// book over with the answer to Ready. Whoever dies loses what it held.

namespace tandem {
namespace {

constexpr absl::Duration kLongestCall = absl::Minutes(10);  // for callers that set no deadline
constexpr absl::Duration kIdlePoll = absl::Seconds(10);
constexpr absl::Duration kBusyPoll = absl::Milliseconds(500);  // while a peer is attached, or a grant is in doubt
constexpr absl::Duration kDoubtTimeout = absl::Milliseconds(300);

MonotonicTime BoundedDeadline(const grpc::ServerContext& context) {
  return std::min(DeadlineOf(context), MonotonicTime::Now() + kLongestCall);
}

class HeldPoolMember final : public PoolMember {
 public:
  HeldPoolMember(const PoolMemberOptions& options, HeldPool pool, std::unique_ptr<DescriptorServer> server, UniqueFd wake,
                 std::unique_ptr<RunDir> run_dir)
      : options_(options),
        run_dir_(std::move(run_dir)),
        membership_(std::move(pool.membership)),
        chunks_(std::move(pool.chunks)),
        mapping_(std::move(pool.mapping)),
        manifest_(std::move(pool.manifest)),
        is_made_(pool.is_made),
        server_(std::move(server)),
        wake_(std::move(wake)),
        stub_(v1::PoolService::NewStub(MakeChannel(options.peer_address))),
        service_(this),
        book_(pool.lease),
        peer_(std::move(pool.peer)) {
    MutexLock lock(&mutex_);
    ApplyProtection();
  }
  ~HeldPoolMember() override { Stop(); }

  Device device() const override { return options_.device; }
  absl::Status health() const override {
    MutexLock lock(&mutex_);
    return health_;
  }
  v1::PoolService::Service* service() override { return &service_; }

  void Offer(PoolEvents events) override {
    MutexLock lock(&mutex_);
    TANDEM_CHECK(!is_offering_ && !is_stopping_, "a pool is offered once");
    events_ = std::move(events);
    is_offering_ = true;
    if (peer_.is_open()) PostAttached();
    thread_ = std::thread([this] { Watch(); });
  }

  void Stop() override {
    {
      MutexLock lock(&mutex_);
      is_stopping_ = true;
      changed_.SignalAll();
    }
    Wake();
    if (thread_.joinable()) thread_.join();
  }

  std::span<std::byte> region(v1::RegionKind kind) const override { return SpanOf(*mapping_, RangeOf(manifest_, kind)); }
  std::uint64_t offset_of(const void* address) const override {
    const auto* const byte = static_cast<const std::byte*>(address);
    TANDEM_CHECK(byte >= mapping_->base() && byte < mapping_->base() + mapping_->size_bytes(), "an address outside the pool");
    return static_cast<std::uint64_t>(byte - mapping_->base());
  }
  std::byte* address_of(std::uint64_t offset_bytes) const override {
    TANDEM_CHECK(offset_bytes < mapping_->size_bytes(), offset_bytes, " of ", mapping_->size_bytes());
    return mapping_->base() + offset_bytes;
  }
  v1::PoolManifest manifest() const override {
    v1::PoolManifest manifest = manifest_;
    *manifest.mutable_lease() = lease();
    return manifest;
  }
  bool made_pool() const override { return is_made_; }
  bool is_peer_attached() const override {
    MutexLock lock(&mutex_);
    return HasLivingPeer();
  }
  std::vector<v1::OwnedBytes> RegionLedger() const override;

  absl::StatusOr<v1::LeaseState> AcquireElastic(v1::StreamMode mode, MonotonicTime deadline) override;
  absl::Status ReleaseElastic(MonotonicTime deadline) override;
  v1::LeaseState lease() const override {
    MutexLock lock(&mutex_);
    return book_.state();
  }
  bool holds_elastic() const override {
    MutexLock lock(&mutex_);
    return book_.holder() == options_.role;
  }

 private:
  class Service final : public v1::PoolService::Service {
   public:
    explicit Service(HeldPoolMember* member) : member_(member) {}
    grpc::Status Attach(grpc::ServerContext*, const v1::AttachRequest* request, v1::PoolManifest* response) override {
      return ToGrpc(member_->ServeAttach(*request, response));
    }
    grpc::Status Ready(grpc::ServerContext*, const v1::ReadyRequest* request, v1::ReadyResponse* response) override {
      return ToGrpc(member_->ServeReady(*request, response));
    }
    grpc::Status AcquireLease(grpc::ServerContext* context, const v1::AcquireLeaseRequest* request,
                              v1::LeaseState* response) override {
      return ToGrpc(member_->ServeAcquire(*context, *request, response));
    }
    grpc::Status ReleaseLease(grpc::ServerContext* context, const v1::ReleaseLeaseRequest* request,
                              v1::LeaseState* response) override {
      return ToGrpc(member_->ServeRelease(*context, *request, response));
    }

   private:
    HeldPoolMember* const member_;
  };

  // One lease call at a time, and none before the events of earlier changes have been delivered: a daemon must not hear "yield"
  // before the "returned" that precedes it.
  class LeaseCall {
   public:
    static absl::StatusOr<std::unique_ptr<LeaseCall>> Enter(HeldPoolMember* member, MonotonicTime deadline);
    ~LeaseCall() {
      MutexLock lock(&member_->mutex_);
      member_->is_lease_call_running_ = false;
      member_->changed_.SignalAll();
    }

   private:
    explicit LeaseCall(HeldPoolMember* member) : member_(member) {}
    HeldPoolMember* const member_;
  };

  absl::Status ServeAttach(const v1::AttachRequest& request, v1::PoolManifest* response);
  absl::Status ServeReady(const v1::ReadyRequest& request, v1::ReadyResponse* response);
  absl::Status ServeAcquire(const grpc::ServerContext& context, const v1::AcquireLeaseRequest& request, v1::LeaseState* response);
  absl::Status ServeRelease(const grpc::ServerContext& context, const v1::ReleaseLeaseRequest& request, v1::LeaseState* response);

  // Errors: UNAVAILABLE.
  absl::Status CheckOffering() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckLessor(v1::Role role) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool HasLivingPeer() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return peer_.is_open() && !peer_.HasDied(); }
  // Requires: peer_.is_open(), and it has died or asks anew.
  void LosePeer() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PostAttached() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Post(std::function<void()> event) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { pending_events_.push_back(std::move(event)); }
  // With strict leases: the elastic range is this process's to touch exactly while its book says so.
  void ApplyProtection() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { Protect(book_.holder() == options_.role); }
  void Protect(bool is_ours);

  absl::Status CallRelease(std::uint64_t epoch, MonotonicTime deadline, v1::LeaseState* state);
  // Ends a grant that may or may not have been made. Requires: inside a LeaseCall.
  absl::Status ResolveDoubt(MonotonicTime deadline);

  void Watch();  // the member's thread
  void Wake() const {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof one);  // full: it is awake
  }
  void DeliverEvents();
  void CheckSilence();

  const PoolMemberOptions options_;
  const std::unique_ptr<RunDir> run_dir_;
  const FileLock membership_;
  const std::vector<UniqueFd> chunks_;
  const std::unique_ptr<PoolMapping> mapping_;
  const v1::PoolManifest manifest_;
  const bool is_made_;
  const std::unique_ptr<DescriptorServer> server_;
  const UniqueFd wake_;
  const std::unique_ptr<v1::PoolService::Stub> stub_;
  Service service_;
  std::thread thread_;
  MonotonicTime stopped_since_ = MonotonicTime::InfiniteFuture();  // of the peer; confined to the member's thread
  bool is_silence_reported_ = false;                               // confined to the member's thread

  mutable Mutex mutex_;
  CondVar changed_;
  PoolEvents events_;  // written once, by Offer
  bool is_offering_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_stopping_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status health_ ABSL_GUARDED_BY(mutex_);
  LeaseBook book_ ABSL_GUARDED_BY(mutex_);
  ProcessWatch peer_ ABSL_GUARDED_BY(mutex_);
  std::uint64_t peer_generation_ ABSL_GUARDED_BY(mutex_) = 0;  // changes with every attachment and loss
  std::deque<std::function<void()>> pending_events_ ABSL_GUARDED_BY(mutex_);
  bool is_delivering_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_lease_call_running_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<std::uint64_t> doubtful_epoch_ ABSL_GUARDED_BY(mutex_);
};

std::vector<v1::OwnedBytes> HeldPoolMember::RegionLedger() const {
  static constexpr std::array<std::pair<v1::RegionKind, const char*>, 5> kOwners = {
      {{v1::REGION_KIND_WEIGHTS, "weights"},
       {v1::REGION_KIND_MODEL, "model"},
       {v1::REGION_KIND_ROLLOUT_STANDING, "rollout_standing"},
       {v1::REGION_KIND_TRAINER_STANDING, "trainer_standing"},
       {v1::REGION_KIND_ELASTIC, "elastic"}}};
  std::vector<v1::OwnedBytes> ledger;
  for (const auto& [kind, name] : kOwners) {
    v1::OwnedBytes& owned = ledger.emplace_back();
    owned.set_owner(name);
    owned.set_bytes(region(kind).size());
    owned.set_in_pool(true);
    if (kind == v1::REGION_KIND_ROLLOUT_STANDING) owned.set_role(v1::ROLE_ROLLOUT);
    if (kind == v1::REGION_KIND_TRAINER_STANDING) owned.set_role(v1::ROLE_TRAINER);
    if (kind == v1::REGION_KIND_ELASTIC) owned.set_role(lease().holder());
  }
  if (const absl::StatusOr<DeviceMemoryUse> use = DriverMemory(options_.device); use.ok()) {
    v1::OwnedBytes& owned = ledger.emplace_back();
    owned.set_owner("outside_pool");
    const std::uint64_t used_bytes = use->total_bytes - use->free_bytes;
    owned.set_bytes(used_bytes - std::min(used_bytes, mapping_->size_bytes()));
  }
  return ledger;
}

// --- The handshake, offerer's side.

absl::Status HeldPoolMember::CheckOffering() const {
  if (is_stopping_) return absl::UnavailableError(absl::StrCat(RoleName(options_.role), " is stopping"));
  TANDEM_RETURN_IF_ERROR(health_);
  if (!is_offering_)
    return absl::UnavailableError(absl::StrCat(RoleName(options_.role), " is starting: its pool is not offered yet"));
  return absl::OkStatus();
}

absl::Status HeldPoolMember::ServeAttach(const v1::AttachRequest& request, v1::PoolManifest* response) {
  const auto differs = [](const char* what, const auto& asked, const auto& offered) {
    return absl::FailedPreconditionError(
        absl::StrCat("attach: ", what, " asked for is '", asked, "', offered is '", offered, "'"));
  };
  if (request.role() != v1::ROLE_ROLLOUT && request.role() != v1::ROLE_TRAINER)
    return absl::InvalidArgumentError(absl::StrCat("attach: role ", static_cast<int>(request.role()), " is neither daemon's"));
  if (request.pid() <= 0) return absl::InvalidArgumentError(absl::StrCat("attach: pid ", request.pid(), " is no process"));
  MutexLock lock(&mutex_);
  TANDEM_RETURN_IF_ERROR(CheckOffering());
  if (request.protocol_version() != manifest_.protocol_version())
    return differs("protocol version", request.protocol_version(), manifest_.protocol_version());
  if (request.role() == options_.role)
    return absl::AlreadyExistsError(absl::StrCat("attach: the pool's ", RoleName(options_.role), " is process ", ::getpid()));
  if (request.device_uuid() != manifest_.device_uuid()) return differs("device", request.device_uuid(), manifest_.device_uuid());
  const v1::WeightFormat format = manifest_.weights().format();
  const bool is_format_right =
      request.weight_format() == v1::WEIGHT_FORMAT_UNSPECIFIED || request.weight_format() == format ||
      (request.weight_format() == v1::WEIGHT_FORMAT_FP8 && format == v1::WEIGHT_FORMAT_FP8_BLOCK);  // as the checkpoint has it
  if (!is_format_right)
    return differs("weight format", v1::WeightFormat_Name(request.weight_format()), v1::WeightFormat_Name(format));
  if (!request.model_digest().empty() && request.model_digest() != manifest_.weights().model_digest())
    return differs("model digest", request.model_digest(), manifest_.weights().model_digest());
  if (peer_.is_open()) {
    if (!peer_.HasDied() && peer_.pid() != request.pid())
      return absl::AlreadyExistsError(
          absl::StrCat("attach: ", RoleName(request.role()), " is attached already, as process ", peer_.pid()));
    LosePeer();
  }
  *response = manifest_;
  *response->mutable_lease() = book_.state();
  response->set_socket_path(run_dir_->SocketPath(options_.role));
  response->set_token(server_->IssueToken(request.pid()));
  response->set_offered_by(absl::StrCat(RoleName(options_.role), " pid ", ::getpid()));
  TANDEM_LOG(kInfo, "sharing", "attach asked by ", RoleName(request.role()), " pid=", request.pid());
  return absl::OkStatus();
}

absl::Status HeldPoolMember::ServeReady(const v1::ReadyRequest& request, v1::ReadyResponse* response) {
  MutexLock lock(&mutex_);
  TANDEM_RETURN_IF_ERROR(CheckOffering());
  if (request.role() != PeerOf(options_.role))
    return absl::InvalidArgumentError(absl::StrCat("ready: role ", static_cast<int>(request.role()), " is not the peer's"));
  if (request.pool_id() != manifest_.pool_id())
    return absl::FailedPreconditionError(
        absl::StrCat("ready: pool '", request.pool_id(), "' is not this one, '", manifest_.pool_id(), "'"));
  if (request.sample_checksum() != manifest_.weights().sample_checksum())
    return absl::FailedPreconditionError(absl::StrCat("ready: the sample of the weights reads '", request.sample_checksum(),
                                                      "', not '", manifest_.weights().sample_checksum(), "'"));
  std::optional<ProcessWatch> joiner = server_->TakeAccepted();
  if (joiner.has_value()) {
    if (peer_.is_open()) LosePeer();
    peer_ = *std::move(joiner);
    ++peer_generation_;
    if (options_.role == v1::ROLE_TRAINER) book_.TakeIfFree(v1::ROLE_ROLLOUT);
    ApplyProtection();
    PostAttached();
    Wake();
    TANDEM_LOG(kInfo, "sharing", "attached ", RoleName(request.role()), " pid=", peer_.pid(), " epoch=", book_.epoch(),
               " holder=", RoleName(book_.holder()));
  } else if (!HasLivingPeer()) {  // else it asks again because the answer was lost
    return absl::AbortedError("ready: no token of this joiner was accepted; attach first");
  }
  *response->mutable_lease() = book_.state();
  return absl::OkStatus();
}

void HeldPoolMember::PostAttached() {
  Post([this, peer = PeerOf(options_.role), pid = static_cast<int>(peer_.pid())] {
    if (events_.on_peer_attached) events_.on_peer_attached(peer, pid);
  });
}

void HeldPoolMember::LosePeer() {
  const v1::Role lost = PeerOf(options_.role);
  const bool held = book_.EndLeaseOf(lost, options_.role == v1::ROLE_ROLLOUT ? v1::ROLE_ROLLOUT : v1::ROLE_UNSPECIFIED);
  TANDEM_LOG(kWarning, "sharing", "lost ", RoleName(lost), " pid=", peer_.pid(), held ? " which held the lease," : "",
             " epoch=", book_.epoch(), " holder=", RoleName(book_.holder()));
  if (manifest_.dies_with_maker() && !is_made_)
    health_ = absl::UnavailableError(absl::StrCat("the pool's memory died with ", RoleName(lost), " pid ", peer_.pid(),
                                                  ", which made it (transport ", manifest_.transport(), "): start again"));
  peer_ = ProcessWatch();
  ++peer_generation_;
  doubtful_epoch_.reset();
  ApplyProtection();
  Post([this, lost, is_returned = held && options_.role == v1::ROLE_ROLLOUT] {
    if (events_.on_peer_lost) events_.on_peer_lost(lost);
    if (is_returned && events_.on_elastic_returned) events_.on_elastic_returned();
  });
  Wake();
}

// --- Leases: the rollout server's side.

absl::StatusOr<std::unique_ptr<HeldPoolMember::LeaseCall>> HeldPoolMember::LeaseCall::Enter(HeldPoolMember* member,
                                                                                            MonotonicTime deadline) {
  MutexLock lock(&member->mutex_);
  for (;;) {
    TANDEM_RETURN_IF_ERROR(member->CheckOffering());
    if (!member->is_lease_call_running_ && member->pending_events_.empty() && !member->is_delivering_) break;
    const absl::Duration left = deadline - MonotonicTime::Now();
    if (left <= absl::ZeroDuration()) return absl::DeadlineExceededError("lease: an earlier lease call has not ended");
    member->changed_.WaitFor(&member->mutex_, left);
  }
  member->is_lease_call_running_ = true;
  return std::unique_ptr<LeaseCall>(new LeaseCall(member));
}

absl::Status HeldPoolMember::CheckLessor(v1::Role role) const {
  if (options_.role != v1::ROLE_ROLLOUT)
    return absl::FailedPreconditionError(absl::StrCat("lease: rollout_server gives leases; this is ", RoleName(options_.role)));
  if (role == v1::ROLE_TRAINER && !HasLivingPeer()) return absl::FailedPreconditionError("lease: no trainer_server is attached");
  return absl::OkStatus();
}

absl::Status HeldPoolMember::ServeAcquire(const grpc::ServerContext& context, const v1::AcquireLeaseRequest& request,
                                          v1::LeaseState* response) {
  if (request.mode() != v1::STREAM_MODE_DRAIN && request.mode() != v1::STREAM_MODE_PAUSE)
    return absl::InvalidArgumentError(
        absl::StrCat("lease: stream mode ", static_cast<int>(request.mode()), " is neither DRAIN nor PAUSE"));
  const MonotonicTime deadline = BoundedDeadline(context);
  TANDEM_ASSIGN_OR_RETURN(const std::unique_ptr<LeaseCall> call, LeaseCall::Enter(this, deadline));
  std::uint64_t generation = 0;
  {
    MutexLock lock(&mutex_);
    TANDEM_RETURN_IF_ERROR(CheckLessor(request.role()));
    TANDEM_ASSIGN_OR_RETURN(const LeaseBook::Verdict verdict, book_.CheckAcquire(request.role(), request.request_epoch()));
    if (verdict == LeaseBook::Verdict::kAlreadyHeld) {
      *response = book_.state();
      return absl::OkStatus();
    }
    generation = peer_generation_;
  }
  if (events_.on_yield_elastic) TANDEM_RETURN_IF_ERROR(events_.on_yield_elastic(request.mode(), deadline));
  {
    MutexLock lock(&mutex_);
    if (generation == peer_generation_ && HasLivingPeer() && !context.IsCancelled() && !is_stopping_) {
      book_.Grant(request.role());
      ApplyProtection();
      Wake();  // to watch the holder
      *response = book_.state();
      return absl::OkStatus();
    }
  }
  // Nobody is there to take it: the range was never another's, so its epoch stays.
  if (events_.on_elastic_returned) events_.on_elastic_returned();
  return absl::CancelledError("lease: its caller went away while the streams were stopping");
}

absl::Status HeldPoolMember::ServeRelease(const grpc::ServerContext& context, const v1::ReleaseLeaseRequest& request,
                                          v1::LeaseState* response) {
  TANDEM_ASSIGN_OR_RETURN(const std::unique_ptr<LeaseCall> call, LeaseCall::Enter(this, BoundedDeadline(context)));
  bool is_returned = false;
  {
    MutexLock lock(&mutex_);
    TANDEM_RETURN_IF_ERROR(CheckLessor(request.role()));
    TANDEM_ASSIGN_OR_RETURN(is_returned, book_.Release(request.role(), request.epoch()));
    ApplyProtection();
    *response = book_.state();
  }
  if (is_returned && events_.on_elastic_returned) events_.on_elastic_returned();
  return absl::OkStatus();
}

// --- Leases: the trainer's side.

absl::StatusOr<v1::LeaseState> HeldPoolMember::AcquireElastic(v1::StreamMode mode, MonotonicTime deadline) {
  if (options_.role != v1::ROLE_TRAINER)
    return absl::FailedPreconditionError(
        absl::StrCat("lease: ", RoleName(options_.role), " lends the elastic range, it does not acquire it"));
  TANDEM_ASSIGN_OR_RETURN(const std::unique_ptr<LeaseCall> call, LeaseCall::Enter(this, deadline));
  TANDEM_RETURN_IF_ERROR(ResolveDoubt(deadline));
  v1::AcquireLeaseRequest request;
  request.set_role(options_.role);
  request.set_mode(mode);
  std::uint64_t generation = 0;
  {
    MutexLock lock(&mutex_);
    if (book_.holder() == options_.role) return book_.state();
    if (!HasLivingPeer()) return absl::UnavailableError("lease: no rollout_server is attached");
    request.set_request_epoch(book_.epoch());
    generation = peer_generation_;
  }
  grpc::ClientContext context;
  context.set_deadline(GrpcDeadline(deadline));
  v1::LeaseState state;
  const absl::Status status = FromGrpc(stub_->AcquireLease(&context, request, &state));
  MutexLock lock(&mutex_);
  const bool is_same_peer = generation == peer_generation_;
  if (!status.ok()) {
    const bool is_refused = absl::IsAborted(status) || absl::IsFailedPrecondition(status) || absl::IsInvalidArgument(status);
    if (is_same_peer && !is_refused) {
      doubtful_epoch_ = request.request_epoch() + 1;
      Wake();
    }
    return Annotate(status, absl::StrCat("asking ", options_.peer_address, " for the elastic range"));
  }
  if (!is_same_peer) return absl::UnavailableError("lease: the rollout_server died while it granted");
  if (state.holder() != options_.role)
    return absl::InternalError(absl::StrCat("lease: granted to ", RoleName(state.holder()), ", epoch ", state.epoch()));
  TANDEM_RETURN_IF_ERROR(book_.Adopt(state));
  ApplyProtection();
  return book_.state();
}

absl::Status HeldPoolMember::ReleaseElastic(MonotonicTime deadline) {
  if (options_.role != v1::ROLE_TRAINER)
    return absl::FailedPreconditionError(
        absl::StrCat("lease: ", RoleName(options_.role), " lends the elastic range, it does not release it"));
  TANDEM_ASSIGN_OR_RETURN(const std::unique_ptr<LeaseCall> call, LeaseCall::Enter(this, deadline));
  std::uint64_t epoch = 0, generation = 0;
  {
    MutexLock lock(&mutex_);
    if (book_.holder() != options_.role)
      return absl::FailedPreconditionError(absl::StrCat("lease: ", RoleName(options_.role), " releases what ",
                                                        RoleName(book_.holder()), " holds; epoch ", book_.epoch()));
    if (!HasLivingPeer()) {  // the only book there is: the rollout server takes the range when it attaches
      book_.EndLeaseOf(options_.role, v1::ROLE_UNSPECIFIED);
      ApplyProtection();
      return absl::OkStatus();
    }
    epoch = book_.epoch();
    generation = peer_generation_;
    Protect(false);  // before the message: after it the range is another's
  }
  v1::LeaseState state;
  const absl::Status status = CallRelease(epoch, deadline, &state);
  MutexLock lock(&mutex_);
  if (status.ok() && generation == peer_generation_) {
    const absl::Status adopted = book_.Adopt(state);
    ApplyProtection();
    return adopted;
  }
  ApplyProtection();
  if (!status.ok()) return Annotate(status, absl::StrCat("giving the elastic range back to ", options_.peer_address));
  return absl::UnavailableError("lease: the rollout_server died while it took the range back");
}

absl::Status HeldPoolMember::CallRelease(std::uint64_t epoch, MonotonicTime deadline, v1::LeaseState* state) {
  v1::ReleaseLeaseRequest request;
  request.set_role(options_.role);
  request.set_epoch(epoch);
  grpc::ClientContext context;
  context.set_deadline(GrpcDeadline(deadline));
  return FromGrpc(stub_->ReleaseLease(&context, request, state));
}

absl::Status HeldPoolMember::ResolveDoubt(MonotonicTime deadline) {
  std::uint64_t epoch = 0, generation = 0;
  {
    MutexLock lock(&mutex_);
    if (!doubtful_epoch_.has_value()) return absl::OkStatus();
    epoch = *doubtful_epoch_;
    generation = peer_generation_;
  }
  v1::LeaseState state;
  const absl::Status status = CallRelease(epoch, deadline, &state);
  const bool was_not_granted = absl::IsAborted(status) || absl::IsFailedPrecondition(status);
  if (!status.ok() && !was_not_granted) return Annotate(status, "ending an earlier grant whose answer was lost");
  MutexLock lock(&mutex_);
  if (generation != peer_generation_) return absl::OkStatus();  // its peer, and the doubt, are gone
  doubtful_epoch_.reset();
  return status.ok() ? book_.Adopt(state) : absl::OkStatus();
}

void HeldPoolMember::Protect(bool is_ours) {
  if (!options_.strict_leases) return;
  const v1::ByteRange range = RangeOf(manifest_, v1::REGION_KIND_ELASTIC);
  const absl::Status status =
      mapping_->Protect(range.begin_bytes(), range.end_bytes(), is_ours ? Access::kReadWrite : Access::kNone);
  if (!status.ok()) TANDEM_LOG(kError, "sharing", "strict leases: ", std::string(status.message()));
}

// --- The member's thread: sockets, deaths, events.

void HeldPoolMember::Watch() {
  std::vector<pollfd> entries;
  for (;;) {
    entries.clear();
    entries.push_back({.fd = wake_.get(), .events = POLLIN, .revents = 0});
    server_->AppendPoll(&entries);
    absl::Duration timeout = kIdlePoll;
    {
      MutexLock lock(&mutex_);
      if (is_stopping_) return;
      entries.push_back({.fd = peer_.fd(), .events = POLLIN, .revents = 0});  // poll passes over -1
      if (peer_.is_open() || doubtful_epoch_.has_value()) timeout = kBusyPoll;
      if (!pending_events_.empty()) timeout = absl::ZeroDuration();
    }
    timeout = std::clamp(server_->next_deadline() - MonotonicTime::Now(), absl::ZeroDuration(), timeout);
    ::poll(entries.data(), entries.size(), static_cast<int>(absl::ToInt64Milliseconds(timeout)) + 1);
    if ((entries[0].revents & POLLIN) != 0) {
      std::uint64_t count;
      [[maybe_unused]] const ssize_t size = ::read(wake_.get(), &count, sizeof count);
    }
    server_->Serve();
    bool has_doubt = false;
    {
      MutexLock lock(&mutex_);
      if (peer_.is_open() && peer_.HasDied()) LosePeer();
      has_doubt = doubtful_epoch_.has_value();
    }
    DeliverEvents();
    CheckSilence();
    if (has_doubt) {
      const MonotonicTime deadline = MonotonicTime::Now() + kDoubtTimeout;
      const auto call = LeaseCall::Enter(this, deadline);
      if (call.ok() && !ResolveDoubt(deadline).ok())
        TANDEM_LOG(kDebug, "sharing", "a grant whose answer was lost is not ended yet");
    }
  }
}

void HeldPoolMember::DeliverEvents() {
  for (;;) {
    std::function<void()> event;
    {
      MutexLock lock(&mutex_);
      is_delivering_ = !pending_events_.empty() && !is_stopping_;
      if (!is_delivering_) {
        changed_.SignalAll();
        return;
      }
      event = std::move(pending_events_.front());
      pending_events_.pop_front();
    }
    event();
  }
}

void HeldPoolMember::CheckSilence() {
  MutexLock lock(&mutex_);
  if (!peer_.IsStopped()) {
    if (is_silence_reported_ && peer_.is_open())
      TANDEM_LOG(kInfo, "sharing", RoleName(PeerOf(options_.role)), " pid=", peer_.pid(), " goes on after ",
                 absl::FormatDuration(MonotonicTime::Now() - stopped_since_));
    stopped_since_ = MonotonicTime::InfiniteFuture();
    is_silence_reported_ = false;
    return;
  }
  stopped_since_ = std::min(stopped_since_, MonotonicTime::Now());
  if (is_silence_reported_ || MonotonicTime::Now() - stopped_since_ < options_.holder_timeout) return;
  is_silence_reported_ = true;
  const bool kills = options_.kill_silent_holder && book_.holder() == PeerOf(options_.role);
  TANDEM_LOG(kError, "sharing", RoleName(PeerOf(options_.role)), " pid=", peer_.pid(), " is stopped since ",
             absl::FormatDuration(MonotonicTime::Now() - stopped_since_), " lease_holder=", RoleName(book_.holder()),
             "; what a process holds stays its own until it ends", kills ? ": killing it" : "");
  if (!kills) return;
  if (const absl::Status status = peer_.Kill(); !status.ok()) TANDEM_LOG(kError, "sharing", std::string(status.message()));
}

absl::StatusOr<std::unique_ptr<PoolMemory>> CreateMemory(const PoolMemberOptions& options) {
  if (options.device == Device::kCpu) {
    if (options.use_cuda_ipc)
      return absl::InvalidArgumentError("pool: the transport cuda_ipc needs a GPU, the device is the CPU");
    return PoolMemory::CreateMemfd();
  }
  if (options.use_cuda_ipc && options.strict_leases)
    return absl::InvalidArgumentError("pool: memory of the transport cuda_ipc cannot be protected: no strict leases with it");
  return options.use_cuda_ipc ? PoolMemory::CreateCudaIpc() : PoolMemory::CreateCuda();
}

}  // namespace

absl::StatusOr<ModelDescription> ReadModelDescription(const PoolMember& pool) {
  return ReadModelDescription(pool.device(), pool.region(v1::REGION_KIND_MODEL), pool.manifest().weights().description_bytes());
}

absl::StatusOr<std::unique_ptr<PoolMember>> PoolMember::Start(const PoolMemberOptions& options) {
  if (options.role != v1::ROLE_ROLLOUT && options.role != v1::ROLE_TRAINER)
    return absl::InvalidArgumentError(absl::StrCat("pool: role ", static_cast<int>(options.role), " is neither daemon's"));
  TANDEM_ASSIGN_OR_RETURN(RunDir run_dir, RunDir::Open(options.run_dir));
  TANDEM_ASSIGN_OR_RETURN(const std::unique_ptr<PoolMemory> memory, CreateMemory(options));
  TANDEM_ASSIGN_OR_RETURN(HeldPool pool, FindOrMakePool(options, run_dir, memory.get()));
  UniqueFd wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake.is_open()) return absl::ResourceExhaustedError(absl::StrCat("eventfd: ", std::strerror(errno)));
  // The descriptors' vector keeps its buffer when it moves into the member.
  TANDEM_ASSIGN_OR_RETURN(std::unique_ptr<DescriptorServer> server,
                          DescriptorServer::Create(run_dir.SocketPath(options.role), pool.chunks));
  return std::make_unique<HeldPoolMember>(options, std::move(pool), std::move(server), std::move(wake),
                                          std::make_unique<RunDir>(std::move(run_dir)));
}

}  // namespace tandem
