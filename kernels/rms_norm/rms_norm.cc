#include "kernels/rms_norm/rms_norm.h"

#include <cmath>

#include "kernels/base/elements.h"
#include "kernels/cuda_launchers.h"

namespace tandem {
namespace {

double InverseRms(const float* x, std::int64_t width, float epsilon) {
  double sum = 0;
  for (std::int64_t i = 0; i < width; ++i) sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  return 1 / std::sqrt(sum / static_cast<double>(width) + static_cast<double>(epsilon));
}

template <typename T>
void RmsNormReference(const RmsNormParams& params) {
  const auto* weight = static_cast<const T*>(params.weight);
  for (std::int64_t row = 0; row < params.num_rows; ++row) {
    const std::int64_t source = (params.rows != nullptr ? params.rows[row] : row) * params.width;
    const float* x = params.input + source;
    T* y = static_cast<T*>(params.output) + row * params.width;
    const double scale = InverseRms(x, params.width, params.epsilon);
    for (std::int64_t i = 0; i < params.width; ++i) {
      y[i] = FromFloat<T>(static_cast<float>(static_cast<double>(x[i]) * scale * static_cast<double>(ToFloat(weight[i]))));
    }
  }
}

template <typename T>
void RmsNormBackwardReference(const RmsNormBackwardParams& params) {
  const auto* weight = static_cast<const T*>(params.weight);
  for (std::int64_t row = 0; row < params.num_rows; ++row) {
    const std::int64_t source = (params.rows != nullptr ? params.rows[row] : row) * params.width;
    const float* x = params.input + source;
    const T* grad_output = static_cast<const T*>(params.grad_output) + row * params.width;
    float* grad_input = params.grad_input + source;
    double dot = 0;
    for (std::int64_t i = 0; i < params.width; ++i) {
      dot += static_cast<double>(ToFloat(weight[i])) * static_cast<double>(ToFloat(grad_output[i])) * static_cast<double>(x[i]);
    }
    const double scale = InverseRms(x, params.width, params.epsilon);
    const double pull = scale * scale * scale / static_cast<double>(params.width) * dot;
    for (std::int64_t i = 0; i < params.width; ++i) {
      const double gradient = static_cast<double>(ToFloat(weight[i])) * static_cast<double>(ToFloat(grad_output[i])) * scale -
                              static_cast<double>(x[i]) * pull;
      grad_input[i] = static_cast<float>(static_cast<double>(grad_input[i]) + gradient);
    }
  }
}

}  // namespace

absl::Status RmsNorm(const RmsNormParams& params, Device device, void* stream) {
  TANDEM_RETURN_IF_ERROR(CheckRows("rms_norm", params.dtype, params.num_rows, params.width, kMaxRmsNormWidth));
  if (params.num_rows == 0) return absl::OkStatus();
  if (device == Device::kCuda) return internal::RmsNormCuda(params, stream);
  VisitElementType(params.dtype, [&]<typename T>(T) { RmsNormReference<T>(params); });
  return absl::OkStatus();
}

absl::Status RmsNormBackward(const RmsNormBackwardParams& params, Device device, void* stream) {
  TANDEM_RETURN_IF_ERROR(CheckRows("rms_norm_backward", params.dtype, params.num_rows, params.width, kMaxRmsNormWidth));
  if (params.num_rows == 0) return absl::OkStatus();
  if (device == Device::kCuda) return internal::RmsNormBackwardCuda(params, stream);
  VisitElementType(params.dtype, [&]<typename T>(T) { RmsNormBackwardReference<T>(params); });
  return absl::OkStatus();
}

}  // namespace tandem
