#include "kernels/batch_norm.h"

#include <initializer_list>

#include "kernels/activation_tag.h"
#include "kernels/cuda/activation_math.cuh"
#include "kernels/cuda/column_sums.cuh"

// Same bits whichever gradients are wanted: the same quantity is computed in several kernels here, so products that feed a sum are
// written as fmaf or __fmul_rn, and the compiler has no choice of contracting them in one kernel and not in another.

namespace detr::kernels::cuda {
namespace {

constexpr int kApplyBlocks = 2 * kTileBlocks;   // normalise_kernel fits twice on a multiprocessor
constexpr int kSmallBlocks = 8 * kTileBlocks;   // for passes without sums: shorter parts even out the multiprocessors

/// Calls fn with the activation as a constant; the contract lets only these three through.
template <class F>
void dispatch_norm_activation(Activation activation, F&& fn) {
  switch (activation) {
    case Activation::relu: fn(ActivationTag<Activation::relu>{}); return;
    case Activation::silu: fn(ActivationTag<Activation::silu>{}); return;
    default: fn(ActivationTag<Activation::none>{}); return;
  }
}

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

/// Where the statistics come from and go to; `partial` (parts, C) is null where running_mean and running_var are the statistics.
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
    } else {
      m = statistics.running_mean[c];
      r = static_cast<float>(1 / sqrt(static_cast<double>(statistics.running_var[c]) + statistics.eps));
    }
    if (place.part == 0) {
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

/// Second pass, from the partial sums: dbias = sum(g), dweight = rstd sum(g (x - mean)), each if not null, and if dx is not null
///   dx = scale (g - dbias / R - (x - mean) rstd dweight / R)
template <class T, int V, Activation kind, bool kResidual>
__global__ void __launch_bounds__(kTileThreads, 1)
    input_gradient_kernel(const ColumnTiles tiles, const Backward<T> in, const float2* partial, int parts) {
  using Row = BackwardRow<T, V, kind, kResidual, true>;
  constexpr int kRows = 4;
  const TilePlace place(tiles, V);
  __shared__ float offsets[kTileWidth], slopes[kTileWidth];
  const int thread = static_cast<int>(threadIdx.x), width = tiles.lanes * V, c = place.tile_column + thread;
  const double2 sums = column_totals(partial, parts, tiles.columns, place.tile_column, width);
  if (thread < width && c < tiles.columns) {
    const double r = in.rstd[c], rows = tiles.rows;
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

/// The raw pointer, null for a null tensor.
template <class T>
T* pointer(const Tensor* tensor) {
  return tensor ? tensor->data<T>() : nullptr;
}

/// Whether all of these may be read V at a time; null ones may.
template <class T>
bool all_fit(std::int64_t C, std::initializer_list<const void*> places) {
  return std::all_of(places.begin(), places.end(), [C](const void* place) { return fits_vectors<T>(place, C); });
}

/// normalise_kernel for the dtypes, widths and activation of its arguments.
template <class T, int V>
void normalise(const Stream& stream, const ColumnTiles& tiles, const Statistics& statistics, const Tensor& x, const Tensor& weight,
               const Tensor& bias, const Tensor* residual, Activation activation, Tensor& y) {
  dispatch_norm_activation(activation, [&](auto kind) {
    constexpr Activation kKind = decltype(kind)::value;
    const auto kernel = residual ? normalise_kernel<T, V, kKind, true> : normalise_kernel<T, V, kKind, false>;
    launch(stream, kernel, tiles.grid(), kTileThreads, 0, tiles, statistics, x.data<T>(), weight.data<float>(), bias.data<float>(),
           pointer<T>(residual), y.data<T>());
  });
}

}  // namespace

void batch_norm_forward(const Stream& stream, const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor* residual,
                        Activation activation, double eps, double momentum, Tensor& running_mean, Tensor& running_var, Tensor& y,
                        Tensor& mean, Tensor& rstd) {
  const std::int64_t C = x.dim(-1);
  if (C == 0) return;
  dispatch_float("batch_norm", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    dispatch_vectors<T>(all_fit<T>(C, {x.raw(), y.raw(), residual ? residual->raw() : nullptr}), [&](auto vector) {
      constexpr int V = decltype(vector)::value;
      const ColumnTiles tiles = column_tiles<V>(x.rows(), C, kTileBlocks);
      const Tensor partial = stream.empty({tiles.parts, C, 2}, DType::f32);
      auto* sums = static_cast<float2*>(partial.raw());
      launch(stream, batch_sums_kernel<T, V>, tiles.grid(), kTileThreads, 0, tiles, x.data<T>(), sums);
      const Statistics statistics{sums, tiles.parts, eps, momentum, running_mean.data<float>(), running_var.data<float>(),
                                  mean.data<float>(), rstd.data<float>()};
      normalise<T, V>(stream, column_tiles<V>(x.rows(), C, kApplyBlocks), statistics, x, weight, bias, residual, activation, y);
    });
  });
}

void batch_norm_inference(const Stream& stream, const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor* residual,
                          Activation activation, double eps, const Tensor& running_mean, const Tensor& running_var, Tensor& y,
                          Tensor& mean, Tensor& rstd) {
  const std::int64_t C = x.dim(-1);
  if (C == 0) return;
  dispatch_float("batch_norm", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    dispatch_vectors<T>(all_fit<T>(C, {x.raw(), y.raw(), residual ? residual->raw() : nullptr}), [&](auto vector) {
      constexpr int V = decltype(vector)::value;
      const Statistics statistics{nullptr, 0, eps, 0, running_mean.data<float>(), running_var.data<float>(), mean.data<float>(),
                                  rstd.data<float>()};
      normalise<T, V>(stream, column_tiles<V>(x.rows(), C, kSmallBlocks), statistics, x, weight, bias, residual, activation, y);
    });
  });
}

void batch_norm_backward(const Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& bias,
                         const Tensor* residual, const Tensor& y, const Tensor& mean, const Tensor& rstd, Activation activation,
                         bool batch_statistics, Tensor* dx, Tensor* dweight, Tensor* dbias, Tensor* dresidual) {
  const std::int64_t C = dy.dim(-1);
  if (C == 0 || !(dx || dweight || dbias || dresidual)) return;
  const bool wants_sums = dweight || dbias || (dx && batch_statistics);
  const bool reads_x = wants_sums || activation == Activation::silu;
  const Tensor* other = activation == Activation::relu ? &y : activation == Activation::silu ? residual : nullptr;
  dispatch_float("batch_norm", dy.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    Backward<T> in{dy.data<T>(), pointer<T>(reads_x ? &x : nullptr), pointer<T>(other), weight.data<float>(), bias.data<float>(),
                   mean.data<float>(), rstd.data<float>(), pointer<T>(batch_statistics ? nullptr : dx), pointer<T>(dresidual),
                   pointer<float>(dweight), pointer<float>(dbias)};
    const bool fit = all_fit<T>(C, {in.dy, in.x, in.other, pointer<T>(dx), in.dresidual});
    dispatch_vectors<T>(fit, [&](auto vector) {
      constexpr int V = decltype(vector)::value;
      const ColumnTiles tiles = column_tiles<V>(dy.rows(), C, wants_sums ? kTileBlocks : kSmallBlocks);
      const Tensor partial = stream.empty({wants_sums ? tiles.parts : 0, C, 2}, DType::f32);
      auto* sums = static_cast<float2*>(partial.raw());
      const auto first_pass = [&](auto kind, auto has_residual) {
        constexpr Activation kKind = decltype(kind)::value;
        constexpr bool kResidual = decltype(has_residual)::value;
        const auto kernel = wants_sums ? gradient_sums_kernel<T, V, kKind, kResidual, true> : gradient_sums_kernel<T, V, kKind, kResidual, false>;
        launch(stream, kernel, tiles.grid(), kTileThreads, 0, tiles, in, sums);
      };
      const auto second_pass = [&](auto kind, auto has_residual) {
        constexpr Activation kKind = decltype(kind)::value;
        constexpr bool kResidual = decltype(has_residual)::value;
        const ColumnTiles blocks = in.dx ? tiles : column_tiles<V>(dy.rows(), C, 1);
        launch(stream, input_gradient_kernel<T, V, kKind, kResidual>, blocks.grid(), kTileThreads, 0, blocks, in, sums, tiles.parts);
      };
      const auto run = [&](Activation which, const auto& pass) {
        dispatch_norm_activation(which, [&](auto kind) {
          if constexpr (decltype(kind)::value == Activation::silu) {
            if (other) return pass(kind, std::true_type{});
          }
          pass(kind, std::false_type{});
        });
      };
      run(activation, first_pass);
      if (!wants_sums) return;
      in.dx = pointer<T>(batch_statistics ? dx : nullptr);
      if (dresidual) in.dy = in.dresidual;   // what the first pass left there is g
      run(dresidual || !in.dx ? Activation::none : activation, second_pass);
    });
  });
}

}  // namespace detr::kernels::cuda
