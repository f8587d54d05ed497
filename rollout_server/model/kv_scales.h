// Scales of a KV cache in E4M3, one for each layer, KV head, and for keys and values (kernels/kv_cache/fp8_kv.h). They are
// measured in the first step, whose sequences all begin in it, and then stand for good: through publishing, phase switches and,
// where the memory outlives the process, its restart, since pages that were written under them are read under them. They lie in
// the device memory of the model's workspace behind a record that says whose they are. Confined to the engine thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "common/base/status.h"
#include "common/model/model_config.h"

namespace tandem {

class KvScales {
 public:
  static std::uint64_t Bytes(const ModelConfig& config);
  // `memory`: Bytes of device memory on a 16-byte boundary; outlives this. `digest`: of the weight layout.
  KvScales(const ModelConfig& config, const std::string& digest, std::byte* memory);

  // Takes what an earlier process left, if it is of the same model. Errors: INTERNAL (the copy).
  absl::Status Find();
  bool are_set() const { return are_set_; }
  // On the device: [2 (keys, values), num_kv_heads]. Values only when are_set(), or once the measuring step has come by.
  float* layer(int layer) const;
  // Freezes what the step that is on `stream` measured; waits for it. Errors: INTERNAL naming a scale that is no positive
  // number; nothing is set then.
  absl::Status Freeze(void* stream);

 private:
  absl::Status Check(const char* what);

  const int num_layers_, num_kv_heads_;
  const std::string record_;
  std::byte* const memory_;
  bool are_set_ = false;
};

}  // namespace tandem
