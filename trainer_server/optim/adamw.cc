#include "trainer_server/optim/adamw.h"

#include <cmath>
#include <cstddef>

#include "common/base/check.h"

namespace tandem {
namespace {

// Eight running sums in a fixed order: the same bits whatever the threads.
double SquaredNorm(std::span<const float> values) {
  constexpr std::size_t kLanes = 8;
  double lanes[kLanes] = {};
  const std::size_t whole = values.size() / kLanes * kLanes;
  for (std::size_t i = 0; i < whole; i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const double value = values[i + lane];
      lanes[lane] += value * value;
    }
  }
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  for (std::size_t i = whole; i < values.size(); ++i) sum += static_cast<double>(values[i]) * values[i];
  return sum;
}

}  // namespace

absl::StatusOr<AdamWReport> AdamWStep(const AdamWOptions& options, double learning_rate, std::uint64_t step,
                                      std::span<float> parameters, std::span<const float> gradients,
                                      std::span<float> first_moments, std::span<float> second_moments) {
  TANDEM_CHECK(step >= 1, "step counts from 1");
  TANDEM_CHECK(parameters.size() == gradients.size() && parameters.size() == first_moments.size() &&
                   parameters.size() == second_moments.size(),
               "parameters ", parameters.size(), ", gradients ", gradients.size(), ", moments ", first_moments.size(), " and ",
               second_moments.size());
  AdamWReport report;
  report.grad_norm = std::sqrt(SquaredNorm(gradients));
  if (!std::isfinite(report.grad_norm)) {
    return absl::FailedPreconditionError(
        absl::StrCat("optimizer step ", step, ": the gradient norm is ", report.grad_norm, "; parameters are unchanged"));
  }
  float clip = 1;
  if (options.max_grad_norm > 0) {
    const double factor = options.max_grad_norm / (report.grad_norm + 1e-6);  // as torch.nn.utils.clip_grad_norm_
    report.is_clipped = factor < 1;
    if (report.is_clipped) clip = static_cast<float>(factor);
  }

  const double steps = static_cast<double>(step);
  const double bias1 = 1 - std::pow(options.beta1, steps), bias2 = 1 - std::pow(options.beta2, steps);
  const float step_size = static_cast<float>(learning_rate / bias1);
  const float inverse_root_bias2 = static_cast<float>(1 / std::sqrt(bias2));
  const float keep = static_cast<float>(1 - learning_rate * options.weight_decay);
  const float epsilon = static_cast<float>(options.epsilon);
  const float beta2 = static_cast<float>(options.beta2);
  const float fresh1 = static_cast<float>(1 - options.beta1), fresh2 = static_cast<float>(1 - options.beta2);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const float gradient = gradients[i] * clip;
    first_moments[i] += fresh1 * (gradient - first_moments[i]);
    second_moments[i] = beta2 * second_moments[i] + fresh2 * gradient * gradient;
    const float denominator = std::sqrt(second_moments[i]) * inverse_root_bias2 + epsilon;
    parameters[i] = keep * parameters[i] - step_size * first_moments[i] / denominator;
  }
  return report;
}

}  // namespace tandem
