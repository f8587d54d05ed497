// Brings tensors from files into their places in memory, in the format of the place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "common/gpu/device.h"
#include "common/model/layer_facts.h"
#include "common/model/model_file.h"
#include "common/model/weight_codecs.h"

namespace tandem {

struct TensorLoad {
  const ModelFile* file = nullptr;
  WeightCodec codec = WeightCodec::kF32;
  std::uint64_t file_begin_bytes = 0;
  WeightTarget target;
};

// `region` lies on `device`. On the CPU uses the calling thread and one more; for a GPU up to eight, each of which decodes into
// two pinned buffers of a few MiB: nothing else is held but, in NF4, the absmax of tensors that are being read. `progress` is
// called from the calling thread with the bytes written so far. Requires: columns are whole blocks of the codec, each target lies
// in the region on a boundary of its elements. After an error the region's content is unspecified.
absl::Status LoadTensors(std::span<const TensorLoad> loads, Device device, std::span<std::byte> region,
                         const std::function<void(std::uint64_t)>& progress);

}  // namespace tandem
