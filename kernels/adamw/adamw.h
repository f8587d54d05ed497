// AdamW's passes over flat arrays: the norm of the gradient and the update with decoupled weight decay (Loshchilov and Hutter,
// 2019, arXiv 1711.05101, algorithm 2). The step's scalars are the caller's: trainer_server/optim.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/gpu/device.h"

namespace tandem {

// Scratch for SquaredNorm, on an 8-byte boundary. The result is its first double.
std::size_t AdamWScratchBytes();

struct SquaredNormParams {
  const float* values = nullptr;  // [count]
  std::int64_t count = 0;
  void* scratch = nullptr;  // AdamWScratchBytes()
};
// Leaves sum(values^2) in the scratch's first double: summed in fp64 in an order of each device's own that does not change from
// run to run. Errors: INVALID_ARGUMENT (count), UNIMPLEMENTED (no device code in this build), INTERNAL (launch).
absl::Status SquaredNorm(const SquaredNormParams& params, Device device, void* stream);

// For each element, with g = gradient * clip:
//   m += (1 - beta1) (g - m);  v = beta2 v + (1 - beta2) g^2
//   p = keep p - step_size m / (sqrt(v) inverse_root_bias2 + epsilon)
struct AdamWUpdateParams {
  float* parameters = nullptr;  // [count], as the other three
  const float* gradients = nullptr;
  float* first_moments = nullptr;
  float* second_moments = nullptr;
  std::int64_t count = 0;
  float clip = 1;
  float fresh1 = 0;  // 1 - beta1
  float beta2 = 0;
  float fresh2 = 0;              // 1 - beta2
  float step_size = 0;           // learning rate / (1 - beta1^step)
  float inverse_root_bias2 = 1;  // 1 / sqrt(1 - beta2^step)
  float keep = 1;                // 1 - learning rate * weight decay
  float epsilon = 0;
};
absl::Status AdamWUpdate(const AdamWUpdateParams& params, Device device, void* stream);

}  // namespace tandem
