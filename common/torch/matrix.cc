#include "common/torch/matrix.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/from_blob.h>

namespace tandem {
namespace {

template <typename T>
at::Tensor View(Matrix<T> matrix) {
  return at::from_blob(const_cast<std::remove_const_t<T>*>(matrix.data), {matrix.rows, matrix.columns},
                       {matrix.row_stride, matrix.column_stride},
                       at::TensorOptions(c10::CppTypeToScalarType<std::remove_const_t<T>>::value));
}

template <typename T>
void MultiplyAs(Matrix<const T> a, Matrix<const T> b, Matrix<T> c, double alpha, double beta) {
  if (c.rows == 0 || c.columns == 0) return;
  at::Tensor out = View(c);
  at::addmm_out(out, out, View(a), View(b), beta, alpha);
}

}  // namespace

void Multiply(Matrix<const float> a, Matrix<const float> b, Matrix<float> c, double alpha, double beta) {
  MultiplyAs<float>(a, b, c, alpha, beta);
}
void Multiply(Matrix<const double> a, Matrix<const double> b, Matrix<double> c, double alpha, double beta) {
  MultiplyAs<double>(a, b, c, alpha, beta);
}

}  // namespace tandem
