// Matrices as views of memory that somebody else owns (the pool, a buffer), and their product by LibTorch's GEMM.
#pragma once

#include <cstdint>
#include <type_traits>

namespace tandem {

template <typename T>
struct Matrix {
  T* data = nullptr;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t row_stride = 0;  // in elements
  std::int64_t column_stride = 1;

  Matrix() = default;
  Matrix(T* data_in, std::int64_t rows_in, std::int64_t columns_in) : Matrix(data_in, rows_in, columns_in, columns_in) {}
  Matrix(T* data_in, std::int64_t rows_in, std::int64_t columns_in, std::int64_t row_stride_in, std::int64_t column_stride_in = 1)
      : data(data_in), rows(rows_in), columns(columns_in), row_stride(row_stride_in), column_stride(column_stride_in) {}

  Matrix Transposed() const { return {data, columns, rows, column_stride, row_stride}; }
  Matrix Rows(std::int64_t begin, std::int64_t end) const {
    return {data + begin * row_stride, end - begin, columns, row_stride, column_stride};
  }
  Matrix Columns(std::int64_t begin, std::int64_t end) const {
    return {data + begin * column_stride, rows, end - begin, row_stride, column_stride};
  }
  operator Matrix<const T>() const  // NOLINT(google-explicit-constructor): a view that may write is a view that may read
      requires(!std::is_const_v<T>) {
    return {data, rows, columns, row_stride, column_stride};
  }
};

// c = beta c + alpha a b; with beta 0 what c held is not read. Shapes must agree. One stride of each matrix is 1. Throws
// c10::Error.
void Multiply(Matrix<const float> a, Matrix<const float> b, Matrix<float> c, double alpha = 1, double beta = 0);
void Multiply(Matrix<const double> a, Matrix<const double> b, Matrix<double> c, double alpha = 1, double beta = 0);

}  // namespace tandem
