#include "kernels/kv_cache/kv_cache.h"

#include <algorithm>
#include <cmath>

#include "kernels/base/elements.h"

namespace tandem {
namespace {

constexpr std::int64_t kMaxHalf = 128;

template <typename T>
void RopeAndCacheReference(const RopeAndCacheParams& p) {
  const std::int64_t dim = p.head_dim, half = dim / 2, kv_size = p.num_kv_heads * dim;
  const std::int64_t stride = (p.num_heads + 2 * p.num_kv_heads) * dim;
  for (std::int64_t row = 0; row < p.num_rows; ++row) {
    T* const x = static_cast<T*>(p.qkv) + row * stride;
    const float *cosines = p.cosines + p.positions[row] * half, *sines = p.sines + p.positions[row] * half;
    const auto rotate = [&](const T* from, T* to) {
      for (std::int64_t i = 0; i < half; ++i) {
        const float a = ToFloat(from[i]), b = ToFloat(from[i + half]);
        to[i] = FromFloat<T>(a * cosines[i] - b * sines[i]);
        to[i + half] = FromFloat<T>(b * cosines[i] + a * sines[i]);
      }
    };
    for (std::int64_t head = 0; head < p.num_heads; ++head) rotate(x + head * dim, x + head * dim);
    if (p.slots[row] < 0) continue;
    const std::int64_t place = p.slots[row] / p.page_tokens * p.page_stride + p.slots[row] % p.page_tokens * kv_size;
    const T *keys = x + p.num_heads * dim, *values = keys + kv_size;
    for (std::int64_t head = 0; head < p.num_kv_heads; ++head) {
      rotate(keys + head * dim, static_cast<T*>(p.keys) + place + head * dim);
    }
    std::copy_n(values, kv_size, static_cast<T*>(p.values) + place);
  }
}

}  // namespace

absl::Status FillRopeTable(const RopeTableParams& params, Device device, void* stream) {
  if (params.half < 1 || params.half > kMaxHalf || params.num_positions < 0) {
    return absl::InvalidArgumentError(absl::StrCat("rope table: ", params.num_positions, " positions of ", params.half,
                                                   " frequencies; 1 to ", kMaxHalf, " are supported"));
  }
  if (params.num_positions == 0) return absl::OkStatus();
  if (device == Device::kCuda) return internal::FillRopeTableCuda(params, stream);
  for (std::int64_t position = 0; position < params.num_positions; ++position) {
    for (std::int64_t i = 0; i < params.half; ++i) {
      const double angle = static_cast<double>(position) * params.frequencies[i];
      params.cosines[position * params.half + i] = static_cast<float>(std::cos(angle));
      params.sines[position * params.half + i] = static_cast<float>(std::sin(angle));
    }
  }
  return absl::OkStatus();
}

absl::Status RopeAndCache(const RopeAndCacheParams& params, Device device, void* stream) {
  if (params.num_heads < 1 || params.num_kv_heads < 1 || params.head_dim < 2 || params.head_dim % 2 != 0 ||
      params.page_tokens < 1 || params.num_rows < 0) {
    return absl::InvalidArgumentError(absl::StrCat("rope and cache: ", params.num_rows, " rows, ", params.num_heads, " and ",
                                                   params.num_kv_heads, " heads of ", params.head_dim, ", pages of ",
                                                   params.page_tokens, " tokens"));
  }
  TANDEM_RETURN_IF_ERROR(CheckComputeType("rope and cache", params.dtype));
  if (params.num_rows == 0) return absl::OkStatus();
  if (device == Device::kCuda) return internal::RopeAndCacheCuda(params, stream);
  VisitElementType(params.dtype, [&]<typename T>(T) { RopeAndCacheReference<T>(params); });
  return absl::OkStatus();
}

absl::Status RoundBlock(const RoundBlockParams& params, Device device, void* stream) {
  if (params.num_rows < 0 || params.num_columns < 0 || params.output_row_stride < params.num_columns) {
    return absl::InvalidArgumentError(absl::StrCat("rounding [", params.num_rows, ", ", params.num_columns, "] into rows of ",
                                                   params.output_row_stride));
  }
  if (params.num_rows == 0 || params.num_columns == 0) return absl::OkStatus();
  if (device == Device::kCuda) return internal::RoundBlockCuda(params, stream);
  for (std::int64_t row = 0; row < params.num_rows; ++row) {
    for (std::int64_t i = 0; i < params.num_columns; ++i) {
      static_cast<Bf16*>(params.output)[row * params.output_row_stride + i] =
          FromFloat<Bf16>(params.input[row * params.num_columns + i]);
    }
  }
  return absl::OkStatus();
}

}  // namespace tandem
