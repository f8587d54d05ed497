#include "trainer_server/optim/adamw.h"

#include <cmath>
#include <vector>

#include "common/base/check.h"
#include "kernels/adamw/adamw.h"

namespace tandem {
namespace {

absl::StatusOr<double> SquaredNormOf(std::span<const float> values, const AdamWDevice& device) {
  std::vector<double> on_host(AdamWScratchBytes() / sizeof(double) + 1);
  void* const scratch = device.device == Device::kCpu ? on_host.data() : device.scratch;
  TANDEM_RETURN_IF_ERROR(
      SquaredNorm({.values = values.data(), .count = static_cast<std::int64_t>(values.size()), .scratch = scratch}, device.device,
                  device.handle()));
  TANDEM_RETURN_IF_ERROR(device.Fence());
  double sum = 0;
  TANDEM_RETURN_IF_ERROR(CopyToHost(device.device, &sum, scratch, sizeof(sum)));
  return sum;
}

}  // namespace

absl::StatusOr<AdamWReport> AdamWStep(const AdamWOptions& options, double learning_rate, std::uint64_t step,
                                      std::span<float> parameters, std::span<const float> gradients,
                                      std::span<float> first_moments, std::span<float> second_moments,
                                      const AdamWDevice& device) {
  TANDEM_CHECK(step >= 1, "step counts from 1");
  TANDEM_CHECK(parameters.size() == gradients.size() && parameters.size() == first_moments.size() &&
                   parameters.size() == second_moments.size(),
               "parameters ", parameters.size(), ", gradients ", gradients.size(), ", moments ", first_moments.size(), " and ",
               second_moments.size());
  AdamWReport report;
  TANDEM_ASSIGN_OR_RETURN(const double squared_norm, SquaredNormOf(gradients, device));
  report.grad_norm = std::sqrt(squared_norm);
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
  TANDEM_RETURN_IF_ERROR(AdamWUpdate({.parameters = parameters.data(),
                                      .gradients = gradients.data(),
                                      .first_moments = first_moments.data(),
                                      .second_moments = second_moments.data(),
                                      .count = static_cast<std::int64_t>(parameters.size()),
                                      .clip = clip,
                                      .fresh1 = fresh1,
                                      .beta2 = beta2,
                                      .fresh2 = fresh2,
                                      .step_size = step_size,
                                      .inverse_root_bias2 = inverse_root_bias2,
                                      .keep = keep,
                                      .epsilon = epsilon},
                                     device.device, device.handle()));
  TANDEM_RETURN_IF_ERROR(device.Fence());
  return report;
}

}  // namespace tandem
