#include "common/torch/vector_ops.h"

namespace tandem {

// One namespace an instruction set: vector_ops_<set>.cc.
#define TANDEM_DECLARE_VECTOR_SET(set)  \
  namespace set {                       \
  const VectorOps<float>& FloatOps();   \
  const VectorOps<double>& DoubleOps(); \
  }
TANDEM_DECLARE_VECTOR_SET(vector_baseline)
#ifdef TANDEM_X86_VECTOR_SETS
TANDEM_DECLARE_VECTOR_SET(vector_avx2)
TANDEM_DECLARE_VECTOR_SET(vector_avx512)
#endif

namespace {

enum class InstructionSet { kBaseline, kAvx2, kAvx512 };

InstructionSet BestInstructionSet() {
#ifdef TANDEM_X86_VECTOR_SETS
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return InstructionSet::kAvx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return InstructionSet::kAvx2;
#endif
  return InstructionSet::kBaseline;
}

const InstructionSet kInstructionSet = BestInstructionSet();

}  // namespace

template <>
const VectorOps<float>& vector_ops<float>() {
#ifdef TANDEM_X86_VECTOR_SETS
  if (kInstructionSet == InstructionSet::kAvx512) return vector_avx512::FloatOps();
  if (kInstructionSet == InstructionSet::kAvx2) return vector_avx2::FloatOps();
#endif
  return vector_baseline::FloatOps();
}

template <>
const VectorOps<double>& vector_ops<double>() {
#ifdef TANDEM_X86_VECTOR_SETS
  if (kInstructionSet == InstructionSet::kAvx512) return vector_avx512::DoubleOps();
  if (kInstructionSet == InstructionSet::kAvx2) return vector_avx2::DoubleOps();
#endif
  return vector_baseline::DoubleOps();
}

}  // namespace tandem
