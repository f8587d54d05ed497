// Stands in for packed_attention.cu and attention_parts.cu where the build has no device code.
#include "kernels/packed_attention/attention_parts.h"
#include "kernels/packed_attention/packed_attention.h"

namespace tandem {

absl::Status PackedAttentionForward(const PackedAttentionParams&, void*) { return BuiltWithoutCuda("packed attention"); }
absl::Status PackedAttentionBackward(const PackedAttentionBackwardParams&, void*) {
  return BuiltWithoutCuda("packed attention's backward pass");
}
absl::Status GatherLse(const GatherLseParams&, void*) { return BuiltWithoutCuda("gathering of log-sum-exps"); }
absl::Status MergeAttention(const MergeAttentionParams&, void*) { return BuiltWithoutCuda("merging of attention"); }
absl::Status CopyHeads(const CopyHeadsParams&, void*) { return BuiltWithoutCuda("copy of attention's heads"); }
absl::Status ZeroRows(const ZeroRowsParams&, void*) { return BuiltWithoutCuda("zeroing of rows"); }

}  // namespace tandem
