#include "kernels/layer_norm.h"

#include <initializer_list>

#include "kernels/cuda/column_sums.cuh"

// A warp takes a row. Rows that can be read 16 bytes at a time and fit in registers (up to 1,024 elements) are read once; all
// others go through the plain kernels below, which read them several times, from the cache.

namespace detr::kernels::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kMaxWidth = 1024;
constexpr int kBackwardBlocks = 3 * kTileBlocks;   // a constant: their partial sums are added in order
constexpr int kTotalsWidth = 16;                   // columns of a block of parameter_totals_kernel

__device__ inline int lane_index() { return static_cast<int>(threadIdx.x) % 32; }
/// The warp's number in the grid, and the number of warps.
__device__ inline int warp_index() { return static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32; }
__device__ inline int warp_count() { return static_cast<int>(gridDim.x) * kWarps; }

/// `count` floats from a place that is a multiple of 16 bytes; zeros where it is beyond the row.
template <int count>
__device__ inline void load_floats(const float* place, bool inside, float (&x)[count]) {
#pragma unroll
  for (int i = 0; i < count; i += 4) {
    const float4 v = inside ? *reinterpret_cast<const float4*>(place + i) : float4{0, 0, 0, 0};
    x[i] = v.x, x[i + 1] = v.y, x[i + 2] = v.z, x[i + 3] = v.w;
  }
}

/// kChunks times 32 vectors cover a row. The mean is taken first and the variance around it, both from registers.
template <class T, int kChunks>
__global__ void __launch_bounds__(kThreads)
    layer_norm_kernel(const T* x, const T* residual, const float* weight, const float* bias, float eps, int rows, int D, T* sum, T* y,
                      float* mean, float* rstd) {
  constexpr int V = kVector<T>;
  float w[kChunks][V], b[kChunks][V];
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const int column = (chunk * 32 + lane_index()) * V;
    load_floats(weight + column, column < D, w[chunk]);
    load_floats(bias + column, column < D, b[chunk]);
  }
  for (int row = warp_index(); row < rows; row += warp_count()) {
    float s[kChunks][V], total = 0;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int column = (chunk * 32 + lane_index()) * V;
      const bool inside = column < D;
      const std::int64_t at = static_cast<std::int64_t>(row) * D + column;
      if (inside) load_vector(x + at, s[chunk]);
      if (inside && residual) {
        float r[V];
        load_vector(residual + at, r);
        // What follows sees the sum as it is stored, as the backward will.
#pragma unroll
        for (int i = 0; i < V; ++i) s[chunk][i] = to_float(from_float<T>(s[chunk][i] + r[i]));
        store_vector(sum + at, s[chunk]);
      }
#pragma unroll
      for (int i = 0; i < V; ++i) total += inside ? s[chunk][i] : 0.0F;
    }
    const float m = warp_sum(total) / static_cast<float>(D);
    float squares = 0;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const bool inside = (chunk * 32 + lane_index()) * V < D;
#pragma unroll
      for (int i = 0; i < V; ++i) {
        s[chunk][i] = inside ? s[chunk][i] - m : 0.0F;
        squares = fmaf(s[chunk][i], s[chunk][i], squares);
      }
    }
    const float r = 1.0F / sqrtf(warp_sum(squares) / static_cast<float>(D) + eps);
    if (lane_index() == 0) {
      mean[row] = m;
      rstd[row] = r;
    }
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int column = (chunk * 32 + lane_index()) * V;
      if (column >= D) continue;
      float out[V];
#pragma unroll
      for (int i = 0; i < V; ++i) out[i] = fmaf(s[chunk][i] * r, w[chunk][i], b[chunk][i]);
      store_vector(y + static_cast<std::int64_t>(row) * D + column, out);
    }
  }
}

