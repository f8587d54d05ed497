#include "kernels/rope/rope.h"

#include "kernels/base/elements.h"
#include "kernels/cuda_launchers.h"

namespace tandem {
namespace {

template <typename T>
void RopeReference(const RopeParams& params) {
  const std::int64_t half = params.head_dim / 2;
  for (std::int64_t row = 0; row < params.num_rows; ++row) {
    const float* cosines = params.cosines + params.positions[row] * half;
    const float* sines = params.sines + params.positions[row] * half;
    for (std::int64_t head = 0; head < params.num_heads; ++head) {
      T* x = static_cast<T*>(params.x) + row * params.row_stride + head * params.head_dim;
      for (std::int64_t i = 0; i < half; ++i) {
        const float first = ToFloat(x[i]), second = ToFloat(x[i + half]), sine = params.sign * sines[i];
        x[i] = FromFloat<T>(first * cosines[i] - second * sine);
        x[i + half] = FromFloat<T>(second * cosines[i] + first * sine);
      }
    }
  }
}

}  // namespace

absl::Status Rope(const RopeParams& params, Device device, void* stream) {
  TANDEM_RETURN_IF_ERROR(CheckRows("rope", params.dtype, params.num_rows, params.row_stride, kWidthLimit));
  if (params.num_heads < 1 || params.head_dim < 2 || params.head_dim % 2 != 0 ||
      params.num_heads > params.row_stride / params.head_dim) {
    return absl::InvalidArgumentError(absl::StrCat("rope: ", params.num_heads, " heads of ", params.head_dim, " in a row of ",
                                                   params.row_stride, "; the head dimension is even"));
  }
  if (params.num_rows == 0) return absl::OkStatus();
  if (device == Device::kCuda) return internal::RopeCuda(params, stream);
  VisitElementType(params.dtype, [&]<typename T>(T) { RopeReference<T>(params); });
  return absl::OkStatus();
}

}  // namespace tandem
