// AdamW with decoupled weight decay (Loshchilov and Hutter, 2019, arXiv 1711.05101, algorithm 2) after clipping the global norm.
#pragma once

#include <cstdint>
#include <span>

#include "common/base/status.h"
#include "common/gpu/stream.h"

namespace tandem {

struct AdamWOptions {
  double beta1 = 0.9;
  double beta2 = 0.99;
  double epsilon = 1e-8;
  double weight_decay = 0;
  double max_grad_norm = 1;  // 0: off
};

struct AdamWReport {
  double grad_norm = 0;  // before clipping
  bool is_clipped = false;
};

// Where a step's arrays lie and what it runs on.
struct AdamWDevice {
  Device device = Device::kCpu;
  Stream* stream = nullptr;  // the GPU's alone, as the scratch: AdamWScratchBytes() of kernels/adamw/adamw.h
  void* scratch = nullptr;

  void* handle() const { return stream == nullptr ? nullptr : stream->handle(); }
  absl::Status Fence() const { return stream == nullptr ? absl::OkStatus() : stream->Synchronize(); }
};

// One step over flat fp32 arrays of equal length; returns when it is done. `step` counts from 1. Errors: FAILED_PRECONDITION when
// the norm is not finite, INTERNAL (the device); nothing is changed before the norm is known.
absl::StatusOr<AdamWReport> AdamWStep(const AdamWOptions& options, double learning_rate, std::uint64_t step,
                                      std::span<float> parameters, std::span<const float> gradients,
                                      std::span<float> first_moments, std::span<float> second_moments,
                                      const AdamWDevice& device = {});

}  // namespace tandem
