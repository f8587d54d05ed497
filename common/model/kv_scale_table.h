// Where the scales of a KV cache in fp8 lie, for both daemons: at the beginning of the rollout server's standing region, behind
// a record that says whose they are. The rollout server measures them in the first step and sets the record; from then on they
// stand for good: through publishing, phase switches and its restart, since pages that were written under them are read under
// them. The trainer reads them in a phase of its own, after completions that were drawn with them: its forward pass rounds keys
// and values as the cache did.
//
// The record is written last and withdrawn first, so scales that it stands before are whole wherever a process died. A view.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "common/base/status.h"
#include "common/gpu/device.h"
#include "common/model/model_config.h"

namespace tandem {

class KvScaleTable {
 public:
  static std::uint64_t Bytes(const ModelConfig& config);
  // `memory` lies on `device`, on a 16-byte boundary, and has at least Bytes; `digest`: of the weight layout.
  KvScaleTable(const ModelConfig& config, const std::string& digest, Device device, std::span<std::byte> memory);

  // [2 (keys, values), num_kv_heads] fp32, on the device.
  float* layer(int layer) const;
  // Whether the record stands before positive numbers alone. Errors: INTERNAL (the copy).
  absl::StatusOr<bool> AreSet() const;
  // Sets the record. Requires: what wrote the scales has been fenced. Errors: INTERNAL (the copy), OUT_OF_RANGE naming a scale
  // that is no positive number; the record is not set then.
  absl::Status Set();
  absl::Status Withdraw();

 private:
  // Empty, or which scale is none.
  absl::StatusOr<std::string> FindFault() const;

  const int num_layers_, num_kv_heads_;
  const std::string record_;
  const Device device_;
  std::byte* const memory_;
};

}  // namespace tandem
