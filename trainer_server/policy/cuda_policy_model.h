// What PolicyModel::Create dispatches to for Device::kCuda: cuda_policy_model.cc, or cuda_policy_model_no_cuda.cc where the build
// has no device code.
#pragma once

#include <memory>
#include <string>

#include "trainer_server/policy/policy_model.h"

namespace tandem {

// Deterministic where it must be, and where cuDNN does not serve.
AttentionOptions CudaAttentionOptions(const ModelConfig& config, bool is_deterministic);
// What computes attention there, for a log.
std::string CudaAttentionName(const ModelConfig& config, StorageFormat format, const AttentionOptions& options);

// Computes in the weights' type: bf16, or fp32. Requires: the arguments as PolicyModel::Create checked them. Errors:
// INVALID_ARGUMENT (storage format, head size), UNIMPLEMENTED (no device code in this build).
absl::StatusOr<std::unique_ptr<PolicyModel>> CreateCudaPolicyModel(const ModelConfig& config, const WeightLayout& layout,
                                                                   const std::byte* weights, const AdapterMemory& memory,
                                                                   const PolicyOptions& options, const PolicyDevice& device,
                                                                   AdapterLayout adapter_layout);

}  // namespace tandem
