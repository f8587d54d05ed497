// Stands in for the device's files where the build has no device code.
#include "kernels/attention/paged_attention.h"

namespace tandem::internal {

absl::Status PlanPagedAttentionCuda(const PagedAttentionPlanParams&, const PagedAttentionScratch&, PagedAttentionPlan*, void*) {
  return BuiltWithoutCuda("paged attention");
}
absl::Status PagedAttentionCuda(const PagedAttentionParams&, const PagedAttentionPlan&, const PagedAttentionScratch&, void*) {
  return BuiltWithoutCuda("paged attention");
}

}  // namespace tandem::internal
