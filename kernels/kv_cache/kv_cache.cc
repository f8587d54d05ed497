#include "kernels/kv_cache/kv_cache.h"

#include <cmath>
#include <vector>

#include "kernels/base/elements.h"
#include "kernels/kv_cache/fp8_kv.h"

namespace tandem {
namespace {

constexpr std::int64_t kMaxHalf = 128;

template <typename T>
void RopeAndCacheReference(const RopeAndCacheParams& p) {
  const std::int64_t dim = p.head_dim, half = dim / 2, kv_size = p.num_kv_heads * dim;
  const std::int64_t num_heads = p.num_heads + 2 * p.num_kv_heads;
  std::vector<float> head_values(static_cast<std::size_t>(dim));
  float* const head = head_values.data();
  for (std::int64_t row = 0; row < p.num_rows; ++row) {
    const float* const x = p.qkv + row * num_heads * dim;
    T* const queries = static_cast<T*>(p.queries) + row * p.query_row_stride;
    T* const unnormed = static_cast<T*>(p.unnormed) + row * (p.num_heads + p.num_kv_heads) * dim;
    const float *cosines = p.cosines + p.positions[row] * half, *sines = p.sines + p.positions[row] * half;
    const std::int64_t slot = p.slots != nullptr ? p.slots[row] : row;
    const std::int64_t place = slot / p.page_tokens * p.page_stride + slot % p.page_tokens * kv_size;
    for (std::int64_t h = 0; h < num_heads; ++h) {
      const bool is_query = h < p.num_heads, is_key = !is_query && h < p.num_heads + p.num_kv_heads;
      if (!is_query && slot < 0) break;
      for (std::int64_t i = 0; i < dim; ++i) {
        head[i] = x[h * dim + i];
        if (p.bias != nullptr) head[i] += ToFloat(static_cast<const T*>(p.bias)[h * dim + i]);
      }
      if (p.unnormed != nullptr && (is_query || is_key)) {
        for (std::int64_t i = 0; i < dim; ++i) unnormed[h * dim + i] = FromFloat<T>(head[i]);
      }
      const auto* norm = static_cast<const T*>(is_query ? p.q_norm : is_key ? p.k_norm : nullptr);
      if (norm != nullptr) {
        double sum = 0;
        for (std::int64_t i = 0; i < dim; ++i) sum += static_cast<double>(head[i]) * static_cast<double>(head[i]);
        const double scale = 1 / std::sqrt(sum / static_cast<double>(dim) + static_cast<double>(p.epsilon));
        for (std::int64_t i = 0; i < dim; ++i) head[i] *= static_cast<float>(scale) * ToFloat(norm[i]);
      }
      T* const to = is_query ? queries + h * dim
                    : is_key ? static_cast<T*>(p.keys) + place + (h - p.num_heads) * dim
                             : static_cast<T*>(p.values) + place + (h - p.num_heads - p.num_kv_heads) * dim;
      for (std::int64_t i = 0; i < half; ++i) {
        const float c = is_query || is_key ? cosines[i] : 1.f, s = is_query || is_key ? sines[i] : 0.f;
        to[i] = FromFloat<T>(head[i] * c - head[i + half] * s);
        to[i + half] = FromFloat<T>(head[i + half] * c + head[i] * s);
      }
      if (p.kv_scales == nullptr || is_query) continue;
      const float scale = p.kv_scales[h - p.num_heads];
      for (std::int64_t i = 0; i < dim; ++i) to[i] = FromFloat<T>(RoundToFp8Kv(ToFloat(to[i]), scale));
    }
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
  if (params.num_heads < 1 || params.num_kv_heads < 1 || params.head_dim < 2 || params.head_dim > 2 * kMaxHalf ||
      params.head_dim % 2 != 0 || params.page_tokens < 1 || params.num_rows < 0) {
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

absl::Status RoundBlocks(std::span<const RoundBlockParams> blocks, Device device, void* stream) {
  for (const RoundBlockParams& block : blocks) {
    if (block.num_rows >= 0 && block.num_columns >= 0 && block.output_row_stride >= block.num_columns &&
        (block.num_columns == 0 || block.num_rows <= INT32_MAX / block.num_columns)) {
      continue;
    }
    return absl::InvalidArgumentError(
        absl::StrCat("rounding [", block.num_rows, ", ", block.num_columns, "] into rows of ", block.output_row_stride));
  }
  if (device == Device::kCuda) return internal::RoundBlocksCuda(blocks, stream);
  for (const RoundBlockParams& block : blocks) {
    for (std::int64_t row = 0; row < block.num_rows; ++row) {
      for (std::int64_t i = 0; i < block.num_columns; ++i) {
        static_cast<Bf16*>(block.output)[row * block.output_row_stride + i] =
            FromFloat<Bf16>(block.input[row * block.num_columns + i]);
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace tandem
