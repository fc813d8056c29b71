#include "kernels/assignment.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "kernels/box_math.h"
#include "kernels/dispatch.h"
#include "runtime/error.h"

namespace detr::kernels::cpu {
namespace {

/// Costs beyond this count as not finite: sums of them along a path could overflow.
constexpr double kLargestCost = 1e300;

void expect_counts(const char* op, const Tensor& counts, std::int64_t capacity) {
  for (std::int64_t n = 0; n < counts.numel(); ++n) {
    const std::int64_t count = counts.data<std::int64_t>()[n];
    DETR_CHECK(count >= 0 && count <= capacity, op, ": counts[", n, "] must be in [0, ", capacity, "], got ", count);
  }
}

/// What one class score adds to the cost of a query.
template <class T>
T class_cost(T logit, const MatchCostOptions& options) {
  const T alpha = T(options.alpha), tiny = T(1e-8);
  const T e = std::exp(-std::abs(logit)), small = e / (1 + e), large = 1 / (1 + e);
  const T p = logit >= 0 ? large : small, rest = logit >= 0 ? small : large;   // rest = 1 - p, without its cancellation in f32
  const T is_not = options.gamma == 2 ? rest * rest : std::pow(rest, T(options.gamma));
  const T is = options.gamma == 2 ? p * p : std::pow(p, T(options.gamma));
  return alpha * is_not * -std::log(p + tiny) - (1 - alpha) * is * -std::log(rest + tiny);
}

/// One problem with rows <= columns: every row gets a column of its own at the least sum of costs.
///
/// Rows enter one after the other. Each grows a tree of alternating paths, always by the column that the reduced costs
/// cost - row_price - column_price put nearest, until it comes to a free column; the assignment is then shifted along that path.
/// Where several optima exist the order of the scan decides. These rules make it that of SciPy, so that matchings can be
/// compared index by index: the open columns are listed from the last to the first; of the nearest ones the first in the list
/// is taken, but the last free one if there is any; the last entry of the list moves into the gap; and the sums are formed in
/// the order in which they are written here.
class ShortestAugmentingPath {
 public:
  ShortestAugmentingPath(const double* cost, std::int64_t rows, std::int64_t columns)
      : cost_(cost),
        columns_(columns),
        row_price_(index(rows), 0),
        column_price_(index(columns), 0),
        distance_(index(columns)),
        parent_(index(columns), -1),
        row_of_(index(columns), -1),
        column_of_(index(rows), -1),
        list_(index(columns)) {
    for (std::int64_t row = 0; row < rows; ++row) assign_row(row);
  }

  /// Column of each row.
  const std::vector<std::int64_t>& column_of() const { return column_of_; }

 private:
  static std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

  void assign_row(std::int64_t start) {
    for (std::size_t i = 0; i < list_.size(); ++i) list_[i] = columns_ - 1 - static_cast<std::int64_t>(i);
    std::fill(distance_.begin(), distance_.end(), std::numeric_limits<double>::infinity());

    // list_[0, open) are the open columns, the rest those in the tree.
    std::size_t open = list_.size();
    double reached = 0;
    std::int64_t free_column = -1;
    for (std::int64_t row = start; free_column < 0;) {
      const std::size_t nearest = scan(row, reached, open);
      const std::int64_t column = list_[nearest];
      reached = distance_[index(column)];
      std::swap(list_[nearest], list_[--open]);
      row = row_of_[index(column)];
      if (row < 0) free_column = column;
    }

    row_price_[index(start)] += reached;
    for (std::size_t i = open; i < list_.size(); ++i) {
      const std::size_t column = index(list_[i]);
      const double shift = reached - distance_[column];
      column_price_[column] -= shift;
      if (row_of_[column] >= 0) row_price_[index(row_of_[column])] += shift;
    }

    for (std::int64_t column = free_column, row = -1; row != start;) {
      row = parent_[index(column)];
      row_of_[index(column)] = row;
      std::swap(column_of_[index(row)], column);
    }
  }

  /// Offers the paths through `row`, which the tree has `reached`, to the open columns; returns the nearest one's list entry.
  std::size_t scan(std::int64_t row, double reached, std::size_t open) {
    const double* cost = cost_ + row * columns_;
    const double price = row_price_[index(row)];
    std::size_t nearest = 0;
    double least = std::numeric_limits<double>::infinity();
    for (std::size_t i = 0; i < open; ++i) {
      const std::size_t column = index(list_[i]);
      const double through = reached + cost[column] - price - column_price_[column];
      if (through < distance_[column]) {
        distance_[column] = through;
        parent_[column] = row;
      }
      if (distance_[column] < least || (distance_[column] == least && row_of_[column] < 0)) {
        least = distance_[column];
        nearest = i;
      }
    }
    return nearest;
  }

