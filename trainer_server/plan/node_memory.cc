#include "trainer_server/plan/node_memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>
#include <utility>

#include "common/base/units.h"

namespace tandem {
namespace {

std::optional<std::uint64_t> NumberIn(const std::string& path) {
  std::ifstream file(path);
  std::uint64_t value = 0;
  if (file >> value) return value;
  return std::nullopt;
}

// The number after `name` in a file of such pairs, one a line; 0: it has none.
std::uint64_t NumberNamed(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  for (std::string word; file >> word;) {
    std::uint64_t value = 0;
    if (word == name && file >> value) return value;
    file.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return 0;
}

// What a group of processes may still take; nullopt: it has no limit of its own.
std::optional<std::uint64_t> LeftInGroup(const std::string& folder) {
  const auto limit = NumberIn(folder + "/memory.max"), used = NumberIn(folder + "/memory.current");
  if (!limit.has_value() || !used.has_value()) return std::nullopt;
  const std::string stat = folder + "/memory.stat";
  const std::uint64_t cached = NumberNamed(stat, "inactive_file") + NumberNamed(stat, "active_file");  // given up when asked for
  return *limit - std::min(*limit, *used - std::min(*used, cached));
}

// Of this process, in the one hierarchy of version 2; "/" where it sees no more.
std::string GroupOfThisProcess(const std::string& proc) {
  std::ifstream file(proc + "/self/cgroup");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("0::/") && line.find("/../") == std::string::npos) return line.substr(3);
  return "/";
}

}  // namespace

std::uint64_t AvailableHostBytes(const std::string& proc, const std::string& groups) {
  std::uint64_t bytes = NumberNamed(proc + "/meminfo", "MemAvailable:") * kKiB;
  for (std::string group = GroupOfThisProcess(proc);; group = group.substr(0, group.rfind('/'))) {
    bytes = std::min(bytes, LeftInGroup(groups + group).value_or(bytes));
    if (group.empty()) return bytes;
  }
}

// The rest is for what is no layer input: data sets, checkpoints on their way, page cache.
std::uint64_t LayerInputHostLimit() { return AvailableHostBytes("/proc", "/sys/fs/cgroup") / 8 * 7; }

NodeMemoryReader::NodeMemoryReader(Options options, const PoolMember* member, const RolloutPeer* peer)
    : options_(std::move(options)), member_(member), peer_(peer) {}

NodeMemory NodeMemoryReader::Read() {
  NodeMemory node;
  node.device = member_->device();
  node.weight_format = options_.weight_format;
  node.attention = options_.attention;
  const auto size_of = [this](v1::RegionKind kind) { return std::uint64_t{member_->region(kind).size()}; };
  node.weights_bytes = size_of(v1::REGION_KIND_WEIGHTS);
  node.model_bytes = size_of(v1::REGION_KIND_MODEL);
  node.rollout_standing_bytes = size_of(v1::REGION_KIND_ROLLOUT_STANDING);
  node.trainer_standing_bytes = size_of(v1::REGION_KIND_TRAINER_STANDING);
  node.elastic_bytes = size_of(v1::REGION_KIND_ELASTIC);
  node.trainer_fixed = options_.trainer_fixed;
  for (const v1::OwnedBytes& owned : member_->RegionLedger()) {
    if (!owned.in_pool()) node.outside_bytes += owned.bytes();
  }
  if (node.device == Device::kCuda) node.host_limit_bytes = options_.host_limit_bytes;

  const absl::StatusOr<v1::RolloutStatus> status = peer_->GetStatus();
  MutexLock lock(&mutex_);
  if (status.ok() && status->memory().kv_block_bytes() > 0 && status->memory().block_tokens() > 0) heard_ = status->memory();
  node.is_rollout_assumed = !heard_.has_value();
  node.rollout = heard_.has_value() ? *heard_ : AssumedRolloutMemory(options_.model, node.device);
  return node;
}

}  // namespace tandem
