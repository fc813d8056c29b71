#pragma once
#include <algorithm>
#include <type_traits>

#include "kernels/cuda/launch.cuh"

// Note [Column tiles]
// The kernels of norms go over the rows of a row-major matrix (rows, columns), each thread with V neighbouring columns of its own
// (V elements are one access: kVector<T>, or 1 where the matrix does not fit). A tile is `lanes` such threads wide, at least 128
// bytes of a row where the matrix has them, and the block's other threads take the next rows: a warp reads 32 / lanes of them.
// blockIdx.x counts column tiles first, so that blocks which run together read neighbouring memory, then parts, which are
// contiguous sets of rows. A sum over all rows is written as one pair of floats per part and column, and whoever needs the total
// adds the parts up in double. The tiles follow from the shape alone, and with them the order of every sum.

namespace detr::kernels::cuda {

inline constexpr int kTileThreads = 512;
inline constexpr int kTileWidth = 64;    // most columns of a tile
inline constexpr int kTileBlocks = 132;  // blocks that run at once, one on each multiprocessor of an H200

struct ColumnTiles {
  int rows, columns;
  int lanes;           // threads across a tile, a power of two up to 32
  int slices;          // tiles across the matrix
  int parts;           // sets of rows, at least one
  int rows_per_part;

  dim3 grid() const { return dim3(static_cast<unsigned>(slices) * static_cast<unsigned>(parts)); }
};

/// Tiles of about `blocks` blocks in all, fewer where threads would be left without a row. columns >= 1.
template <int V>
ColumnTiles column_tiles(std::int64_t rows, std::int64_t columns, int blocks) {
  DETR_CHECK(rows <= 1 << 30 && columns <= 1 << 24, "norms on CUDA take up to 2^30 rows and 2^24 columns, got ", rows, " x ", columns);
  const std::int64_t vectors = (columns + V - 1) / V;
  int lanes = 1;
  while (lanes < (V == 1 ? 32 : 8) && lanes < vectors) lanes *= 2;
  const std::int64_t slices = (vectors + lanes - 1) / lanes, groups = kTileThreads / lanes;
  const std::int64_t wanted = std::max<std::int64_t>(1, std::min(blocks / slices, (rows + groups - 1) / groups));
  const std::int64_t rows_per_part = std::max<std::int64_t>(1, (rows + wanted - 1) / wanted);
  const std::int64_t parts = std::max<std::int64_t>(1, (rows + rows_per_part - 1) / rows_per_part);
  return {static_cast<int>(rows), static_cast<int>(columns), lanes, static_cast<int>(slices), static_cast<int>(parts),
          static_cast<int>(rows_per_part)};
}

/// Calls fn with the number of elements of an access, as a constant.
template <class T, class F>
void dispatch_vectors(bool fits, F&& fn) {
  if (fits) fn(std::integral_constant<int, kVector<T>>{});
  else fn(std::integral_constant<int, 1>{});
}

/// Where a thread stands in the tiles. It takes the rows first_row + k for k = group, group + groups, ... below `rows`, and of each
/// the V columns from `column` on. A thread beyond the last column has no rows.
struct TilePlace {
  int tile_column, part, group, groups, column, first_row, rows;

  __device__ TilePlace(const ColumnTiles& tiles, int V) {
    const int thread = static_cast<int>(threadIdx.x), block = static_cast<int>(blockIdx.x);
    part = block / tiles.slices;
    tile_column = block % tiles.slices * tiles.lanes * V;
    group = thread / tiles.lanes;
    groups = kTileThreads / tiles.lanes;
    column = tile_column + thread % tiles.lanes * V;
    first_row = part * tiles.rows_per_part;
    rows = column < tiles.columns ? min(tiles.rows_per_part, tiles.rows - first_row) : 0;
  }
};

/// V elements as one access leaves them: several are held at once while they are on their way.
template <class T, int V>
using Raw = std::conditional_t<V == 1, T, uint4>;

template <class T, int V>
__device__ inline Raw<T, V> load_raw(const T* place) {
  return *reinterpret_cast<const Raw<T, V>*>(place);
}
template <class T, int V>
__device__ inline void unpack(const Raw<T, V>& raw, float (&x)[V]) {
  const T* values = reinterpret_cast<const T*>(&raw);
#pragma unroll
  for (int i = 0; i < V; ++i) x[i] = to_float(values[i]);
}
template <class T, int V>
__device__ inline void store(T* place, const float (&x)[V]) {
  if constexpr (V == 1) *place = from_float<T>(x[0]);
  else store_vector(place, x);
}

/// load(row) of the rows k, k + stride, ... below `rows`, `count` of them, all on their way before use(loaded, row) of the first.
template <int count, class Load, class Use>
__device__ inline void take_rows(int k, int stride, int rows, const Load& load, const Use& use) {
  decltype(load(0)) loaded[count];
#pragma unroll
  for (int u = 0; u < count; ++u) {
    if (k + u * stride < rows) loaded[u] = load(k + u * stride);
  }
#pragma unroll
  for (int u = 0; u < count; ++u) {
    if (k + u * stride < rows) use(loaded[u], k + u * stride);
  }
}

/// Adds the threads' two sums per column over the block and writes them as its part of `partial` (parts, columns). All threads of
/// the block call it.
template <int V>
__device__ inline void write_partial(const ColumnTiles& tiles, const TilePlace& place, float (&first)[V], float (&second)[V], float2* partial) {
  __shared__ float2 warps[kTileThreads / 32][kTileWidth];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  for (int distance = 16; distance >= tiles.lanes; distance /= 2) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      first[i] += __shfl_xor_sync(0xffffffffU, first[i], distance);
      second[i] += __shfl_xor_sync(0xffffffffU, second[i], distance);
    }
  }
  if (lane < tiles.lanes) {
#pragma unroll
    for (int i = 0; i < V; ++i) warps[warp][lane * V + i] = {first[i], second[i]};
  }
  __syncthreads();
  const int column = place.tile_column + thread;
  if (thread >= tiles.lanes * V || column >= tiles.columns) return;
  double a = 0, b = 0;
#pragma unroll
  for (int w = 0; w < kTileThreads / 32; ++w) {
    a += warps[w][thread].x;
    b += warps[w][thread].y;
  }
  partial[static_cast<std::int64_t>(place.part) * tiles.columns + column] = {static_cast<float>(a), static_cast<float>(b)};
}

/// The totals of partial sums (parts, columns) for `width` columns from `first_column` on: those of column first_column + t in
/// thread t < width. All kTileThreads threads of the block call it; width is a power of two up to that.
__device__ inline double2 column_totals(const float2* partial, int parts, int columns, int first_column, int width) {
  __shared__ double2 sums[kTileThreads];
  const int thread = static_cast<int>(threadIdx.x), column = first_column + thread % width;
  double2 total{0, 0};
  if (column < columns) {
#pragma unroll 4
    for (int part = thread / width; part < parts; part += kTileThreads / width) {
      const float2 share = partial[static_cast<std::int64_t>(part) * columns + column];
      total.x += share.x;
      total.y += share.y;
    }
  }
  sums[thread] = total;
  __syncthreads();
  for (int distance = kTileThreads / 2; distance >= width; distance /= 2) {
    if (thread < distance) {
      sums[thread].x += sums[thread + distance].x;
      sums[thread].y += sums[thread + distance].y;
    }
    __syncthreads();
  }
  return sums[thread];
}

}  // namespace detr::kernels::cuda
