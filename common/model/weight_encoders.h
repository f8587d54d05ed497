// Weights from fp32 to the formats in which the pool holds them (StorageFormat), and back; not to kFp8Block, whose codes come
// from checkpoints alone. Stateless.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "common/base/status.h"
#include "common/model/weight_layout.h"

namespace tandem {

// Scales that EncodeRows gives for one row: kFp8Row 1, kNf4 columns / 64 (absmax, still fp32), else none.
std::uint64_t ScalesPerRow(StorageFormat format, std::uint64_t columns);

// Whole rows of `columns` values. Requires: encoded has RowBytes a row on a boundary of its elements, scales ScalesPerRow a row.
// `format` is not kFp8Block. Errors: INVALID_ARGUMENT when a value of a quantised format is not finite.
absl::Status EncodeRows(StorageFormat format, std::span<const float> values, std::uint64_t columns, std::span<std::byte> encoded,
                        std::span<float> scales);

// E4M3, scale = absmax / 448, code = values / scale to the nearest, ties to even.
// Returns the scale, above 0.
float EncodeFp8Row(std::span<const float> row, std::span<std::uint8_t> codes);

// As bitsandbytes does (backends/default/ops.py, csrc/kernels.cu): per block of 64 values absmax, value * (1 / absmax) to the
// nearest of the code book, the lower one half way. The high nibble holds the even value. Requires: values are whole blocks.
void EncodeNf4(std::span<const float> values, std::span<std::uint8_t> packed, std::span<float> absmax);
// Double quantisation of one tensor's absmax: their mean is the offset, which is returned; the rest becomes codes into
// Nf4NestedMap() under one nested absmax for 256. The mean is the exact one rounded once; bitsandbytes' depends on its order of
// summation in the last bit.
float EncodeNestedAbsmax(std::span<const float> absmax, std::span<std::uint8_t> codes, std::span<float> nested_absmax);
// bitsandbytes' signed dynamic map, ascending (functional.py, create_dynamic_map): 256 values.
std::span<const float> Nf4NestedMap();

}  // namespace tandem
