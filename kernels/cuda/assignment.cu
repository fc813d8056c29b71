#include "kernels/assignment.h"

#include <algorithm>
#include <cfloat>
#include <climits>
#include <cstddef>
#include <limits>

#include "kernels/box_math.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/shared_memory.cuh"

namespace detr::kernels::cuda {
namespace {

// match_cost

constexpr int kCostThreads = 128;

struct CostWeights {
  float class_weight, bbox_weight, giou_weight, alpha, gamma;
};

/// What one class score adds to the cost of a query.
__device__ float class_cost(float logit, const CostWeights& w) {
  constexpr float kTiny = 1e-8F;
  const float e = expf(-fabsf(logit)), small = e / (1 + e), large = 1 / (1 + e);
  const float p = logit >= 0 ? large : small, rest = logit >= 0 ? small : large;   // rest = 1 - p, without its cancellation
  const float is_not = w.gamma == 2 ? rest * rest : powf(rest, w.gamma);
  const float is = w.gamma == 2 ? p * p : powf(p, w.gamma);
  return w.alpha * is_not * -logf(p + kTiny) - (1 - w.alpha) * is * -logf(rest + kTiny);
}

/// A block prices one true box, row = n Gcap + g, for all queries. logits (N, T, C), boxes (N, T, 4), cost (N, Gcap, Q).
template <class T>
__global__ void __launch_bounds__(kCostThreads)
match_cost_kernel(const T* __restrict__ logits, const float* __restrict__ boxes, std::int64_t begin, const std::int64_t* __restrict__ labels,
                  const float* __restrict__ truth, const std::int64_t* __restrict__ counts, std::int64_t tokens, std::int64_t classes,
                  int capacity, int queries, CostWeights w, float* __restrict__ cost) {
  const std::int64_t row = blockIdx.x, n = blockIdx.x / static_cast<unsigned>(capacity);
  const auto g = static_cast<std::int64_t>(blockIdx.x % static_cast<unsigned>(capacity));
  if (g >= counts[n]) return;
  const std::int64_t label = labels[row];
  const bool known = label >= 0 && label < classes;
  const float target[4] = {truth[row * 4], truth[row * 4 + 1], truth[row * 4 + 2], truth[row * 4 + 3]};
  for (int q = static_cast<int>(threadIdx.x); q < queries; q += kCostThreads) {
    const std::int64_t token = n * tokens + begin + q;
    float out = __int_as_float(0x7fc00000);   // NaN, which the assignment reports
    if (known) {
      const float* box = boxes + token * 4;
      out = w.class_weight * class_cost(to_float(logits[token * classes + label]), w) + w.bbox_weight * box_distance<float>(box, target) -
            w.giou_weight * BoxOverlap<float>(box, target).giou();
    }
    cost[row * queries + q] = out;
  }
}

// assign

constexpr unsigned kAll = 0xffffffffU;
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int kPerLane = 10;             // columns of a lane that fit into registers: the 300 queries of a step
constexpr int kMostColumns = 65534;      // a column and a row share a word

/// What the solver knows of one column.
struct Column {
  double distance = 0;   // from the entering row, by the best path so far
  double price = 0;
  int place = INT_MAX;   // in the list of columns: the open ones first, those in the tree behind them
  int parent = -1;       // the row before it on that path
  int row = -1;          // its row, -1 for a free one
  float cost = 0;        // to the row that is scanned
};

/// Columns lane, lane + 32, ... of a problem with at most 32 kPerLane of them, in registers.
class RegisterColumns {
 public:
  __device__ explicit RegisterColumns(int lane) : lane_(lane) {
    each([](int, Column& column) { column = Column(); });
  }

  /// Calls fn(index, column) for the lane's columns, and for some with an index beyond the last: a test here would keep the compiler
  /// from working on several at a time.
  template <class F>
  __device__ void each(F&& fn) {
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) fn(lane_ + 32 * k, columns_[k]);
  }

