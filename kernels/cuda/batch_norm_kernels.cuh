#pragma once
#include "kernels/activation_tag.h"
#include "kernels/cuda/activation_math.cuh"
#include "kernels/cuda/column_sums.cuh"

// The kernels of batch_norm.cu.
//
// Same bits whichever gradients are wanted: the same quantity is computed in several kernels here, so products that feed a sum are
// written as fmaf or __fmul_rn, and the compiler has no choice of contracting them in one kernel and not in another.

namespace detr::kernels::cuda {
namespace {

/// dy act'(v) rounded to T, with v the output for ReLU and the input for SiLU. Rounded, since dx and the sums must not depend on
/// whether it passes through memory as the residual's gradient.
template <Activation kind, class T>
__device__ inline float gradient_before(float dy, float v) {
  if constexpr (kind == Activation::silu) {
    const float s = sigmoid<T>(v);
    return to_float(from_float<T>(__fmul_rn(__fmul_rn(dy, s), fmaf(v, 1.0F - s, 1.0F))));
  } else {
    return activate_backward<kind, T>(dy, v);   // dy or 0, exact in T
  }
}

/// A value near the middle of channel c: the mean of eight rows spread over x (rows, C). Deviations from it are summed, so that a
/// mean far above the deviation costs no digits, nor does one row that lies far off.
template <class T>
__device__ inline float middle(const T* x, int rows, int C, int c) {
  constexpr int kSamples = 8;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kSamples; ++i) {
    const std::int64_t row = static_cast<std::int64_t>(rows) * i / kSamples;
    sum = fmaf(to_float(x[row * C + c]), 1.0F / kSamples, sum);
  }
  return sum;
}

template <int V>
__device__ inline void add(float (&total)[V], const float (&x)[V]) {
#pragma unroll
  for (int i = 0; i < V; ++i) total[i] += x[i];
}

/// Sums of x - middle and of its square over each part of the rows: partial (parts, C). Each thread adds up runs of 32 rows and
/// then the runs, so that no float sum has many more terms than a hundred.
template <class T, int V>
__global__ void __launch_bounds__(kTileThreads, 1) batch_sums_kernel(const ColumnTiles tiles, const T* x, float2* partial) {
  constexpr int kRows = 8, kSteps = 32 / kRows;
  const TilePlace place(tiles, V);
  __shared__ float middles[kTileWidth];
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < tiles.lanes * V && place.tile_column + thread < tiles.columns) {
    middles[thread] = middle(x, tiles.rows, tiles.columns, place.tile_column + thread);
  }
  __syncthreads();
  float center[V], first[V] = {}, second[V] = {};
#pragma unroll
  for (int i = 0; i < V; ++i) center[i] = middles[place.column - place.tile_column + i];

  const T* from = x + static_cast<std::int64_t>(place.first_row) * tiles.columns + place.column;
  const auto load = [&](int row) { return load_raw<T, V>(from + static_cast<std::int64_t>(row) * tiles.columns); };
  for (int k = place.group; k < place.rows;) {
    float a[V] = {}, b[V] = {};
    for (int step = 0; step < kSteps && k < place.rows; ++step, k += kRows * place.groups) {
      take_rows<kRows>(k, place.groups, place.rows, load, [&](const Raw<T, V>& raw, int) {
        float v[V];
        unpack<T, V>(raw, v);
#pragma unroll
        for (int i = 0; i < V; ++i) {
          const float d = v[i] - center[i];
          a[i] += d;
          b[i] = fmaf(d, d, b[i]);
        }
      });
    }
    add(first, a);
    add(second, b);
  }
  write_partial<V>(tiles, place, first, second, partial);
}

/// Where the statistics come from and go to. They are made of `partial` (parts, C); where that is null, of running_mean and running_var;
/// where those are null too, mean and rstd hold them already.
struct Statistics {
  const float2* partial;
  int parts;
  double eps, momentum;
  float *running_mean, *running_var, *mean, *rstd;
};

