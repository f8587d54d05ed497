#define TANDEM_VECTOR_SET vector_baseline
#define TANDEM_VECTOR_BYTES 16
#include "common/torch/vector_ops.inc"
