// Stands in for cuda_policy_model.cc where the build has no device code.
#include "trainer_server/policy/cuda_policy_model.h"

namespace tandem {

AttentionOptions CudaAttentionOptions(const ModelConfig&, bool is_deterministic) {
  return {.is_deterministic = is_deterministic};
}
std::string CudaAttentionName(const ModelConfig&, StorageFormat, const AttentionOptions&) { return "none"; }

absl::StatusOr<std::unique_ptr<PolicyModel>> CreateCudaPolicyModel(const ModelConfig&, const WeightLayout&, const std::byte*,
                                                                   const AdapterMemory&, const PolicyOptions&,
                                                                   const PolicyDevice&, AdapterLayout) {
  return BuiltWithoutCuda("policy");
}

}  // namespace tandem
