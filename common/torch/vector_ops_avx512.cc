#define TANDEM_VECTOR_SET vector_avx512
#define TANDEM_VECTOR_BYTES 64
#include "common/torch/vector_ops.inc"
