// Brings tensors from files into their places in memory, in the format of the place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "common/gpu/device.h"
#include "common/model/layer_facts.h"
#include "common/model/model_file.h"
#include "common/model/weight_codecs.h"

namespace tandem {

// One factor for each block of 128 x 128 weights, [ceil(rows / 128), ceil(columns / 128)] row-major: see
// StorageFormat::kFp8Block.
struct BlockScales {
  const ByteSource* file = nullptr;
  WeightCodec codec = WeightCodec::kF32;  // F32, F16 or BF16
  std::uint64_t file_begin_bytes = 0;
};

struct TensorLoad {
  const ByteSource* file = nullptr;
  WeightCodec codec = WeightCodec::kF32;
  std::uint64_t file_begin_bytes = 0;
  WeightTarget target;
  std::optional<BlockScales> block_scales = std::nullopt;
};

// `region` lies on `device`. On the CPU uses the calling thread and one more; for a GPU up to eight, each of which decodes into
// two pinned buffers of a few MiB: nothing else is held but, in NF4, the absmax of tensors that are being read. `progress` is
// called from the calling thread with the bytes written so far. Requires: columns are whole blocks of the codec, each target lies
// in the region on a boundary of its elements, one of kFp8Block comes from E4M3 codes under block scales. Errors: those of the
// files, INVALID_ARGUMENT (a value of a quantised format is not finite). After an error the region's content is unspecified.
absl::Status LoadTensors(std::span<const TensorLoad> loads, Device device, std::span<std::byte> region,
                         const std::function<void(std::uint64_t)>& progress);

}  // namespace tandem
