#define TANDEM_VECTOR_SET vector_avx2
#define TANDEM_VECTOR_BYTES 32
#include "common/torch/vector_ops.inc"