  /// Least distance of the lane's columns with a place before `open`, as a tree for the sake of latency.
  __device__ double least(int open) const {
    double x[kPerLane];
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) x[k] = columns_[k].place < open ? columns_[k].distance : kInfinity;
#pragma unroll
    for (int step = 1; step < kPerLane; step *= 2) {
#pragma unroll
      for (int k = 0; k + step < kPerLane; k += 2 * step) x[k] = x[k + step] < x[k] ? x[k + step] : x[k];
    }
    return x[0];
  }

 private:
  int lane_;
  Column columns_[kPerLane];
};

/// The same for any number of columns, in memory.
class MemoryColumns {
 public:
  __device__ MemoryColumns(Column* memory, int columns, int lane) : columns_(memory), count_(columns), lane_(lane) {
    each([](int, Column& column) { column = Column(); });
  }

  template <class F>
  __device__ void each(F&& fn) {
    for (int c = lane_; c < count_; c += 32) fn(c, columns_[c]);
  }

  __device__ double least(int open) const {
    double x = kInfinity;
    for (int c = lane_; c < count_; c += 32) {
      if (columns_[c].place < open && columns_[c].distance < x) x = columns_[c].distance;
    }
    return x;
  }

 private:
  Column* columns_;
  int count_, lane_;
};

/// Least of the lanes' numbers, none of which is NaN. The bits of a double, made to rise with its value, are compared in halves.
__device__ double warp_least(double x) {
  constexpr unsigned long long kSign = 1ULL << 63;
  auto bits = static_cast<unsigned long long>(__double_as_longlong(__dadd_rn(x, 0.0)));   // -0 becomes 0, its equal
  bits ^= bits & kSign ? ~0ULL : kSign;
  const auto mine = static_cast<unsigned>(bits >> 32);
  const unsigned high = __reduce_min_sync(kAll, mine);
  const unsigned low = __reduce_min_sync(kAll, mine == high ? static_cast<unsigned>(bits) : ~0U);
  bits = static_cast<unsigned long long>(high) << 32 | low;
  bits ^= bits & kSign ? kSign : ~0ULL;
  return __longlong_as_double(static_cast<long long>(bits));
}

/// How the memory of one problem is divided; rows <= columns.
struct Workspace {
  double* row_price;
  Column* columns;   // only where they do not fit into registers
  int *column_of, *parent;

  __host__ __device__ static bool needs_columns(int columns) { return columns > 32 * kPerLane; }
  __host__ __device__ static std::size_t bytes(int rows, int columns) {
    const auto r = static_cast<std::size_t>(rows), c = static_cast<std::size_t>(columns);
    const std::size_t sum = r * (sizeof(double) + sizeof(int)) + c * (sizeof(int) + (needs_columns(columns) ? sizeof(Column) : 0));
    return (sum + 15) / 16 * 16;
  }
  /// rows, columns: the most that any problem of the launch can have.
  __device__ Workspace(std::byte* memory, int rows, int columns)
      : row_price(reinterpret_cast<double*>(memory)),
        columns(reinterpret_cast<Column*>(row_price + rows)),
        column_of(reinterpret_cast<int*>(this->columns + (needs_columns(columns) ? columns : 0))),
        parent(column_of + rows) {}
};

/// The costs of a problem: cost[row row_stride + column column_stride].
struct Problem {
  const float* cost;
  std::int64_t row_stride, column_stride;
  int rows, columns;
};

