#pragma once
#include <functional>

#include "runtime/stream.h"

// Matrix products of the CPU code: `linear`, `conv2d` and whatever else reduces to them. T is float or double.
namespace detr::kernels::cpu {

/// A row-major matrix that lies in someone else's memory; consecutive rows begin `stride` elements apart.
template <class T>
struct Matrix {
  T* data = nullptr;
  std::int64_t rows = 0, cols = 0, stride = 0;

  Matrix() = default;
  Matrix(T* first, std::int64_t row_count, std::int64_t col_count) : Matrix(first, row_count, col_count, col_count) {}
  Matrix(T* first, std::int64_t row_count, std::int64_t col_count, std::int64_t row_stride)
      : data(first), rows(row_count), cols(col_count), stride(row_stride) {}

  T* row(std::int64_t i) const { return data + i * stride; }
  /// Rows and columns [begin, end).
  Matrix rows_in(std::int64_t begin, std::int64_t end) const { return {row(begin), end - begin, cols, stride}; }
  Matrix cols_in(std::int64_t begin, std::int64_t end) const { return {data + begin, rows, end - begin, stride}; }
};

enum class Write { overwrite, add };

/// One thread each; c must not overlap a or b. Sums in T, in an order fixed by the shapes. A sum of no terms is 0.
///   multiply     c (M, N)  = or +=  a (M, K) b (K, N)
///   multiply_nt  c (M, N)  = or +=  a (M, K) b (N, K)^T
///   multiply_tn  c (M, N)  = or +=  a (K, M)^T b (K, N)
template <class T>
void multiply(Matrix<const T> a, Matrix<const T> b, Matrix<T> c, Write write);
template <class T>
void multiply_nt(Matrix<const T> a, Matrix<const T> b, Matrix<T> c, Write write);
template <class T>
void multiply_tn(Matrix<const T> a, Matrix<const T> b, Matrix<T> c, Write write);

/// Rows per task of a product whose left factor has `rows` rows of `row_bytes` bytes: few enough for a block of them to stay
/// in the second-level cache, enough to pay for packing the right factor, all tasks about equal. A function of the shape alone.
std::int64_t row_grain(std::int64_t rows, std::int64_t row_bytes);

/// Makes or finds rows [row_begin, row_end), columns [col_begin, col_end) of a matrix. `scratch` is the caller's to keep while
/// it uses the result; the next call of the same task gets it again and may overwrite it.
template <class T>
using BlockOf = std::function<Matrix<const T>(std::int64_t row_begin, std::int64_t row_end, std::int64_t col_begin,
                                              std::int64_t col_end, Tensor& scratch)>;

/// c (M, K) = a (R, M)^T b (R, K), spread over the stream's threads: the gradient of a weight from the gradients and inputs of
/// its R rows, of which there may be millions. b is asked for in blocks of `col_panel` columns; K is a multiple of it. Fixed
/// chunks of rows are summed apart and then added in order. Partial sums take at most 64 MiB.
template <class T>
void sum_of_row_products(const Stream& stream, Matrix<const T> a, const BlockOf<T>& b, std::int64_t col_panel, Matrix<T> c);

}  // namespace detr::kernels::cpu
