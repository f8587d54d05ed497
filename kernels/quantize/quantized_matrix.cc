#include "kernels/quantize/quantized_matrix.h"

#include <algorithm>
#include <limits>
#include <span>
#include <vector>

#include "common/base/check.h"
#include "kernels/base/elements.h"

namespace tandem {
namespace {

constexpr std::int64_t kFp8RunValues = 16;  // read at once
constexpr std::int64_t kValuesLimit = std::int64_t{8} * std::numeric_limits<std::int32_t>::max();

absl::Status CheckMatrix(const char* kernel, const QuantizedMatrix& matrix) {
  const std::int64_t multiple = matrix.format == StorageFormat::kNf4 ? kNf4BlockValues : kFp8RunValues;
  if (!IsQuantized(matrix.format) || matrix.rows < 0 || matrix.columns < 1 || matrix.columns % multiple != 0 ||
      matrix.rows > kValuesLimit / matrix.columns) {
    return absl::InvalidArgumentError(absl::StrCat(kernel, ": [", matrix.rows, ", ", matrix.columns, "] in ",
                                                   StorageFormatName(matrix.format), "; columns are a multiple of ", multiple,
                                                   ", values at most ", kValuesLimit, ", formats fp8, fp8_block and nf4"));
  }
  if (reinterpret_cast<std::uintptr_t>(matrix.codes) % 16 != 0) {
    return absl::InvalidArgumentError(absl::StrCat(kernel, ": codes are not on a boundary of 16 bytes"));
  }
  if (matrix.format == StorageFormat::kFp8Row) return absl::OkStatus();
  if (matrix.num_parts < 1 || matrix.num_parts > kMaxLinearParts ||
      matrix.parts[static_cast<std::size_t>(matrix.num_parts - 1)].row_end != matrix.rows) {
    return absl::InvalidArgumentError(
        absl::StrCat(kernel, ": ", matrix.num_parts, " parts that do not cover ", matrix.rows, " rows"));
  }
  return absl::OkStatus();
}

absl::Status CheckAligned(const char* kernel, const char* what, const void* array) {
  if (reinterpret_cast<std::uintptr_t>(array) % 16 == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(kernel, ": ", what, " is not on a boundary of 16 bytes"));
}

void DequantizeFp8(const QuantizedMatrix& matrix, std::uint16_t* output) {
  const auto* codes = static_cast<const std::uint8_t*>(matrix.codes);
  const auto* scales = static_cast<const float*>(matrix.scales);
  for (std::int64_t row = 0; row < matrix.rows; ++row) {
    for (std::int64_t i = row * matrix.columns; i < (row + 1) * matrix.columns; ++i) {
      output[i] = FloatToBf16(Fp8E4m3ToFloat(codes[i]) * scales[row]);
    }
  }
}

void DequantizeFp8Blocks(const QuantizedMatrix& matrix, std::uint16_t* output) {
  const auto* codes = static_cast<const std::uint8_t*>(matrix.codes);
  const std::int64_t scale_columns = NumScaleBlocks(matrix.columns);
  for (std::size_t p = 0; p < static_cast<std::size_t>(matrix.num_parts); ++p) {
    const LinearPart& part = matrix.parts[p];
    for (std::int64_t row = part.row_begin; row < part.row_end; ++row) {
      const float* const scales = static_cast<const float*>(matrix.scales) +
                                  (part.scale_row_begin + (row - part.row_begin) / kScaleBlock) * scale_columns;
      for (std::int64_t column = 0; column < matrix.columns; ++column) {
        const std::int64_t i = row * matrix.columns + column;
        output[i] = FloatToBf16(Fp8E4m3ToFloat(codes[i]) * scales[column / kScaleBlock]);
      }
    }
  }
}

void DequantizeNf4(const QuantizedMatrix& matrix, std::uint16_t* output) {
  const std::int64_t blocks_per_row = matrix.columns / kNf4BlockValues;
  for (std::size_t p = 0; p < static_cast<std::size_t>(matrix.num_parts); ++p) {
    const LinearPart& part = matrix.parts[p];
    const auto num_blocks = static_cast<std::size_t>((part.row_end - part.row_begin) * blocks_per_row);
    const std::span<const std::uint8_t> scales(static_cast<const std::uint8_t*>(matrix.scales) + part.row_begin * blocks_per_row,
                                               num_blocks);
    const std::span<const float> nested(matrix.nested_absmax + part.nested_begin,
                                        (num_blocks + kNf4NestedBlocks - 1) / kNf4NestedBlocks);
    std::vector<float> absmax(num_blocks), values(num_blocks * kNf4BlockValues);
    DecodeNestedAbsmax(scales, nested, {matrix.nested_map, 256}, matrix.nested_offset[p], kNf4NestedBlocks, absmax);
    DecodeNf4({static_cast<const std::uint8_t*>(matrix.codes) + part.row_begin * matrix.columns / 2, values.size() / 2}, absmax,
              kNf4BlockValues, values);
    std::transform(values.begin(), values.end(), output + part.row_begin * matrix.columns, FloatToBf16);
  }
}

void DequantizeReference(const QuantizedMatrix& matrix, std::uint16_t* output) {
  if (matrix.format == StorageFormat::kFp8Row) {
    DequantizeFp8(matrix, output);
  } else if (matrix.format == StorageFormat::kFp8Block) {
    DequantizeFp8Blocks(matrix, output);
  } else {
    DequantizeNf4(matrix, output);
  }
}

template <typename T>
void MultiplyFewReference(const MultiplyFewParams& params) {
  const QuantizedMatrix& weight = params.weight;
  std::vector<std::uint16_t> values(static_cast<std::size_t>(weight.rows * weight.columns));
  DequantizeReference(weight, values.data());
  const auto* x = static_cast<const std::uint16_t*>(params.x);
  T* y = static_cast<T*>(params.y);
  for (std::int64_t m = 0; m < params.num_rows; ++m) {
    for (std::int64_t n = 0; n < weight.rows; ++n) {
      double sum = params.is_added ? static_cast<double>(ToFloat(y[m * weight.rows + n])) : 0;
      for (std::int64_t k = 0; k < weight.columns; ++k) {
        sum += static_cast<double>(Bf16ToFloat(x[m * weight.columns + k])) *
               static_cast<double>(Bf16ToFloat(values[static_cast<std::size_t>(n * weight.columns + k)]));
      }
      y[m * weight.rows + n] = FromFloat<T>(static_cast<float>(sum));
    }
  }
}

}  // namespace

QuantizedMatrix QuantizedMatrixAt(const WeightLayout& layout, const LinearPlace& place, const std::byte* weights) {
  TANDEM_CHECK(IsQuantized(layout.format) && place.parts.size() <= kMaxLinearParts, place.name, " in ",
               StorageFormatName(layout.format), " with ", place.parts.size(), " parts");
  const auto at = [weights](const std::optional<TensorPlace>& tensor) {
    return tensor.has_value() ? weights + tensor->begin_bytes : nullptr;
  };
  QuantizedMatrix matrix;
  matrix.format = layout.format;
  matrix.rows = place.shape[0];
  matrix.columns = place.shape[1];
  matrix.codes = weights + place.begin_bytes;
  matrix.scales = at(place.scales);
  matrix.nested_map = reinterpret_cast<const float*>(at(layout.nested_map));
  matrix.nested_absmax = reinterpret_cast<const float*>(at(place.nested_absmax));
  matrix.nested_offset = reinterpret_cast<const float*>(at(place.nested_offset));
  matrix.num_parts = static_cast<int>(place.parts.size());
  std::copy(place.parts.begin(), place.parts.end(), matrix.parts.begin());
  return matrix;
}

absl::Status Dequantize(const QuantizedMatrix& matrix, void* output, Device device, void* stream) {
  TANDEM_RETURN_IF_ERROR(CheckMatrix("dequantize", matrix));
  TANDEM_RETURN_IF_ERROR(CheckAligned("dequantize", "output", output));
  if (matrix.rows == 0) return absl::OkStatus();
  if (device == Device::kCuda) return internal::DequantizeCuda(matrix, output, stream);
  DequantizeReference(matrix, static_cast<std::uint16_t*>(output));
  return absl::OkStatus();
}

absl::Status MultiplyFew(const MultiplyFewParams& params, Device device, void* stream) {
  const QuantizedMatrix& weight = params.weight;
  TANDEM_RETURN_IF_ERROR(CheckMatrix("multiply few", weight));
  TANDEM_RETURN_IF_ERROR(CheckAligned("multiply few", "x", params.x));
  TANDEM_RETURN_IF_ERROR(CheckComputeType("multiply few", params.y_dtype));
  if (params.num_rows < 0 || params.num_rows > kFewRows) {
    return absl::InvalidArgumentError(absl::StrCat("multiply few: ", params.num_rows, " rows; at most ", kFewRows));
  }
  if (params.num_rows == 0 || weight.rows == 0) return absl::OkStatus();
  if (device == Device::kCuda) return internal::MultiplyFewCuda(params, stream);
  VisitElementType(params.y_dtype, [&]<typename T>(T) { MultiplyFewReference<T>(params); });
  return absl::OkStatus();
}

}  // namespace tandem