/// The same for any D and place.
template <class T>
__global__ void __launch_bounds__(kThreads)
    layer_norm_any_kernel(const T* x, const T* residual, const float* weight, const float* bias, float eps, int rows, int D, T* sum, T* y,
                          float* mean, float* rstd) {
  for (int row = warp_index(); row < rows; row += warp_count()) {
    const std::int64_t base = static_cast<std::int64_t>(row) * D;
    const T* s = residual ? sum + base : x + base;   // a lane reads the sums that it wrote itself
    float total = 0;
    for (int i = lane_index(); i < D; i += 32) {
      if (residual) sum[base + i] = from_float<T>(to_float(x[base + i]) + to_float(residual[base + i]));
      total += to_float(s[i]);
    }
    const float m = warp_sum(total) / static_cast<float>(D);
    float squares = 0;
    for (int i = lane_index(); i < D; i += 32) {
      const float d = to_float(s[i]) - m;
      squares = fmaf(d, d, squares);
    }
    const float r = 1.0F / sqrtf(warp_sum(squares) / static_cast<float>(D) + eps);
    if (lane_index() == 0) {
      mean[row] = m;
      rstd[row] = r;
    }
    for (int i = lane_index(); i < D; i += 32) y[base + i] = from_float<T>(fmaf((to_float(s[i]) - m) * r, weight[i], bias[i]));
  }
}

/// With g = dy weight and n = (s - mean) rstd: ds = rstd (g - mean(g) - n mean(g n)), means over the row. ds and partial may each be
/// null; partial (blocks, D) gets each block's sums of dy and of dy n. Products that feed a sum are written out, so that ds has the
/// same bits as from layer_norm_backward_any_kernel up to the order of the sums, and no contraction depends on what is wanted.
template <class T, int kChunks>
__global__ void __launch_bounds__(kThreads, kChunks * kVector<T> <= 8 ? 3 : 1)
    layer_norm_backward_kernel(const T* dy, const T* sum, const float* weight, const float* mean, const float* rstd, int rows, int D,
                               T* ds, float2* partial) {
  constexpr int V = kVector<T>;
  constexpr int kRows = kChunks == 1 ? 2 : 1;   // rows on their way at once
  __shared__ float2 shared[kMaxWidth];
  float w[kChunks][V], bias_sums[kChunks][V] = {}, weight_sums[kChunks][V] = {};
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const int column = (chunk * 32 + lane_index()) * V;
    load_floats(weight + column, column < D, w[chunk]);
  }
  for (int first = warp_index(); first < rows; first += kRows * warp_count()) {
    Raw<T, V> raw_dy[kRows][kChunks], raw_sum[kRows][kChunks];
    float means[kRows], rstds[kRows];
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      const int row = first + u * warp_count();
      if (row >= rows) continue;
      means[u] = mean[row];
      rstds[u] = rstd[row];
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const int column = (chunk * 32 + lane_index()) * V;
        raw_dy[u][chunk] = raw_sum[u][chunk] = {};
        if (column >= D) continue;
        const std::int64_t at = static_cast<std::int64_t>(row) * D + column;
        raw_dy[u][chunk] = load_raw<T, V>(dy + at);
        raw_sum[u][chunk] = load_raw<T, V>(sum + at);
      }
    }
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      const int row = first + u * warp_count();
      if (row >= rows) continue;   // the same for the whole warp
      float g[kChunks][V], n[kChunks][V], sum_g = 0, sum_gn = 0;
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        unpack<T, V>(raw_dy[u][chunk], g[chunk]);   // zeros beyond the row, so nothing there counts
        unpack<T, V>(raw_sum[u][chunk], n[chunk]);
#pragma unroll
        for (int i = 0; i < V; ++i) {
          n[chunk][i] = __fmul_rn(n[chunk][i] - means[u], rstds[u]);
          bias_sums[chunk][i] += g[chunk][i];
          weight_sums[chunk][i] = fmaf(g[chunk][i], n[chunk][i], weight_sums[chunk][i]);
          g[chunk][i] = __fmul_rn(g[chunk][i], w[chunk][i]);
          sum_g += g[chunk][i];
          sum_gn = fmaf(g[chunk][i], n[chunk][i], sum_gn);
        }
      }
      if (!ds) continue;
      const float mean_g = warp_sum(sum_g) / static_cast<float>(D), mean_gn = warp_sum(sum_gn) / static_cast<float>(D);
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const int column = (chunk * 32 + lane_index()) * V;
        if (column >= D) continue;
