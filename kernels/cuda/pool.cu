#include "kernels/pool.h"

#include "kernels/cuda/pointwise_map.cuh"

namespace detr::kernels::cuda {
namespace {

constexpr int kThreads = 256;

/// A map (N, H, W, C) and the map (N, h, w, C) of half its size; a thread handles one pack of channels of one cell of the small map.
struct Maps {
  std::uint32_t H, W, h, w;
  std::uint32_t packs;   // C / kWidth
  std::uint32_t items;   // N h w packs
};

/// A cell of the small map, and a pack of its channels.
struct Cell {
  std::uint32_t n, i, j, pack;
  /// The pack's place in the small map at (i, j), and in the large one at (row, column).
  __device__ std::int64_t in_small(const Maps& maps, std::uint32_t row, std::uint32_t column) const {
    return ((std::int64_t{n} * maps.h + row) * maps.w + column) * maps.packs + pack;
  }
  __device__ std::int64_t in_large(const Maps& maps, std::uint32_t row, std::uint32_t column) const {
    return ((std::int64_t{n} * maps.H + row) * maps.W + column) * maps.packs + pack;
  }
};

__device__ Cell cell_of(const Maps& maps, std::uint32_t item) {
  const std::uint32_t cell = item / maps.packs, row = cell / maps.w;
  return {row / maps.h, row % maps.h, cell % maps.w, item % maps.packs};
}

__device__ std::uint32_t item_of_thread() { return blockIdx.x * kThreads + threadIdx.x; }

template <class T, int kWidth>
__device__ Pack<T, kWidth> rounded(const float (&x)[kWidth]) {
  Pack<T, kWidth> y;
#pragma unroll
  for (int c = 0; c < kWidth; ++c) y.values[c] = from_float<T>(x[c]);
  return y;
}

/// The first maximum so far stays; a NaN beats every number, and the first NaN stays.
__device__ bool beats(float value, float best) { return best == best && !(value <= best); }

/// Each window's maximum to y, or where kPlaces its place, 3 row + column counted from cell (2 i - 1, 2 j - 1), to `places`.
template <int kWidth, bool kPlaces, class T>
__global__ void __launch_bounds__(kThreads)
    max_pool_kernel(Maps maps, const Pack<T, kWidth>* x, Pack<T, kWidth>* y, Pack<std::uint8_t, kWidth>* places) {
  const std::uint32_t item = item_of_thread();
  if (item >= maps.items) return;
  const Cell cell = cell_of(maps, item);

  // A cell beyond the border is replaced by its neighbour within. That one is met first either way, or is met before as itself, so the
  // window's cells still come in row-major order, and what comes twice wins nothing.
  Pack<T, kWidth> in[3][3];
  std::uint32_t rows[3], columns[3];
#pragma unroll
  for (int k = 0; k < 3; ++k) {
    rows[k] = min(max(2 * static_cast<int>(cell.i) - 1 + k, 0), static_cast<int>(maps.H) - 1);
    columns[k] = min(max(2 * static_cast<int>(cell.j) - 1 + k, 0), static_cast<int>(maps.W) - 1);
  }
#pragma unroll
  for (int a = 0; a < 3; ++a)
#pragma unroll
    for (int b = 0; b < 3; ++b) in[a][b] = x[cell.in_large(maps, rows[a], columns[b])];

  float best[kWidth];
  std::uint32_t at[kWidth];
#pragma unroll
  for (int a = 0; a < 3; ++a) {
#pragma unroll
    for (int b = 0; b < 3; ++b) {
      const std::uint32_t here = 3 * (rows[a] + 1 - 2 * cell.i) + columns[b] + 1 - 2 * cell.j;
#pragma unroll
      for (int c = 0; c < kWidth; ++c) {
        const float value = to_float(in[a][b].values[c]);
        const bool better = (a == 0 && b == 0) || beats(value, best[c]);
        best[c] = better ? value : best[c];
        at[c] = better ? here : at[c];
      }
    }
  }
  if constexpr (kPlaces) {
    Pack<std::uint8_t, kWidth> out;
#pragma unroll
    for (int c = 0; c < kWidth; ++c) out.values[c] = static_cast<std::uint8_t>(at[c]);
    places[item] = out;
  } else {
    y[item] = rounded<T, kWidth>(best);
  }
}

/// dx of the cells (2 i, 2 j) to (2 i + 1, 2 j + 1): each gathers from the windows that hold it, which are among those of (i, j) to
/// (i + 1, j + 1), in row-major order.
template <int kWidth, class T>
__global__ void __launch_bounds__(kThreads)
    max_pool_gather_kernel(Maps maps, const Pack<std::uint8_t, kWidth>* places, const Pack<T, kWidth>* dy, Pack<T, kWidth>* dx) {
  const std::uint32_t item = item_of_thread();
  if (item >= maps.items) return;
  const Cell cell = cell_of(maps, item);
  Pack<std::uint8_t, kWidth> place[2][2];
  Pack<T, kWidth> share[2][2];
#pragma unroll
  for (int a = 0; a < 2; ++a) {
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const bool exists = cell.i + a < maps.h && cell.j + b < maps.w;
      const std::int64_t from = exists ? cell.in_small(maps, cell.i + a, cell.j + b) : item;
      place[a][b] = places[from];
      share[a][b] = dy[from];
      if (exists) continue;
#pragma unroll
      for (int c = 0; c < kWidth; ++c) place[a][b].values[c] = 9;   // none of its cells
    }
  }
#pragma unroll
  for (int p = 0; p < 2; ++p) {
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      float sum[kWidth] = {};
#pragma unroll
      for (int a = 0; a <= p; ++a) {
#pragma unroll
        for (int b = 0; b <= q; ++b) {
          const int here = 3 * (p - 2 * a + 1) + q - 2 * b + 1;
#pragma unroll
          for (int c = 0; c < kWidth; ++c) sum[c] += place[a][b].values[c] == here ? to_float(share[a][b].values[c]) : 0.0F;
        }
      }
      if (2 * cell.i + p < maps.H && 2 * cell.j + q < maps.W) dx[cell.in_large(maps, 2 * cell.i + p, 2 * cell.j + q)] = rounded<T, kWidth>(sum);
    }
  }
}

