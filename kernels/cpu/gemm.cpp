#include "kernels/cpu/gemm.h"

#include <algorithm>
#include <type_traits>

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 takes the deliberately undefined registers of its own AVX-512 intrinsics for a mistake (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
// The stream's pool spreads the work; Eigen must not start threads of its own.
#define EIGEN_DONT_PARALLELIZE
#include <Eigen/Core>

namespace detr::kernels::cpu {
namespace {

template <class T>
auto eigen(Matrix<T> m) {
  using Dense = Eigen::Matrix<std::remove_const_t<T>, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  using Map = Eigen::Map<std::conditional_t<std::is_const_v<T>, const Dense, Dense>, Eigen::Unaligned, Eigen::OuterStride<>>;
  return Map(m.data, m.rows, m.cols, Eigen::OuterStride<>(m.stride));
}

template <class Product, class T>
void store(const Product& product, Matrix<T> c, Write write) {
  auto out = eigen(c);
  if (write == Write::add) out.noalias() += product;
  else out.noalias() = product;
}

constexpr std::int64_t kBlockBytes = std::int64_t{1} << 19;      // a part of a second-level cache
constexpr std::int64_t kMinRows = 256, kMaxRows = 1024;          // of a block: fewer do not pay for packing the right factor
constexpr std::int64_t kRowUnit = 8;                             // Eigen takes 4 rows at a time; a remainder is slow
constexpr std::int64_t kMinTasks = 8;                            // where the rows allow, so that threads end together
constexpr std::int64_t kPartialBytes = std::int64_t{64} << 20;   // of partial sums
constexpr std::int64_t kMaxChunks = 16, kMinChunkRows = 1024;
constexpr std::int64_t kElementsPerAdd = 1 << 15;                // of a task that adds partial sums
constexpr std::int64_t kOutputPanel = 128;                       // rows of a weight's gradient per task

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace

template <class T>
void multiply(Matrix<const T> a, Matrix<const T> b, Matrix<T> c, Write write) {
  store(eigen(a) * eigen(b), c, write);
}

template <class T>
void multiply_nt(Matrix<const T> a, Matrix<const T> b, Matrix<T> c, Write write) {
  store(eigen(a) * eigen(b).transpose(), c, write);
}

template <class T>
void multiply_tn(Matrix<const T> a, Matrix<const T> b, Matrix<T> c, Write write) {
  store(eigen(a).transpose() * eigen(b), c, write);
}

std::int64_t row_grain(std::int64_t rows, std::int64_t row_bytes) {
  const std::int64_t fitting = kBlockBytes / std::max<std::int64_t>(1, row_bytes);
  const std::int64_t wanted = std::clamp(fitting, kMinRows, kMaxRows);
  const std::int64_t tasks = std::max(ceil_div(rows, wanted), std::min(kMinTasks, ceil_div(rows, kMinRows)));
  const std::int64_t even_tasks = tasks > 1 ? ceil_div(tasks, 2) * 2 : 1;
  return std::max(kRowUnit, ceil_div(ceil_div(rows, even_tasks), kRowUnit) * kRowUnit);
}

template <class T>
void sum_of_row_products(const Stream& stream, Matrix<const T> a, const BlockOf<T>& b, std::int64_t col_panel, Matrix<T> c) {
  if (c.rows * c.cols == 0) return;
  constexpr std::int64_t kElement = sizeof(T);
  const std::int64_t rows = a.rows, size = c.rows * c.cols;
  const std::int64_t affordable = std::max<std::int64_t>(1, kPartialBytes / (size * kElement));
  const std::int64_t chunks = std::clamp<std::int64_t>(rows / kMinChunkRows, 1, std::min(kMaxChunks, affordable));
  const std::int64_t chunk_rows = ceil_div(rows, chunks), block_rows = row_grain(chunk_rows, col_panel * kElement);
  const std::int64_t col_panels = c.cols / col_panel, row_panels = ceil_div(c.rows, kOutputPanel);

  // Chunk 0 is summed in c itself.
  const Tensor partial = stream.empty({chunks - 1, c.rows, c.cols}, dtype_of<T>);
  const auto sum_of = [&](std::int64_t chunk) {
    return chunk == 0 ? c : Matrix<T>(partial.data<T>() + (chunk - 1) * size, c.rows, c.cols);
  };
  stream.parallel_blocks(chunks * col_panels * row_panels, 1, [&](std::int64_t task, std::int64_t) {
    const std::int64_t chunk = task / (col_panels * row_panels);
    const std::int64_t col = task / row_panels % col_panels * col_panel;
    const std::int64_t out = task % row_panels * kOutputPanel, out_end = std::min(c.rows, out + kOutputPanel);
    const Matrix<T> sum = sum_of(chunk).rows_in(out, out_end).cols_in(col, col + col_panel);
    const std::int64_t begin = std::min(rows, chunk * chunk_rows), end = std::min(rows, begin + chunk_rows);
    for (std::int64_t i = 0; i < sum.rows; ++i) std::fill_n(sum.row(i), sum.cols, T{0});
    Tensor scratch;
    for (std::int64_t row = begin; row < end; row += block_rows) {
      const std::int64_t row_end = std::min(end, row + block_rows);
      multiply_tn(a.rows_in(row, row_end).cols_in(out, out_end), b(row, row_end, col, col + col_panel, scratch), sum, Write::add);
    }
  });
  if (chunks == 1) return;
  stream.parallel_blocks(c.rows, ceil_div(kElementsPerAdd, c.cols), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      T* total = c.row(i);
      for (std::int64_t chunk = 1; chunk < chunks; ++chunk) {
        const T* part = sum_of(chunk).row(i);
#pragma GCC ivdep
        for (std::int64_t j = 0; j < c.cols; ++j) total[j] += part[j];
      }
    }
  });
}

template void multiply<float>(Matrix<const float>, Matrix<const float>, Matrix<float>, Write);
template void multiply<double>(Matrix<const double>, Matrix<const double>, Matrix<double>, Write);
template void multiply_nt<float>(Matrix<const float>, Matrix<const float>, Matrix<float>, Write);
template void multiply_nt<double>(Matrix<const double>, Matrix<const double>, Matrix<double>, Write);
template void multiply_tn<float>(Matrix<const float>, Matrix<const float>, Matrix<float>, Write);
template void multiply_tn<double>(Matrix<const double>, Matrix<const double>, Matrix<double>, Write);
template void sum_of_row_products<float>(const Stream&, Matrix<const float>, const BlockOf<float>&, std::int64_t, Matrix<float>);
template void sum_of_row_products<double>(const Stream&, Matrix<const double>, const BlockOf<double>&, std::int64_t, Matrix<double>);

}  // namespace detr::kernels::cpu