#pragma unroll
        for (int i = 0; i < V; ++i) g[chunk][i] = rstds[u] * fmaf(-n[chunk][i], mean_gn, g[chunk][i] - mean_g);
        store_vector(ds + static_cast<std::int64_t>(row) * D + column, g[chunk]);
      }
    }
  }
  if (!partial) return;
  // The warps add their sums one after the other.
  for (int warp = 0; warp < kWarps; ++warp) {
    if (static_cast<int>(threadIdx.x) / 32 == warp) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
        for (int i = 0; i < V; ++i) {
          const int column = (chunk * 32 + lane_index()) * V + i;
          if (column >= D) continue;
          const float2 before = warp == 0 ? float2{0, 0} : shared[column];
          shared[column] = {before.x + bias_sums[chunk][i], before.y + weight_sums[chunk][i]};
        }
      }
    }
    __syncthreads();
  }
  for (int column = static_cast<int>(threadIdx.x); column < D; column += kThreads) {
    partial[static_cast<std::int64_t>(blockIdx.x) * D + column] = shared[column];
  }
}

/// ds alone, for any D and place.
template <class T>
__global__ void __launch_bounds__(kThreads)
    layer_norm_backward_any_kernel(const T* dy, const T* sum, const float* weight, const float* mean, const float* rstd, int rows, int D,
                                   T* ds) {
  for (int row = warp_index(); row < rows; row += warp_count()) {
    const std::int64_t base = static_cast<std::int64_t>(row) * D;
    const float m = mean[row], r = rstd[row];
    float sum_g = 0, sum_gn = 0;
    for (int i = lane_index(); i < D; i += 32) {
      const float g = __fmul_rn(to_float(dy[base + i]), weight[i]);
      sum_g += g;
      sum_gn = fmaf(g, __fmul_rn(to_float(sum[base + i]) - m, r), sum_gn);
    }
    const float mean_g = warp_sum(sum_g) / static_cast<float>(D), mean_gn = warp_sum(sum_gn) / static_cast<float>(D);
    for (int i = lane_index(); i < D; i += 32) {
      const float g = __fmul_rn(to_float(dy[base + i]), weight[i]), n = __fmul_rn(to_float(sum[base + i]) - m, r);
      ds[base + i] = from_float<T>(r * fmaf(-n, mean_gn, g - mean_g));
    }
  }
}

/// Sums of dy and of dy n over each part of the rows, for any D and place: partial (parts, D). See Note [Column tiles].
template <class T>
__global__ void __launch_bounds__(kTileThreads)
    parameter_sums_kernel(const ColumnTiles tiles, const T* dy, const T* sum, const float* mean, const float* rstd, float2* partial) {
  const TilePlace place(tiles, 1);
  float first[1] = {}, second[1] = {};
#pragma unroll 4
  for (int k = place.group; k < place.rows; k += place.groups) {
    const std::int64_t row = place.first_row + k, at = row * tiles.columns + place.column;
    const float g = to_float(dy[at]);
    first[0] += g;
    second[0] = fmaf(g, __fmul_rn(to_float(sum[at]) - mean[row], rstd[row]), second[0]);
  }
  write_partial<1>(tiles, place, first, second, partial);
}

/// dbias and dweight, each if not null, from partial sums (parts, D); kTotalsWidth columns a block.
__global__ void __launch_bounds__(kTileThreads) parameter_totals_kernel(const float2* partial, int parts, int D, float* dweight, float* dbias) {
  const int first = static_cast<int>(blockIdx.x) * kTotalsWidth, column = first + static_cast<int>(threadIdx.x);
  const double2 sums = column_totals(partial, parts, D, first, kTotalsWidth);
  if (threadIdx.x >= kTotalsWidth || column >= D) return;
  if (dbias) dbias[column] = static_cast<float>(sums.x);
  if (dweight) dweight[column] = static_cast<float>(sums.y);
}

/// Calls fn with the number of times that 32 vectors of T cover a row of D, as a constant.
template <class T, class F>
void dispatch_chunks(std::int64_t D, F&& fn) {
  constexpr int kLine = 32 * kVector<T>;
  if (D <= kLine) fn(std::integral_constant<int, 1>{});
  else if (D <= 2 * kLine) fn(std::integral_constant<int, 2>{});
  else if (D <= 4 * kLine) fn(std::integral_constant<int, 4>{});
  else if constexpr (8 * kLine <= kMaxWidth) fn(std::integral_constant<int, 8>{});
}

/// Whether the kernels that read a row once may be used: `maps` of T and `rows` of floats, null ones left out.
template <class T>
bool fits_registers(std::int64_t D, std::initializer_list<const void*> maps, std::initializer_list<const void*> rows) {
  const auto fit = [D](const void* place) { return fits_vectors<T>(place, D); };
  return D <= kMaxWidth && std::all_of(maps.begin(), maps.end(), fit) && std::all_of(rows.begin(), rows.end(), fit);
}

