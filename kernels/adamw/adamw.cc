#include "kernels/adamw/adamw.h"

#include <cmath>

#include "kernels/cuda_launchers.h"

namespace tandem {
namespace {

absl::Status CheckCount(const char* kernel, std::int64_t count) {
  if (count >= 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(kernel, ": ", count, " elements"));
}

// Eight running sums in a fixed order: the same bits whatever the threads.
double SquaredNormReference(const float* values, std::int64_t count) {
  constexpr std::int64_t kLanes = 8;
  double lanes[kLanes] = {};
  const std::int64_t whole = count / kLanes * kLanes;
  for (std::int64_t i = 0; i < whole; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      const auto value = static_cast<double>(values[i + lane]);
      lanes[lane] += value * value;
    }
  }
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  for (std::int64_t i = whole; i < count; ++i) sum += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  return sum;
}

void AdamWUpdateReference(const AdamWUpdateParams& params) {
  for (std::int64_t i = 0; i < params.count; ++i) {
    const float gradient = params.gradients[i] * params.clip;
    params.first_moments[i] += params.fresh1 * (gradient - params.first_moments[i]);
    params.second_moments[i] = params.beta2 * params.second_moments[i] + params.fresh2 * gradient * gradient;
    const float denominator = std::sqrt(params.second_moments[i]) * params.inverse_root_bias2 + params.epsilon;
    params.parameters[i] = params.keep * params.parameters[i] - params.step_size * params.first_moments[i] / denominator;
  }
}

}  // namespace

std::size_t AdamWScratchBytes() { return (1 + static_cast<std::size_t>(internal::kSquaredNormBlocks)) * sizeof(double); }

absl::Status SquaredNorm(const SquaredNormParams& params, Device device, void* stream) {
  TANDEM_RETURN_IF_ERROR(CheckCount("squared norm", params.count));
  if (device == Device::kCuda) return internal::SquaredNormCuda(params, stream);
  *static_cast<double*>(params.scratch) = SquaredNormReference(params.values, params.count);
  return absl::OkStatus();
}

absl::Status AdamWUpdate(const AdamWUpdateParams& params, Device device, void* stream) {
  TANDEM_RETURN_IF_ERROR(CheckCount("adamw", params.count));
  if (params.count == 0) return absl::OkStatus();
  if (device == Device::kCuda) return internal::AdamWUpdateCuda(params, stream);
  AdamWUpdateReference(params);
  return absl::OkStatus();
}

}  // namespace tandem
