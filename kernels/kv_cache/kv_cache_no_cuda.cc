// Stands in for kv_cache.cu where the build has no device code.
#include "kernels/kv_cache/kv_cache.h"

namespace tandem::internal {

absl::Status FillRopeTableCuda(const RopeTableParams&, void*) { return BuiltWithoutCuda("rope table"); }
absl::Status RopeAndCacheCuda(const RopeAndCacheParams&, void*) { return BuiltWithoutCuda("rope and cache"); }
absl::Status RoundBlocksCuda(std::span<const RoundBlockParams>, void*) { return BuiltWithoutCuda("rounding blocks"); }

}  // namespace tandem::internal
