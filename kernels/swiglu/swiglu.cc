#include "kernels/swiglu/swiglu.h"

#include <cmath>

#include "kernels/base/elements.h"
#include "kernels/cuda_launchers.h"

namespace tandem {
namespace {

double Sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

template <typename T>
void SwigluReference(const SwigluParams& params) {
  for (std::int64_t row = 0; row < params.num_rows; ++row) {
    const float* gate = params.gate_up + row * 2 * params.width;
    const float* up = gate + params.width;
    T* output = static_cast<T*>(params.output) + row * params.width;
    for (std::int64_t i = 0; i < params.width; ++i) {
      const double g = static_cast<double>(gate[i]), u = static_cast<double>(up[i]);
      output[i] = FromFloat<T>(static_cast<float>(g * Sigmoid(g) * u));
    }
  }
}

// With s the sigmoid of g: d(g s u)/dg = u s (1 + g (1 - s)), d(g s u)/du = g s.
template <typename T>
void SwigluBackwardReference(const SwigluBackwardParams& params) {
  for (std::int64_t row = 0; row < params.num_rows; ++row) {
    const T* gate = static_cast<const T*>(params.gate_up) + row * 2 * params.width;
    const T* up = gate + params.width;
    T* output = static_cast<T*>(params.output) + row * params.width;
    T* grad_gate = static_cast<T*>(params.grad_gate_up) + row * 2 * params.width;
    T* grad_up = grad_gate + params.width;
    const T* grad_output = static_cast<const T*>(params.grad_output) + row * params.width;
    for (std::int64_t i = 0; i < params.width; ++i) {
      const double g = static_cast<double>(ToFloat(gate[i])), u = static_cast<double>(ToFloat(up[i])), s = Sigmoid(g);
      output[i] = FromFloat<T>(static_cast<float>(g * s * u));
      const auto grad = static_cast<double>(ToFloat(grad_output[i]));
      grad_gate[i] = FromFloat<T>(static_cast<float>(grad * u * s * (1 + g * (1 - s))));
      grad_up[i] = FromFloat<T>(static_cast<float>(grad * g * s));
    }
  }
}

}  // namespace

absl::Status Swiglu(const SwigluParams& params, Device device, void* stream) {
  TANDEM_RETURN_IF_ERROR(CheckRows("swiglu", params.dtype, params.num_rows, params.width, kWidthLimit));
  if (params.num_rows == 0) return absl::OkStatus();
  if (device == Device::kCuda) return internal::SwigluCuda(params, stream);
  VisitElementType(params.dtype, [&]<typename T>(T) { SwigluReference<T>(params); });
  return absl::OkStatus();
}

absl::Status SwigluBackward(const SwigluBackwardParams& params, Device device, void* stream) {
  TANDEM_RETURN_IF_ERROR(CheckRows("swiglu_backward", params.dtype, params.num_rows, params.width, kWidthLimit));
  if (params.num_rows == 0) return absl::OkStatus();
  if (device == Device::kCuda) return internal::SwigluBackwardCuda(params, stream);
  VisitElementType(params.dtype, [&]<typename T>(T) { SwigluBackwardReference<T>(params); });
  return absl::OkStatus();
}

}  // namespace tandem
