#include "kernels/kv_cache/fp8_kv.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/base/elements.h"

namespace tandem {
namespace {

absl::Status Check(const char* kernel, const Fp8KvParams& p) {
  if (p.num_rows < 0 || p.num_kv_heads < 1 || p.head_dim < 8 || p.head_dim % 8 != 0 || p.page_tokens < 1 ||
      p.page_stride % 8 != 0) {
    return absl::InvalidArgumentError(absl::StrCat(kernel, ": ", p.num_rows, " rows, ", p.num_kv_heads, " KV heads of ",
                                                   p.head_dim, ", pages of ", p.page_tokens, " tokens, ", p.page_stride,
                                                   " bytes apart; head size and distance are multiples of 8"));
  }
  return absl::OkStatus();
}

void MeasureReference(const Fp8KvParams& p) {
  for (int half = 0; half < 2; ++half) {
    const auto* x = static_cast<const Bf16*>(half == 0 ? p.keys : p.values);
    for (int head = 0; head < p.num_kv_heads; ++head) {
      float largest = -1;
      for (std::int64_t row = 0; row < p.num_rows; ++row) {
        if (p.slots[row] < 0) continue;
        float of_row = 0;
        for (int i = 0; i < p.head_dim; ++i) {
          const float magnitude = std::fabs(ToFloat(x[(row * p.num_kv_heads + head) * p.head_dim + i]));
          if (!(magnitude <= of_row)) of_row = magnitude;
          if (!std::isfinite(of_row)) break;
        }
        if (std::isfinite(of_row)) largest = std::max(largest, of_row);
      }
      p.scales[half * p.num_kv_heads + head] = largest < 0 ? std::numeric_limits<float>::quiet_NaN() : Fp8KvScale(largest);
    }
  }
}

void StoreReference(const Fp8KvParams& p) {
  const std::int64_t row_size = std::int64_t{p.num_kv_heads} * p.head_dim;
  for (std::int64_t row = 0; row < p.num_rows; ++row) {
    if (p.slots[row] < 0) continue;
    const std::int64_t place = p.slots[row] / p.page_tokens * p.page_stride + p.slots[row] % p.page_tokens * row_size;
    for (int half = 0; half < 2; ++half) {
      const auto* x = static_cast<const Bf16*>(half == 0 ? p.keys : p.values) + row * row_size;
      auto* codes = static_cast<std::uint8_t*>(half == 0 ? p.key_pages : p.value_pages) + place;
      for (std::int64_t i = 0; i < row_size; ++i) {
        codes[i] = ToFp8KvCode(ToFloat(x[i]), p.scales[half * p.num_kv_heads + i / p.head_dim]);
        if (p.queries == nullptr || std::isfinite(ToFloat(x[i]))) continue;
        static_cast<Bf16*>(p.queries)[row * p.query_row_stride] = FromFloat<Bf16>(std::numeric_limits<float>::quiet_NaN());
      }
    }
  }
}

}  // namespace

absl::Status MeasureFp8KvScales(const Fp8KvParams& params, Device device, void* stream) {
  TANDEM_RETURN_IF_ERROR(Check("measuring KV scales", params));
  if (device == Device::kCuda) return internal::MeasureFp8KvScalesCuda(params, stream);
  MeasureReference(params);
  return absl::OkStatus();
}

absl::Status StoreFp8Kv(const Fp8KvParams& params, Device device, void* stream) {
  TANDEM_RETURN_IF_ERROR(Check("storing KV in fp8", params));
  if (params.num_rows == 0) return absl::OkStatus();
  if (device == Device::kCuda) return internal::StoreFp8KvCuda(params, stream);
  StoreReference(params);
  return absl::OkStatus();
}

}  // namespace tandem
