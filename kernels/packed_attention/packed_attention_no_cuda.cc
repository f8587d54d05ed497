// Stands in for packed_attention.cu where the build has no device code.
#include "kernels/packed_attention/packed_attention.h"

namespace tandem {

absl::Status PackedAttentionForward(const PackedAttentionParams&, void*) { return BuiltWithoutCuda("packed attention"); }
absl::Status PackedAttentionBackward(const PackedAttentionBackwardParams&, void*) {
  return BuiltWithoutCuda("packed attention's backward pass");
}

}  // namespace tandem
