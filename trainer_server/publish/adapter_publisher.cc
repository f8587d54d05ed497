#include "trainer_server/publish/adapter_publisher.h"

#include <utility>

#include "common/base/check.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/repeated_log.h"
#include "common/rpc/channel.h"
#include "kernels/checksum/checksum.h"

namespace tandem {

absl::Status RetireAdapter(RolloutPeer* peer, const std::string& job, absl::Duration deadline) {
  grpc::ClientContext context;
  context.set_deadline(GrpcDeadline(MonotonicTime::Now() + deadline));
  RolloutPeer::ScopedCall call(peer, &context);
  v1::RetireAdapterRequest request;
  request.set_job(job);
  v1::RetireAdapterResponse response;
  return Annotate(FromGrpc(peer->stub()->RetireAdapter(&context, request, &response)),
                  absl::StrCat("retiring the adapter of job ", job));
}

AdapterPublisher::AdapterPublisher(RolloutPeer* peer, Options options) : peer_(peer), options_(std::move(options)) {
  for (const std::span<std::byte> slot : options_.slots) {
    TANDEM_CHECK(slot.size() >= options_.layout.total_bytes, "slot of ", slot.size(), " bytes for an adapter of ",
                 options_.layout.total_bytes);
  }
}

absl::Status AdapterPublisher::Activate(std::uint64_t version, std::size_t slot, const std::string& checksum) {
  v1::ActivateAdapterRequest request;
  request.set_job(options_.job);
  request.set_weight_version(version);
  request.set_drain(true);
  v1::AdapterSlot* place = request.mutable_slot();
  const std::uint64_t begin = options_.offset_of(options_.slots[slot].data());
  place->mutable_range()->set_begin_bytes(begin);
  place->mutable_range()->set_end_bytes(begin + options_.layout.total_bytes);
  place->set_rank(static_cast<std::uint32_t>(options_.layout.rank));
  place->set_scale(options_.scale);
  for (const LinearKind kind : options_.layout.targets) place->add_targets(LinearKindName(kind));
  place->set_checksum(checksum);
  grpc::ClientContext context;
  context.set_deadline(GrpcDeadline(MonotonicTime::Now() + options_.activate_deadline));
  RolloutPeer::ScopedCall call(peer_, &context);
  v1::ActivateAdapterResponse response;
  return Annotate(FromGrpc(peer_->stub()->ActivateAdapter(&context, request, &response)),
                  absl::StrCat("activating version ", version, " of job ", options_.job));
}

absl::Status AdapterPublisher::Publish(std::uint64_t version, std::span<const std::byte> adapter) {
  TANDEM_CHECK(version > version_, "version ", version, " after ", version_);
  TANDEM_CHECK(adapter.size() == options_.layout.total_bytes, "adapter of ", adapter.size(), " bytes");
  const std::size_t idle = 1 - active_slot_;
  // An answer that was lost leaves open which slot is read: forget both before one is rewritten.
  if (!is_outcome_known_) TANDEM_RETURN_IF_ERROR(RetireAdapter(peer_, options_.job, options_.activate_deadline));
  is_outcome_known_ = true;
  const std::span<std::byte> slot = options_.slots[idle].first(adapter.size());
  TANDEM_RETURN_IF_ERROR(CopyOnDevice(options_.device, slot.data(), adapter.data(), adapter.size()));
  TANDEM_ASSIGN_OR_RETURN(const std::string checksum, MemoryChecksum(options_.device, slot.data(), slot.size()));
  const absl::Status activated = Activate(version, idle, checksum);
  if (!activated.ok()) {
    is_outcome_known_ = false;
    return activated;
  }
  active_slot_ = idle;
  active_checksum_ = checksum;
  version_ = version;
  TANDEM_LOG(kInfo, "publish", "activated job=", options_.job, " version=", version);
  return absl::OkStatus();
}

absl::Status AdapterPublisher::PublishWhenServing(std::uint64_t version, std::span<const std::byte> adapter) {
  const MonotonicTime limit = MonotonicTime::Now() + peer_->patience();
  RepeatedLog refusals("publish");
  while (true) {
    const absl::Status status = Publish(version, adapter);
    if (status.ok() || peer_->is_interrupted() || MonotonicTime::Now() > limit) return status;
    if (!absl::IsUnavailable(status) && !absl::IsDeadlineExceeded(status) && !absl::IsCancelled(status) &&
        !absl::IsAborted(status)) {
      return status;
    }
    refusals.Warn(absl::StrCat("not published job=", options_.job, " version=", version, " because=", status.message()));
    TANDEM_RETURN_IF_ERROR(peer_->Pause(absl::Milliseconds(50)));
    TANDEM_RETURN_IF_ERROR(peer_->WaitUntilServing());
  }
}

absl::Status AdapterPublisher::Reactivate() {
  TANDEM_CHECK(version_ > 0, "no version is in use");
  // Versions only grow at the rollout server, and it may know this one still.
  TANDEM_RETURN_IF_ERROR(RetireAdapter(peer_, options_.job, options_.activate_deadline));
  const absl::Status activated = Activate(version_, active_slot_, active_checksum_);
  is_outcome_known_ = activated.ok();
  return activated;
}

}  // namespace tandem