/// y = act((x - mean) scale + bias + residual). Every block makes the statistics of its own columns, and those with the first rows
/// write them. Rows go from last to first: those that the sums were taken of last may still be in the cache.
template <class T, int V, Activation kind, bool kResidual>
__global__ void __launch_bounds__(kTileThreads, 2)
    normalise_kernel(const ColumnTiles tiles, const Statistics statistics, const T* x, const float* weight, const float* bias, const T* residual,
                     T* y) {
  constexpr int kRows = kResidual ? 2 : 4;
  const TilePlace place(tiles, V);
  __shared__ float means[kTileWidth], scales[kTileWidth], biases[kTileWidth];
  const int thread = static_cast<int>(threadIdx.x), width = tiles.lanes * V, c = place.tile_column + thread;
  double2 sums{0, 0};
  if (statistics.partial) sums = column_totals(statistics.partial, statistics.parts, tiles.columns, place.tile_column, width);
  if (thread < width && c < tiles.columns) {
    float m, r;
    if (statistics.partial) {
      const double rows = tiles.rows, deviation = sums.x / rows;
      const double mean = middle(x, tiles.rows, tiles.columns, c) + deviation;
      double var = sums.y / rows - deviation * deviation;
      if (var < 0) var = 0;   // NaN stays NaN
      m = static_cast<float>(mean);
      r = static_cast<float>(1 / sqrt(var + statistics.eps));
      if (place.part == 0) {
        const double unbiased = tiles.rows > 1 ? rows / (rows - 1) : 1, momentum = statistics.momentum;
        statistics.running_mean[c] = static_cast<float>((1 - momentum) * statistics.running_mean[c] + momentum * mean);
        statistics.running_var[c] = static_cast<float>((1 - momentum) * statistics.running_var[c] + momentum * var * unbiased);
      }
    } else if (statistics.running_var) {
      m = statistics.running_mean[c];
      r = static_cast<float>(1 / sqrt(static_cast<double>(statistics.running_var[c]) + statistics.eps));
    } else {
      m = statistics.mean[c];
      r = statistics.rstd[c];
    }
    if (place.part == 0 && statistics.running_var) {
      statistics.mean[c] = m;
      statistics.rstd[c] = r;
    }
    means[thread] = m;
    scales[thread] = weight[c] * r;
    biases[thread] = bias[c];
  }
  __syncthreads();
  float mean[V], scale[V], offset[V];
#pragma unroll
  for (int i = 0; i < V; ++i) {
    const int at = place.column - place.tile_column + i;
    mean[i] = means[at];
    scale[i] = scales[at];
    offset[i] = biases[at];
  }

  const std::int64_t last = static_cast<std::int64_t>(place.first_row + place.rows - 1) * tiles.columns + place.column;
  struct Row {
    Raw<T, V> x, residual;
  };
  const auto load = [&](int row) {
    const std::int64_t at = last - static_cast<std::int64_t>(row) * tiles.columns;
    Row raw;
    raw.x = load_raw<T, V>(x + at);
    if constexpr (kResidual) raw.residual = load_raw<T, V>(residual + at);
    return raw;
  };
  for (int k = place.group; k < place.rows; k += kRows * place.groups) {
    take_rows<kRows>(k, place.groups, place.rows, load, [&](const Row& raw, int row) {
      float v[V], r[V];
      unpack<T, V>(raw.x, v);
      if constexpr (kResidual) unpack<T, V>(raw.residual, r);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        v[i] = fmaf(v[i] - mean[i], scale[i], offset[i]);
        if constexpr (kResidual) v[i] += r[i];
        v[i] = activate<kind, T>(v[i]);
      }
      store<T, V>(y + last - static_cast<std::int64_t>(row) * tiles.columns, v);
    });
  }
}

/// What the kernels of the backward read and write; `other` is y for ReLU, the residual for SiLU with one, and else null.
template <class T>
struct Backward {
  const T *dy, *x, *other;
  const float *weight, *bias, *mean, *rstd;
  T *dx, *dresidual;
  float *dweight, *dbias;
};

/// The channels' values that a thread needs, V of each.
template <int V>
struct Channels {
  float mean[V], scale[V], bias[V];

  template <class T>
  __device__ Channels(const Backward<T>& in, const TilePlace& place, int columns) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const int c = place.column + i;
      if (c >= columns) break;
      mean[i] = in.mean[c];
      scale[i] = in.weight[c] * in.rstd[c];
      bias[i] = in.bias[c];
    }
  }
};

/// V elements of a row of the backward's inputs, on their way.
template <class T, int V, Activation kind, bool kResidual, bool kReadsX>
struct BackwardRow {
  static constexpr bool kReadsOther = kind == Activation::relu || (kind == Activation::silu && kResidual);
  Raw<T, V> dy, x, other;

