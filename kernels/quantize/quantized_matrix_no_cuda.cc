// Stands in for device code where the build has none.
#include "kernels/quantize/quantized_matrix.h"

namespace tandem::internal {

absl::Status DequantizeCuda(const QuantizedMatrix&, void*, void*) { return BuiltWithoutCuda("dequantize"); }
absl::Status MultiplyFewCuda(const MultiplyFewParams&, void*) { return BuiltWithoutCuda("multiply few"); }

}  // namespace tandem::internal
