// Stands in for token_logprob.cu where the build has no device code.
#include "kernels/token_logprob/token_logprob.h"

namespace tandem {

absl::Status TokenLogprobTile(const TokenLogprobTileParams&, void*) { return BuiltWithoutCuda("token_logprob tile"); }
absl::Status TokenLogprobFinish(const TokenLogprobFinishParams&, void*) { return BuiltWithoutCuda("token_logprob finish"); }
absl::Status TokenLogprobGradient(const TokenLogprobGradientParams&, void*) { return BuiltWithoutCuda("token_logprob gradient"); }

}  // namespace tandem