  BackwardRow() = default;
  __device__ BackwardRow(const Backward<T>& in, std::int64_t at) {
    dy = load_raw<T, V>(in.dy + at);
    if constexpr (kReadsX) x = load_raw<T, V>(in.x + at);
    if constexpr (kReadsOther) other = load_raw<T, V>(in.other + at);
  }
  /// g, the gradient before the activation, and d = x - mean.
  __device__ void gradient(const Channels<V>& channels, float (&g)[V], float (&d)[V]) const {
    float v[V];
    unpack<T, V>(dy, g);
    if constexpr (kReadsX) unpack<T, V>(x, d);
    if constexpr (kReadsOther) unpack<T, V>(other, v);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      if constexpr (kReadsX) d[i] -= channels.mean[i];
      if constexpr (kind == Activation::silu) {
        const float before = fmaf(d[i], channels.scale[i], channels.bias[i]);
        v[i] = kResidual ? before + v[i] : before;
      }
      if constexpr (kind != Activation::none) g[i] = gradient_before<kind, T>(g[i], v[i]);
    }
  }
};

/// First pass: g, and where kSums its sums and those of g (x - mean) over each part of the rows, partial (parts, C). Writes g as
/// dresidual and, for given statistics, g scale as dx, each if not null. Runs as in batch_sums_kernel.
template <class T, int V, Activation kind, bool kResidual, bool kSums>
__global__ void __launch_bounds__(kTileThreads, kSums || kind == Activation::silu ? 1 : 2)
    gradient_sums_kernel(const ColumnTiles tiles, const Backward<T> in, float2* partial) {
  using Row = BackwardRow<T, V, kind, kResidual, kSums || kind == Activation::silu>;
  constexpr int kRows = kSums && !kResidual ? 4 : 2, kSteps = 32 / kRows;   // as many loads on their way as the registers hold
  const TilePlace place(tiles, V);
  const Channels<V> channels(in, place, tiles.columns);
  float first[V] = {}, second[V] = {};
  const std::int64_t base = static_cast<std::int64_t>(place.first_row) * tiles.columns + place.column;
  const auto load = [&](int row) { return Row(in, base + static_cast<std::int64_t>(row) * tiles.columns); };
  for (int k = place.group; k < place.rows;) {
    float a[V] = {}, b[V] = {};
    for (int step = 0; step < kSteps && k < place.rows; ++step, k += kRows * place.groups) {
      take_rows<kRows>(k, place.groups, place.rows, load, [&](const Row& raw, int row) {
        const std::int64_t at = base + static_cast<std::int64_t>(row) * tiles.columns;
        float g[V], d[V];
        raw.gradient(channels, g, d);
        if constexpr (kSums) {
#pragma unroll
          for (int i = 0; i < V; ++i) {
            a[i] += g[i];
            b[i] = fmaf(g[i], d[i], b[i]);
          }
        }
        if (in.dresidual) store<T, V>(in.dresidual + at, g);
        if (in.dx) {
#pragma unroll
          for (int i = 0; i < V; ++i) g[i] *= channels.scale[i];
          store<T, V>(in.dx + at, g);
        }
      });
    }
    add(first, a);
    add(second, b);
  }
  if constexpr (kSums) write_partial<V>(tiles, place, first, second, partial);
}

/// Sums of g and g (x - mean) over all rows that share the statistics, `rows` in number: of this rank's alone by parts, partial (parts, C),
/// or where that is null of each rank's, exchanged (2, C) for each, `stride` numbers apart.
struct GradientSums {
  const float2* partial;
  int parts;
  const double* exchanged;
  int ranks;
  std::int64_t stride;
  double rows;

  /// Those of column first_column + t in thread t < width; all threads of the block call it.
  __device__ double2 of_columns(int columns, int first_column, int width) const {
    if (partial) return column_totals(partial, parts, columns, first_column, width);
    const int thread = static_cast<int>(threadIdx.x), column = first_column + thread;
    double2 total{0, 0};
    if (thread >= width || column >= columns) return total;
    for (int rank = 0; rank < ranks; ++rank) {
      const double* share = exchanged + rank * stride + column;
      total.x += share[0];
      total.y += share[columns];
    }
    return total;
  }
};