/// scale times the sum of each square of four cells. A square cut off by the border takes its cells twice or four times.
template <int kWidth, class T>
__global__ void __launch_bounds__(kThreads) sum_squares_kernel(Maps maps, float scale, const Pack<T, kWidth>* x, Pack<T, kWidth>* y) {
  const std::uint32_t item = item_of_thread();
  if (item >= maps.items) return;
  const Cell cell = cell_of(maps, item);
  const std::uint32_t top = 2 * cell.i, left = 2 * cell.j, bottom = min(top + 1, maps.H - 1), right = min(left + 1, maps.W - 1);
  const Pack<T, kWidth> a = x[cell.in_large(maps, top, left)], b = x[cell.in_large(maps, top, right)];
  const Pack<T, kWidth> c = x[cell.in_large(maps, bottom, left)], d = x[cell.in_large(maps, bottom, right)];
  float sum[kWidth];
#pragma unroll
  for (int k = 0; k < kWidth; ++k)
    sum[k] = scale * ((to_float(a.values[k]) + to_float(b.values[k])) + (to_float(c.values[k]) + to_float(d.values[k])));
  y[item] = rounded<T, kWidth>(sum);
}

/// Each cell of x to its square of up to four cells of y: as it is, or where kShares divided by their number.
template <int kWidth, bool kShares, class T>
__global__ void __launch_bounds__(kThreads) spread_squares_kernel(Maps maps, const Pack<T, kWidth>* x, Pack<T, kWidth>* y) {
  const std::uint32_t item = item_of_thread();
  if (item >= maps.items) return;
  const Cell cell = cell_of(maps, item);
  const bool tall = 2 * cell.i + 1 < maps.H, wide = 2 * cell.j + 1 < maps.W;
  Pack<T, kWidth> value = x[item];
  if constexpr (kShares) {
    const float share = (tall ? 0.5F : 1.0F) * (wide ? 0.5F : 1.0F);
#pragma unroll
    for (int c = 0; c < kWidth; ++c) value.values[c] = from_float<T>(share * to_float(value.values[c]));
  }
#pragma unroll
  for (int p = 0; p < 2; ++p) {
#pragma unroll
    for (int q = 0; q < 2; ++q)
      if ((p == 0 || tall) && (q == 0 || wide)) y[cell.in_large(maps, 2 * cell.i + p, 2 * cell.j + q)] = value;
  }
}