/// Shortest augmenting paths by one warp, step by step and tie by tie as on the CPU (kernels/cpu/assignment.cpp says what the rules
/// are); each lane holds the columns lane, lane + 32, ... The list of columns is kept as the place of each. The f64 arithmetic is
/// sums and differences only, so the compiler has nothing to contract and the bits are those of the host.
template <class Columns>
__device__ void solve(Columns& columns, const Problem& problem, const Workspace& work, int lane) {
  constexpr unsigned kAssigned = 1U << 16;   // beyond any place
  for (int row = lane; row < problem.rows; row += 32) {
    work.row_price[row] = 0;
    work.column_of[row] = -1;
  }
  __syncwarp();
  for (int start = 0; start < problem.rows; ++start) {
    columns.each([&](int c, Column& x) {
      x.distance = kInfinity;
      x.place = c < problem.columns ? problem.columns - 1 - c : INT_MAX;   // closed for good if there is no such column
    });
    // The search goes on from row to row until it comes to a free column.
    int open = problem.columns, row = start, column = 0;
    double reached = 0;
    do {
      const float* cost = problem.cost + row * problem.row_stride;
      columns.each([&](int c, Column& x) { x.cost = __ldg(cost + min(c, problem.columns - 1) * problem.column_stride); });
      const double price = work.row_price[row];
      columns.each([&](int, Column& x) {
        const double through = reached + static_cast<double>(x.cost) - price - x.price;
        const bool nearer = (x.place < open) & (through < x.distance);
        x.distance = nearer ? through : x.distance;
        x.parent = nearer ? row : x.parent;
      });
      reached = warp_least(columns.least(open));
      // Of the nearest columns the free one with the last place comes first, then the others from the first place on.
      unsigned order = ~0U, pair = 0;
      columns.each([&](int c, Column& x) {
        const bool nearest = (x.place < open) & (x.distance == reached);
        const auto place = static_cast<unsigned>(x.place);
        const unsigned mine = nearest ? (x.row < 0 ? kAssigned - 1 - place : kAssigned + place) : ~0U;
        pair = mine < order ? static_cast<unsigned>(c) << 16 | static_cast<unsigned>(x.row + 1) : pair;
        order = min(mine, order);
      });
      const unsigned first = __reduce_min_sync(kAll, order);
      pair = __reduce_max_sync(kAll, order == first ? pair : 0U);   // places differ, so this is one column's
      column = static_cast<int>(pair >> 16);
      row = static_cast<int>(pair & 0xffffU) - 1;
      const auto place = static_cast<int>(first < kAssigned ? kAssigned - 1 - first : first - kAssigned);
      --open;
      columns.each([&](int c, Column& x) { x.place = c == column ? open : x.place == open ? place : x.place; });
    } while (row >= 0);

    if (lane == 0) work.row_price[start] += reached;
    columns.each([&](int c, Column& x) {
      if (c < problem.columns) work.parent[c] = x.parent;
      if (x.place < open) return;
      const double shift = reached - x.distance;
      x.price -= shift;
      if (x.row >= 0) work.row_price[x.row] += shift;   // rows differ, and none is `start`
    });
    __syncwarp();
    while (row != start) {
      row = work.parent[column];
      const int before = work.column_of[row];
      columns.each([&](int c, Column& x) { x.row = c == column ? row : x.row; });
      __syncwarp();   // all have read what lane 0 overwrites
      if (lane == 0) work.column_of[row] = column;
      column = before;
    }
    __syncwarp();
  }
}

/// Index of the first of `count` costs that is not finite, or -1.
__device__ std::int64_t first_not_finite(const float* __restrict__ cost, std::int64_t count, int lane) {
  constexpr int kInFlight = 32;
  for (std::int64_t begin = 0; begin < count; begin += 32 * kInFlight) {
    float x[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const std::int64_t i = begin + lane + 32 * k;
      x[k] = i < count ? __ldg(cost + i) : 0.0F;
    }
    unsigned first = ~0U;
#pragma unroll
    for (int k = kInFlight - 1; k >= 0; --k) {
      if (!(fabsf(x[k]) <= FLT_MAX)) first = static_cast<unsigned>(lane + 32 * k);
    }
    first = __reduce_min_sync(kAll, first);
    if (first != ~0U) return begin + first;
  }
  return -1;
}