  const double* cost_;
  std::int64_t columns_;
  std::vector<double> row_price_, column_price_;
  std::vector<double> distance_;        // from the entering row to each column, by the best path so far
  std::vector<std::int64_t> parent_;    // row before each column on that path
  std::vector<std::int64_t> row_of_;    // row of each column, -1 for a free one
  std::vector<std::int64_t> column_of_;
  std::vector<std::int64_t> list_;
};

/// Solves one image. cost (count, queries), match (queries). Returns its status.
template <class T>
std::int64_t assign_image(const T* cost, std::int64_t count, std::int64_t queries, std::int64_t* match) {
  std::fill(match, match + queries, -1);
  for (std::int64_t i = 0; i < count * queries; ++i) {
    if (!(std::abs(static_cast<double>(cost[i])) <= kLargestCost)) return i;
  }
  // The smaller side becomes the rows; on a tie the queries do.
  std::vector<double> matrix(static_cast<std::size_t>(count * queries));
  if (count < queries) {
    std::copy(cost, cost + count * queries, matrix.begin());
    const ShortestAugmentingPath solved(matrix.data(), count, queries);
    for (std::int64_t g = 0; g < count; ++g) match[solved.column_of()[static_cast<std::size_t>(g)]] = g;
  } else {
    for (std::int64_t q = 0; q < queries; ++q) {
      for (std::int64_t g = 0; g < count; ++g) matrix[static_cast<std::size_t>(q * count + g)] = static_cast<double>(cost[g * queries + q]);
    }
    const ShortestAugmentingPath solved(matrix.data(), queries, count);
    std::copy(solved.column_of().begin(), solved.column_of().end(), match);
  }
  return -1;
}

}  // namespace

void match_cost(const Stream& stream, const Tensor& logits, const Tensor& boxes, std::int64_t begin, const Tensor& labels,
                const Tensor& truth, const Tensor& counts, const MatchCostOptions& options, Tensor& cost) {
  const std::int64_t tokens = logits.dim(1), classes = logits.dim(2), capacity = labels.dim(1), queries = cost.dim(2);
  expect_counts("match_cost", counts, capacity);
  dispatch_float("match_cost", logits.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    stream.parallel_blocks(labels.numel(), 1, [&](std::int64_t first, std::int64_t last) {
      for (std::int64_t row = first; row < last; ++row) {
        const std::int64_t n = row / capacity, g = row % capacity;
        if (g >= counts.data<std::int64_t>()[n]) continue;
        const std::int64_t label = labels.data<std::int64_t>()[row];
        DETR_CHECK(label >= 0 && label < classes, "match_cost: labels[", n, ", ", g, "] must be in [0, ", classes, "), got ", label);
        const T* logit = logits.data<T>() + (n * tokens + begin) * classes + label;
        const T* box = boxes.data<T>() + (n * tokens + begin) * 4;
        const T* target = truth.data<T>() + row * 4;
        T* out = cost.data<T>() + row * queries;
        for (std::int64_t q = 0; q < queries; ++q, logit += classes, box += 4) {
          out[q] = T(options.class_weight) * class_cost(*logit, options) + T(options.bbox_weight) * box_distance<T>(box, target) -
                   T(options.giou_weight) * BoxOverlap<T>(box, target).giou();
        }
      }
    });
  });
}

void assign(const Stream& stream, const Tensor& cost, const Tensor& counts, Tensor& match, Tensor& status) {
  const std::int64_t images = cost.dim(0), capacity = cost.dim(1), queries = cost.dim(2);
  expect_counts("assign", counts, capacity);
  dispatch_float("assign", cost.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    stream.parallel_blocks(images, 1, [&](std::int64_t first, std::int64_t last) {
      for (std::int64_t n = first; n < last; ++n) {
        status.data<std::int64_t>()[n] = assign_image(cost.data<T>() + n * capacity * queries, counts.data<std::int64_t>()[n], queries,
                                                      match.data<std::int64_t>() + n * queries);
      }
    });
  });
}

}  // namespace detr::kernels::cpu
