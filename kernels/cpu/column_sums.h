#pragma once
#include <vector>

#include "kernels/cpu/blocks.h"
#include "runtime/stream.h"

namespace detr::kernels::cpu {

/// Two sums for each column of a matrix.
struct ColumnSums {
  std::vector<double> first, second;
};

/// first[c] += a and second[c] += b for rows [begin, end), where term(element, c, a, b) adds one element's share. Four rows at
/// a time, since reading and writing the sums costs more than the terms.
template <class Term>
void add_rows(std::int64_t begin, std::int64_t end, std::int64_t C, double* first, double* second, Term term) {
  std::int64_t r = begin;
  for (; r + 4 <= end; r += 4) {
    const std::int64_t base = r * C;
#pragma GCC ivdep
    for (std::int64_t c = 0; c < C; ++c) {
      double a = 0, b = 0;
      term(base + c, c, a, b);
      term(base + C + c, c, a, b);
      term(base + 2 * C + c, c, a, b);
      term(base + 3 * C + c, c, a, b);
      first[c] += a;
      second[c] += b;
    }
  }
  for (; r < end; ++r) {
    for (std::int64_t c = 0; c < C; ++c) term(r * C + c, c, first[c], second[c]);
  }
}

/// Runs task(begin, end, first, second) on fixed blocks of rows, each with sums of its own, and adds those up in order.
template <class Task>
ColumnSums sum_columns(const Stream& stream, std::int64_t rows, std::int64_t C, const Task& task) {
  const std::int64_t grain = rows_per_block(C), blocks = (rows + grain - 1) / grain;
  std::vector<double> partial(static_cast<std::size_t>(blocks * 2 * C));
  stream.parallel_blocks(rows, grain, [&](std::int64_t begin, std::int64_t end) {
    double* first = partial.data() + begin / grain * 2 * C;
    task(begin, end, first, first + C);
  });
  ColumnSums sums{std::vector<double>(static_cast<std::size_t>(C)), std::vector<double>(static_cast<std::size_t>(C))};
  for (std::int64_t block = 0; block < blocks; ++block) {
    const double* first = partial.data() + block * 2 * C;
    for (std::int64_t c = 0; c < C; ++c) {
      sums.first[static_cast<std::size_t>(c)] += first[c];
      sums.second[static_cast<std::size_t>(c)] += first[C + c];
    }
  }
  return sums;
}

}  // namespace detr::kernels::cpu