/// A warp solves one image. cost (N, Gcap, Q), match (N, Q). scratch: `scratch_bytes` for each image unless that lies in shared memory.
template <bool kShared>
__global__ void __launch_bounds__(32)
assign_kernel(const float* __restrict__ cost, const std::int64_t* __restrict__ counts, int capacity, int queries, std::byte* scratch,
              std::int64_t scratch_bytes, std::int64_t* match, std::int64_t* status) {
  extern __shared__ double shared[];
  const std::int64_t n = blockIdx.x;
  const int lane = static_cast<int>(threadIdx.x);
  const auto count = static_cast<int>(min(max(counts[n], std::int64_t(0)), std::int64_t(capacity)));
  cost += n * capacity * queries;
  match += n * queries;
  const std::int64_t bad = first_not_finite(cost, std::int64_t(count) * queries, lane);
  if (lane == 0) status[n] = bad;
  if (bad >= 0) {
    for (int q = lane; q < queries; q += 32) match[q] = -1;
    return;
  }

  // The smaller side becomes the rows; on a tie the queries do.
  const bool rows_are_boxes = count < queries;
  const Problem problem = rows_are_boxes ? Problem{cost, queries, 1, count, queries} : Problem{cost, 1, queries, queries, count};
  std::byte* memory = kShared ? reinterpret_cast<std::byte*>(shared) : scratch + n * scratch_bytes;
  const Workspace work(memory, min(queries, capacity), max(queries, capacity));
  const auto run = [&](auto columns) {
    solve(columns, problem, work, lane);
    columns.each([&](int c, Column& x) {
      if (c >= problem.columns) return;
      if (rows_are_boxes) match[c] = x.row;
      else if (x.row >= 0) match[x.row] = c;
    });
  };
  if (Workspace::needs_columns(problem.columns)) run(MemoryColumns(work.columns, problem.columns, lane));
  else run(RegisterColumns(lane));
}

}  // namespace

void match_cost(const Stream& stream, const Tensor& logits, const Tensor& boxes, std::int64_t begin, const Tensor& labels,
                const Tensor& truth, const Tensor& counts, const MatchCostOptions& options, Tensor& cost) {
  const std::int64_t capacity = labels.dim(1), queries = cost.dim(2);
  DETR_CHECK(std::max(capacity, queries) <= INT_MAX, "match_cost: CUDA takes fewer boxes and queries than ", capacity, " and ", queries);
  const CostWeights weights{static_cast<float>(options.class_weight), static_cast<float>(options.bbox_weight),
                            static_cast<float>(options.giou_weight), static_cast<float>(options.alpha), static_cast<float>(options.gamma)};
  dispatch_float("match_cost", logits.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch(stream, match_cost_kernel<T>, blocks_for(queries == 0 ? 0 : labels.numel(), 1), kCostThreads, 0, logits.data<T>(),
           boxes.data<float>(), begin, labels.data<std::int64_t>(), truth.data<float>(), counts.data<std::int64_t>(), logits.dim(1),
           logits.dim(2), capacity, queries, weights, cost.data<float>());
  });
}

void assign(const Stream& stream, const Tensor& cost, const Tensor& counts, Tensor& match, Tensor& status) {
  const std::int64_t images = cost.dim(0), rows = std::min(cost.dim(1), cost.dim(2)), columns = std::max(cost.dim(1), cost.dim(2));
  DETR_CHECK(columns <= kMostColumns, "assign: CUDA takes at most ", kMostColumns, " queries and boxes, got ", columns);
  const std::size_t bytes = Workspace::bytes(static_cast<int>(rows), static_cast<int>(columns));
  const auto enqueue = [&](auto kernel, std::size_t shared_bytes, std::byte* scratch) {
    launch(stream, kernel, blocks_for(images, 1), 32, shared_bytes, cost.data<float>(), counts.data<std::int64_t>(), cost.dim(1),
           cost.dim(2), scratch, static_cast<std::int64_t>(bytes), match.data<std::int64_t>(), status.data<std::int64_t>());
  };
  if (bytes <= most_shared(stream)) {
    allow_shared(stream, "assign", assign_kernel<true>, bytes);
    enqueue(assign_kernel<true>, bytes, nullptr);
  } else {
    const Tensor scratch = stream.empty({images, static_cast<std::int64_t>(bytes)}, DType::u8);
    enqueue(assign_kernel<false>, 0, static_cast<std::byte*>(scratch.raw()));
  }
}

}  // namespace detr::kernels::cuda
