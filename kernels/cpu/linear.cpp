#include "kernels/linear.h"

#include <algorithm>
#include <vector>

#include "kernels/cpu/gemm.h"
#include "kernels/dispatch.h"
#include "kernels/pointwise.h"

namespace detr::kernels::cpu {
namespace {

/// (..., D) as a matrix of R rows.
template <class T>
Matrix<T> rows_of(const Tensor& tensor) {
  return {tensor.data<std::remove_const_t<T>>(), tensor.rows(), tensor.dim(-1)};
}

/// Column sums in double: each chunk of rows apart, then the chunks in order.
template <class T>
void column_sums(const Stream& stream, Matrix<const T> m, T* sums) {
  constexpr std::int64_t kChunkRows = 1024;
  const std::int64_t chunks = (m.rows + kChunkRows - 1) / kChunkRows;
  std::vector<double> partial(static_cast<std::size_t>(chunks * m.cols));
  stream.parallel_blocks(m.rows, kChunkRows, [&](std::int64_t begin, std::int64_t end) {
    double* sum = partial.data() + begin / kChunkRows * m.cols;
    for (std::int64_t i = begin; i < end; ++i) {
      const T* row = m.row(i);
#pragma GCC ivdep
      for (std::int64_t j = 0; j < m.cols; ++j) sum[j] += static_cast<double>(row[j]);
    }
  });
  for (std::int64_t j = 0; j < m.cols; ++j) {
    double sum = 0;
    for (std::int64_t chunk = 0; chunk < chunks; ++chunk) sum += partial[static_cast<std::size_t>(chunk * m.cols + j)];
    sums[j] = static_cast<T>(sum);
  }
}

}  // namespace

void linear_forward(const Stream& stream, const Tensor& x, const Tensor& weight, const Tensor* bias, Tensor& y) {
  dispatch_float("linear", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto in = rows_of<const T>(x), w = rows_of<const T>(weight);   // (R, I), (O, I)
    const auto out = rows_of<T>(y);                                      // (R, O)
    stream.parallel_blocks(in.rows, row_grain(in.rows, in.cols * size_of(x.dtype())), [&](std::int64_t begin, std::int64_t end) {
      if (bias)
        for (std::int64_t i = begin; i < end; ++i) std::copy_n(bias->data<T>(), out.cols, out.row(i));
      multiply_nt(in.rows_in(begin, end), w, out.rows_in(begin, end), bias ? Write::add : Write::overwrite);
    });
  });
}

void linear_backward(const Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& weight, Tensor* dx, Tensor* dweight,
                     Tensor* dbias, bool add_dx) {
  if (dx && add_dx) {
    Tensor part = stream.empty_like(*dx);
    linear_backward(stream, dy, x, weight, &part, dweight, dbias, false);
    return accumulate(stream, part, *dx);
  }
  dispatch_float("linear", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto in = rows_of<const T>(x), w = rows_of<const T>(weight), dout = rows_of<const T>(dy);
    if (dx) {
      const auto din = rows_of<T>(*dx);
      stream.parallel_blocks(dout.rows, row_grain(dout.rows, dout.cols * size_of(x.dtype())), [&](std::int64_t begin, std::int64_t end) {
        multiply(dout.rows_in(begin, end), w, din.rows_in(begin, end), Write::overwrite);
      });
    }
    if (dweight) {
      const BlockOf<T> block_of_x = [&](std::int64_t row_begin, std::int64_t row_end, std::int64_t col_begin, std::int64_t col_end,
                                        Tensor&) { return in.rows_in(row_begin, row_end).cols_in(col_begin, col_end); };
      sum_of_row_products(stream, dout, block_of_x, in.cols, rows_of<T>(*dweight));
    }
    if (dbias) column_sums(stream, dout, dbias->data<T>());
  });
}

}  // namespace detr::kernels::cpu
