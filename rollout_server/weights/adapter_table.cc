#include "rollout_server/weights/adapter_table.h"

#include <cmath>
#include <optional>
#include <utility>

#include "kernels/checksum/checksum.h"

namespace tandem {
namespace {

constexpr std::uint64_t kSlotAlignment = 64;

absl::StatusOr<std::vector<LinearKind>> ParseTargets(const v1::AdapterSlot& slot) {
  std::vector<LinearKind> targets;
  for (const std::string& name : slot.targets()) {
    const std::optional<LinearKind> kind = ParseLinearKind(name);
    if (!kind.has_value()) return absl::InvalidArgumentError(absl::StrCat("slot.targets: \"", name, "\" is no linear layer"));
    if (!targets.empty() && *kind <= targets.back()) {
      return absl::InvalidArgumentError(absl::StrCat("slot.targets: \"", name, "\" out of order or twice"));
    }
    targets.push_back(*kind);
  }
  if (targets.empty()) return absl::InvalidArgumentError("slot.targets: none given; at least 1 is needed");
  return targets;
}

}  // namespace

absl::StatusOr<Adapter> OpenAdapter(const v1::ActivateAdapterRequest& request, const ModelConfig& config,
                                    std::span<const std::byte> region, std::uint64_t region_begin_bytes, int max_rank,
                                    Device device) {
  const v1::AdapterSlot& slot = request.slot();
  if (request.job().empty()) return absl::InvalidArgumentError("job: empty; the base model has no adapter");
  if (request.weight_version() == 0) return absl::InvalidArgumentError("weight_version: 0; versions begin at 1");
  if (slot.rank() < 1 || slot.rank() > static_cast<std::uint32_t>(max_rank)) {
    return absl::InvalidArgumentError(
        absl::StrCat("slot.rank: ", slot.rank(), " is not in 1 to ", max_rank, ", the rollout server's limit"));
  }
  if (!std::isfinite(slot.scale()) || slot.scale() <= 0) {
    return absl::InvalidArgumentError(absl::StrCat("slot.scale: ", slot.scale(), " is not above 0 and finite"));
  }
  TANDEM_ASSIGN_OR_RETURN(std::vector<LinearKind> targets, ParseTargets(slot));
  auto layout = std::make_shared<AdapterLayout>(AdapterLayout::Create(config, static_cast<int>(slot.rank()), std::move(targets)));

  const std::uint64_t begin = slot.range().begin_bytes();
  const std::uint64_t end = slot.range().end_bytes();
  const std::uint64_t region_end_bytes = region_begin_bytes + region.size();
  if (begin < region_begin_bytes || end > region_end_bytes || begin > end) {
    return absl::OutOfRangeError(absl::StrCat("slot.range: [", begin, ", ", end,
                                              ") is not inside the trainer's standing region [", region_begin_bytes, ", ",
                                              region_end_bytes, ")"));
  }
  if (begin % kSlotAlignment != 0) {
    return absl::InvalidArgumentError(absl::StrCat("slot.range: begin ", begin, " is no multiple of ", kSlotAlignment));
  }
  if (end - begin != layout->total_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("slot.range: ", end - begin, " bytes; rank ", slot.rank(), " on these targets takes ", layout->total_bytes));
  }
  const std::byte* bytes = region.data() + (begin - region_begin_bytes);
  TANDEM_ASSIGN_OR_RETURN(const std::string checksum, MemoryChecksum(device, bytes, end - begin));
  if (checksum != slot.checksum()) {
    return absl::AbortedError(absl::StrCat("job ", request.job(), " version ", request.weight_version(), ": slot [", begin, ", ",
                                           end, ") has checksum ", checksum, ", published as \"", slot.checksum(),
                                           "\": not activated"));
  }
  Adapter adapter;
  adapter.job = request.job();
  adapter.weight_version = request.weight_version();
  adapter.layout = std::move(layout);
  adapter.slot = bytes;
  adapter.scale = slot.scale();
  return adapter;
}

absl::Status AdapterTable::Check(const Adapter& adapter) const {
  const Adapter* active = Find(adapter.job);
  if (active == nullptr || adapter.weight_version > active->weight_version) return absl::OkStatus();
  return absl::AbortedError(absl::StrCat("job ", adapter.job, ": version ", adapter.weight_version,
                                         " is not above the active version ", active->weight_version));
}

void AdapterTable::Activate(Adapter adapter) {
  adapter.activation_id = next_activation_id_++;
  std::string job = adapter.job;
  active_.insert_or_assign(std::move(job), std::move(adapter));
}

const Adapter* AdapterTable::Find(const std::string& job) const {
  const auto found = active_.find(job);
  return found == active_.end() ? nullptr : &found->second;
}

absl::Status AdapterTable::CheckVersion(const std::string& job, std::uint64_t weight_version) const {
  std::uint64_t active_version = 0;
  if (!job.empty()) {
    const Adapter* active = Find(job);
    if (active == nullptr) return absl::NotFoundError(absl::StrCat("job ", job, " has no active adapter"));
    active_version = active->weight_version;
  }
  if (weight_version == 0 || weight_version == active_version) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("weight_version ", weight_version, " of job \"", job, "\" is not active; version ", active_version, " is"));
}

std::vector<std::string> AdapterTable::Jobs() const {
  std::vector<std::string> jobs;
  for (const auto& [job, adapter] : active_) jobs.push_back(job);
  return jobs;
}

}  // namespace tandem