/// What the kernels index in 32 bits.
void check_size(std::int64_t rows, std::int64_t D) {
  DETR_CHECK(rows <= 1 << 30 && D <= 1 << 24, "layer_norm on CUDA takes up to 2^30 rows of up to 2^24 elements, got ", rows, " x ", D);
}

const void* place_of(const Tensor* tensor) { return tensor ? tensor->raw() : nullptr; }

/// Blocks for one row a warp, or four where there are so many that all multiprocessors stay busy.
unsigned blocks_for_rows(std::int64_t rows) {
  return std::max(std::min(blocks_for(rows, kWarps), 16U * kTileBlocks), blocks_for(rows, 4 * kWarps));
}

}  // namespace

void layer_norm_forward(const Stream& stream, const Tensor& x, const Tensor* residual, const Tensor& weight, const Tensor& bias,
                        double eps, Tensor* sum, Tensor& y, Tensor& mean, Tensor& rstd) {
  const std::int64_t rows = x.rows(), D = x.dim(-1);
  check_size(rows, D);
  dispatch_float("layer_norm", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto run = [&](auto kernel) {
      launch(stream, kernel, blocks_for_rows(rows), kThreads, 0, x.data<T>(), residual ? residual->data<T>() : nullptr, weight.data<float>(),
             bias.data<float>(), eps, rows, D, sum ? sum->data<T>() : nullptr, y.data<T>(), mean.data<float>(), rstd.data<float>());
    };
    if (fits_registers<T>(D, {x.raw(), place_of(residual), place_of(sum), y.raw()}, {weight.raw(), bias.raw()})) {
      dispatch_chunks<T>(D, [&](auto chunks) { run(layer_norm_kernel<T, decltype(chunks)::value>); });
    } else {
      run(layer_norm_any_kernel<T>);
    }
  });
}

void layer_norm_backward(const Stream& stream, const Tensor& dy, const Tensor& sum, const Tensor& weight, const Tensor& mean,
                         const Tensor& rstd, Tensor* ds, Tensor* dweight, Tensor* dbias) {
  const std::int64_t rows = sum.rows(), D = sum.dim(-1);
  const bool wants_sums = dweight || dbias;
  if (!ds && !wants_sums) return;
  check_size(rows, D);
  dispatch_float("layer_norm", sum.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T *pdy = dy.data<T>(), *psum = sum.data<T>();
    const float *pweight = weight.data<float>(), *pmean = mean.data<float>(), *prstd = rstd.data<float>();
    T* pds = ds ? ds->data<T>() : nullptr;
    Tensor partial;   // (parts, D, 2)
    const auto make_partial = [&](std::int64_t parts) {
      if (wants_sums) partial = stream.empty({parts, D, 2}, DType::f32);
      return static_cast<float2*>(partial.raw());
    };
    if (fits_registers<T>(D, {pdy, psum, pds}, {pweight})) {
      // At least one block, which then writes zeros.
      const unsigned blocks = std::clamp(blocks_for(rows, 2 * kWarps), 1U, static_cast<unsigned>(kBackwardBlocks));
      float2* sums = make_partial(blocks);
      dispatch_chunks<T>(D, [&](auto chunks) {
        launch(stream, layer_norm_backward_kernel<T, decltype(chunks)::value>, blocks, kThreads, 0, pdy, psum, pweight, pmean, prstd, rows, D, pds,
               sums);
      });
    } else {
      if (pds) launch(stream, layer_norm_backward_any_kernel<T>, blocks_for_rows(rows), kThreads, 0, pdy, psum, pweight, pmean, prstd, rows, D, pds);
      if (wants_sums) {
        const ColumnTiles tiles = column_tiles<1>(rows, D, 2 * kTileBlocks);
        launch(stream, parameter_sums_kernel<T>, tiles.grid(), kTileThreads, 0, tiles, pdy, psum, pmean, prstd, make_partial(tiles.parts));
      }
    }
    if (!wants_sums) return;
    launch(stream, parameter_totals_kernel, blocks_for(D, kTotalsWidth), kTileThreads, 0, static_cast<const float2*>(partial.raw()), partial.dim(0),
           D, dweight ? dweight->data<float>() : nullptr, dbias ? dbias->data<float>() : nullptr);
  });
}

}  // namespace detr::kernels::cuda
