// Which adapter each job's requests use now. A version is activated only when its slot's bytes are what the publisher says they
// are; a later version of the same job replaces the one before it. Confined to the engine thread; OpenAdapter is pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>

#include "common/base/status.h"
#include "common/gpu/device.h"
#include "common/model/weight_layout.h"
#include "proto/rollout.pb.h"
#include "rollout_server/model/decoder_model.h"

namespace tandem {

struct Adapter {
  std::string job;
  std::uint64_t weight_version = 0;
  std::uint64_t activation_id = 0;  // given by AdapterTable; never used twice in a process
  std::shared_ptr<const AdapterLayout> layout;
  const std::byte* slot = nullptr;
  float scale = 0;

  AdapterView view() const { return {.slot = slot, .layout = layout.get(), .scale = scale, .activation_id = activation_id}; }
};

// Checks a publication against the model and the slot's bytes. `region` is the trainer's standing region as this process maps it
// on `device` and begins at `region_begin_bytes` of the pool; `max_rank` is what the model has room for. Reads the whole slot
// (MemoryChecksum): call it off the engine thread. Errors: INVALID_ARGUMENT (a field, its value and the limit), OUT_OF_RANGE
// (slot), ABORTED (checksum: the slot is half written).
absl::StatusOr<Adapter> OpenAdapter(const v1::ActivateAdapterRequest& request, const ModelConfig& config,
                                    std::span<const std::byte> region, std::uint64_t region_begin_bytes, int max_rank,
                                    Device device);

class AdapterTable {
 public:
  // Whether `adapter` may replace what its job uses. Errors: ABORTED naming both versions.
  absl::Status Check(const Adapter& adapter) const;
  // Requires: Check(adapter) is OK.
  void Activate(Adapter adapter);
  void Retire(const std::string& job) { active_.erase(job); }
  void RetireAll() { active_.clear(); }
  // nullptr when the job has none.
  const Adapter* Find(const std::string& job) const;
  // Errors: NOT_FOUND (the job has no adapter), FAILED_PRECONDITION naming both versions. An empty job is the base model, version
  // 0.
  absl::Status CheckVersion(const std::string& job, std::uint64_t weight_version) const;
  std::vector<std::string> Jobs() const;

 private:
  std::map<std::string, Adapter> active_;
  std::uint64_t next_activation_id_ = 1;
};

}  // namespace tandem
