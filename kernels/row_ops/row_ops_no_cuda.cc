// Stands in for row_ops.cu where the build has no device code.
#include "kernels/row_ops/row_ops.h"

namespace tandem {

absl::Status ConvertToBf16(const ConvertToBf16Params&, void*) { return BuiltWithoutCuda("conversion to bf16"); }
absl::Status ConvertToFp32(const ConvertToFp32Params&, void*) { return BuiltWithoutCuda("conversion to fp32"); }
absl::Status Add(const AddParams&, void*) { return BuiltWithoutCuda("addition"); }
absl::Status Dropout(const DropoutParams&, void*) { return BuiltWithoutCuda("dropout"); }
absl::Status SumRows(const SumRowsParams&, void*) { return BuiltWithoutCuda("sum of rows"); }
absl::Status NormHeadsBackward(const NormHeadsBackwardParams&, void*) { return BuiltWithoutCuda("norm of heads, backward"); }

}  // namespace tandem
