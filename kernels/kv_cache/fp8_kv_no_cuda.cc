// Stands in for fp8_kv.cu where the build has no device code.
#include "kernels/kv_cache/fp8_kv.h"

namespace tandem::internal {

absl::Status MeasureFp8KvScalesCuda(const Fp8KvParams&, void*) { return BuiltWithoutCuda("measuring KV scales"); }
absl::Status StoreFp8KvCuda(const Fp8KvParams&, void*) { return BuiltWithoutCuda("storing KV in fp8"); }

}  // namespace tandem::internal