/// Second pass, from the sums over n rows: dbias = sum(g), dweight = rstd sum(g (x - mean)), each if not null, and if dx is not null
///   dx = scale (g - sum(g) / n - (x - mean) rstd^2 sum(g (x - mean)) / n)
template <class T, int V, Activation kind, bool kResidual>
__global__ void __launch_bounds__(kTileThreads, 1)
    input_gradient_kernel(const ColumnTiles tiles, const Backward<T> in, const GradientSums all) {
  using Row = BackwardRow<T, V, kind, kResidual, true>;
  constexpr int kRows = 4;
  const TilePlace place(tiles, V);
  __shared__ float offsets[kTileWidth], slopes[kTileWidth];
  const int thread = static_cast<int>(threadIdx.x), width = tiles.lanes * V, c = place.tile_column + thread;
  const double2 sums = all.of_columns(tiles.columns, place.tile_column, width);
  if (thread < width && c < tiles.columns) {
    const double r = in.rstd[c], rows = all.rows;
    if (place.part == 0 && in.dbias) in.dbias[c] = static_cast<float>(sums.x);
    if (place.part == 0 && in.dweight) in.dweight[c] = static_cast<float>(r * sums.y);
    offsets[thread] = static_cast<float>(sums.x / rows);
    slopes[thread] = static_cast<float>(r * r * sums.y / rows);
  }
  if (!in.dx) return;
  __syncthreads();
  const Channels<V> channels(in, place, tiles.columns);
  float offset[V], slope[V];
#pragma unroll
  for (int i = 0; i < V; ++i) {
    const int at = place.column - place.tile_column + i;
    offset[i] = offsets[at];
    slope[i] = slopes[at];
  }
  // From the last row to the first, as in normalise_kernel.
  const std::int64_t last = static_cast<std::int64_t>(place.first_row + place.rows - 1) * tiles.columns + place.column;
  const auto load = [&](int row) { return Row(in, last - static_cast<std::int64_t>(row) * tiles.columns); };
  for (int k = place.group; k < place.rows; k += kRows * place.groups) {
    take_rows<kRows>(k, place.groups, place.rows, load, [&](const Row& raw, int row) {
      float g[V], d[V];
      raw.gradient(channels, g, d);
#pragma unroll
      for (int i = 0; i < V; ++i) g[i] = channels.scale[i] * fmaf(-d[i], slope[i], g[i] - offset[i]);
      store<T, V>(in.dx + last - static_cast<std::int64_t>(row) * tiles.columns, g);
    });
  }
}

/// moments (2, C) of x (rows, C): the mean, and the sum of squared deviations from it; from batch_sums_kernel's partial (parts, C).
template <class T>
__global__ void __launch_bounds__(kTileThreads)
    moments_kernel(const T* x, int rows, int C, const float2* partial, int parts, double* moments) {
  const int thread = static_cast<int>(threadIdx.x), first = static_cast<int>(blockIdx.x) * kTileWidth, c = first + thread;
  const double2 sums = column_totals(partial, parts, C, first, kTileWidth);
  if (thread >= kTileWidth || c >= C) return;
  const double deviation = sums.x / rows;
  double squares = sums.y - sums.x * deviation;
  if (squares < 0) squares = 0;   // NaN stays NaN
  moments[c] = middle(x, rows, C, c) + deviation;
  moments[C + c] = squares;
}

/// The statistics of `ranks` times `rows` rows from their moments, (2, C) for each rank, `stride` numbers apart; one thread for each channel.
__global__ void combine_kernel(const double* all, int ranks, std::int64_t stride, int C, double rows, const Statistics statistics) {
  const int c = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (c >= C) return;
  double mean = all[c], squares = all[C + c];
  for (int rank = 1; rank < ranks; ++rank) {   // rank times `rows` rows so far, and `rows` more
    const double* share = all + rank * stride + c;
    const double distance = share[0] - mean, part = 1 / static_cast<double>(rank + 1);
    mean += distance * part;
    squares += share[C] + distance * distance * (rows * rank * part);
  }
  const double n = rows * ranks, var = squares / n, unbiased = n > 1 ? n / (n - 1) : 1, momentum = statistics.momentum;
  statistics.mean[c] = static_cast<float>(mean);
  statistics.rstd[c] = static_cast<float>(1 / sqrt(var + statistics.eps));
  statistics.running_mean[c] = static_cast<float>((1 - momentum) * statistics.running_mean[c] + momentum * mean);
  statistics.running_var[c] = static_cast<float>((1 - momentum) * statistics.running_var[c] + momentum * var * unbiased);
}

/// What is made of gradient_sums_kernel's partial (parts, C), each if not null: sums (2, C), dweight and dbias.
__global__ void __launch_bounds__(kTileThreads)
    gradient_totals_kernel(const float2* partial, int parts, int C, const float* rstd, double* sums, float* dweight, float* dbias) {
  const int thread = static_cast<int>(threadIdx.x), first = static_cast<int>(blockIdx.x) * kTileWidth, c = first + thread;
  const double2 total = column_totals(partial, parts, C, first, kTileWidth);
  if (thread >= kTileWidth || c >= C) return;
  if (sums) sums[c] = total.x;
  if (sums) sums[C + c] = total.y;
  if (dweight) dweight[c] = static_cast<float>(rstd[c] * total.y);
  if (dbias) dbias[c] = static_cast<float>(total.x);
}

}  // namespace
}  // namespace detr::kernels::cuda