/// Calls fn(TypeTag<T>, width, maps) with the width that fits both maps and `third`, another one: a std::integral_constant of kVector<T> or 1.
template <class F>
void dispatch_maps(const char* op, const Tensor& large, const Tensor& small, const Tensor& third, F&& fn) {
  dispatch_float(op, large.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const std::int64_t C = large.dim(3);
    const auto call = [&](auto width) {
      index_count(2 * std::max(large.dim(1), large.dim(2)));   // the places in a window are signed
      fn(tag, width, Maps{index_count(large.dim(1)), index_count(large.dim(2)), index_count(small.dim(1)), index_count(small.dim(2)),
                          index_count(C / width), index_count(small.numel() / width)});
    };
    const bool wide = fits_vectors<T>(large.raw(), C) && fits_vectors<T>(small.raw(), C) && fits_vectors<T>(third.raw(), C);
    if (wide) call(std::integral_constant<int, kVector<T>>{});
    else call(std::integral_constant<int, 1>{});
  });
}

template <int kWidth, class T>
Pack<T, kWidth>* packs_of(const Tensor& tensor) {
  return reinterpret_cast<Pack<T, kWidth>*>(tensor.data<T>());
}

unsigned blocks(const Maps& maps) { return blocks_for(maps.items, kThreads); }

void sum_squares(const char* op, const Stream& stream, float scale, const Tensor& large, Tensor& small) {
  dispatch_maps(op, large, small, small, [&](auto tag, auto width, const Maps& maps) {
    using T = typename decltype(tag)::type;
    constexpr int kWidth = decltype(width)::value;
    launch(stream, sum_squares_kernel<kWidth, T>, blocks(maps), kThreads, 0, maps, scale, packs_of<kWidth, T>(large), packs_of<kWidth, T>(small));
  });
}

template <bool kShares>
void spread_squares(const char* op, const Stream& stream, const Tensor& small, Tensor& large) {
  dispatch_maps(op, large, small, small, [&](auto tag, auto width, const Maps& maps) {
    using T = typename decltype(tag)::type;
    constexpr int kWidth = decltype(width)::value;
    launch(stream, spread_squares_kernel<kWidth, kShares, T>, blocks(maps), kThreads, 0, maps, packs_of<kWidth, T>(small),
           packs_of<kWidth, T>(large));
  });
}

}  // namespace

void max_pool_forward(const Stream& stream, const Tensor& x, Tensor& y) {
  dispatch_maps("max_pool", x, y, y, [&](auto tag, auto width, const Maps& maps) {
    using T = typename decltype(tag)::type;
    constexpr int kWidth = decltype(width)::value;
    launch(stream, max_pool_kernel<kWidth, false, T>, blocks(maps), kThreads, 0, maps, packs_of<kWidth, T>(x), packs_of<kWidth, T>(y), nullptr);
  });
}

void max_pool_backward(const Stream& stream, const Tensor& dy, const Tensor& x, Tensor* dx) {
  // Two passes: one that searched the windows of each cell anew would be bound by its comparisons, not by the memory.
  const Tensor places = stream.empty(dy.shape(), DType::u8);
  dispatch_maps("max_pool", x, dy, *dx, [&](auto tag, auto width, const Maps& maps) {
    using T = typename decltype(tag)::type;
    constexpr int kWidth = decltype(width)::value;
    auto* place = packs_of<kWidth, std::uint8_t>(places);
    launch(stream, max_pool_kernel<kWidth, true, T>, blocks(maps), kThreads, 0, maps, packs_of<kWidth, T>(x), nullptr, place);
    launch(stream, max_pool_gather_kernel<kWidth, T>, blocks(maps), kThreads, 0, maps, place, packs_of<kWidth, T>(dy), packs_of<kWidth, T>(*dx));
  });
}

void avg_pool_forward(const Stream& stream, const Tensor& x, Tensor& y) { sum_squares("avg_pool", stream, 0.25F, x, y); }

void avg_pool_backward(const Stream& stream, const Tensor& dy, Tensor* dx) { spread_squares<true>("avg_pool", stream, dy, *dx); }

void upsample_forward(const Stream& stream, const Tensor& x, Tensor& y) { spread_squares<false>("upsample", stream, x, y); }

void upsample_backward(const Stream& stream, const Tensor& dy, Tensor* dx) { sum_squares("upsample", stream, 1.0F, dy, *dx); }

}  // namespace detr::kernels::cuda
