#pragma once
#include <algorithm>
#include <climits>
#include <type_traits>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/shared_memory.cuh"
#include "kernels/deformable_attention.h"

// Geometry of deformable attention on the device, and the gradient of the value.
//
// A sample is one point of one query of one head; it lies on up to four cells (corners) of its level. The gradient of the value adds,
// at each cell, what the samples on it give. To write each cell once and to add in a fixed order, samples are sorted by cell: an owner
// (image, head) has, for each level, its samples as Records in the order (query, point), and a block sums one tile of a level's cells.
// With few samples a block looks through all those of its level (direct). With many, a first pass lists the samples of each 8 x 8 tile.

namespace detr::kernels::cuda {
namespace {

constexpr int kMaxLevels = 8;
constexpr unsigned kAllLanes = 0xffffffffU;

struct Level {
  int h, w, first;        // the map, and its first token
  int first_slot, points; // its slots among the P
  float per_point;        // 1 / points
  unsigned reciprocal;    // ceil(2^32 / points), to divide by points; 0 stands for points = 1
};

struct Geometry {
  int images, queries, tokens, heads, points, depth;
  float scale;
  bool discrete;
  Level level[kMaxLevels];   // unused ones start at slot INT_MAX
};

/// How a group of lanes holds the channels of a head: kVec each; kDepth is the depth of a head, or 0 where only the geometry knows.
template <class Element, int Vec, int Lanes, int Depth>
struct Layout {
  using T = Element;
  static constexpr int kVec = Vec, kLanes = Lanes, kDepth = Depth;
};

template <class L>
__device__ int depth_of(const Geometry& g) {
  return L::kDepth > 0 ? L::kDepth : g.depth;
}

template <class L>
__device__ void load_channels(const typename L::T* place, float (&x)[L::kVec]) {
  if constexpr (L::kVec == 1) x[0] = to_float(*place);
  else load_vector<typename L::T>(place, x);
}
template <class L>
__device__ void store_channels(typename L::T* place, const float (&x)[L::kVec]) {
  if constexpr (L::kVec == 1) *place = from_float<typename L::T>(x[0]);
  else store_vector<typename L::T>(place, x);
}

/// Where a sample lies: between the columns u0, u0 + 1 and the rows t0, t0 + 1, at fractions fu, ft; (-2, -2) is nowhere. `weight` is
/// that of its slot in the softmax.
struct Sample {
  int u0, t0;
  float fu, ft, weight;
};

constexpr int kNowhere = -2;

/// A Sample in 16 bytes, the cell in two 16-bit halves.
using Record = uint4;

__device__ inline Record record_of(const Sample& s) {
  const unsigned cell = (static_cast<unsigned>(s.t0) << 16) | (static_cast<unsigned>(s.u0) & 0xffffU);
  return {cell, __float_as_uint(s.fu), __float_as_uint(s.ft), __float_as_uint(s.weight)};
}
__device__ inline Sample sample_of(const Record& r) {
  return {static_cast<short>(r.x & 0xffffU), static_cast<short>(r.x >> 16), __uint_as_float(r.y), __uint_as_float(r.z), __uint_as_float(r.w)};
}

/// Weight of corner (0 or 1 in x, plus 2 in y) of a sample, without that of its slot.
__device__ inline float corner_weight(const Sample& s, int corner) {
  return (corner & 1 ? s.fu : 1 - s.fu) * (corner & 2 ? s.ft : 1 - s.ft);
}

/// A level cut into tiles of h x w cells, `across` in a row, the first of all levels' being `first`; with lists, its samples cut into
/// `chunks`, counted from `first_chunk`, and tiles x chunks + 1 counts, from `first_count`.
struct LevelTiles {
  int h, w, across, first, tiles, chunks, first_chunk, first_count;
  int shift;   // with lists: h = w = 1 << shift
};
struct Tiling {
  int tiles = 0, cells = 0, chunks = 0, counts = 0;   // of all levels; cells: the most in a tile
  LevelTiles level[kMaxLevels];
};

constexpr int kDirectSamples = 4096;   // of a level, that a block still sorts at once: 4 corners each stay within 16 bits
constexpr int kDirectCells = 1280;     // of a tile
constexpr int kTileSide = 8;           // of a tile with a list; half of it where a tile would have too many samples
constexpr int kTileSamples = 4096;
constexpr int kListChunk = 1024;       // samples of a list sorted at a time
constexpr int kBinChunk = 2048;        // samples of a level put into lists by one block
constexpr int kBinThreads = 256;
constexpr int kLongList = 128;         // entries of a cell that the whole warp may share

// A stable counting sort by a block. Each warp takes a range of the items and has a histogram of 16-bit counts, two a word.

/// First item of the warp's range.
__device__ inline int warp_begin(int warp, int count) {
  const int warps = static_cast<int>(blockDim.x) / 32, each = (count + warps * 32 - 1) / (warps * 32) * 32;
  return min(count, warp * each);
}

/// Adds to the warp's histogram the keys of items [begin, end). keys(item, key) gives up to four; -1 is none.
template <class Keys>
__device__ void count_keys(unsigned* histogram, int begin, int end, const Keys& keys) {
  for (int i = begin + static_cast<int>(threadIdx.x) % 32; i < end; i += 32) {
    int key[4];
    keys(i, key);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (key[c] >= 0) atomicAdd(histogram + key[c] / 2, key[c] & 1 ? 0x10000U : 1U);
    }
  }
}

/// Calls put(place, key, item, c) for the keys of items [begin, end), where place counts up from the key's cursor in the order (32 items,
/// c, item). Cursors are the warp's own.
template <class Keys, class Put>
__device__ void place_keys(unsigned short* cursors, int begin, int end, const Keys& keys, const Put& put) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int base = begin; base < end; base += 32) {
    int key[4] = {-1, -1, -1, -1};
    if (base + lane < end) keys(base + lane, key);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (!__any_sync(kAllLanes, key[c] >= 0)) continue;
      const unsigned peers = __match_any_sync(kAllLanes, key[c]);
      const int rank = __popc(peers & ((1U << lane) - 1));
      const int cursor = key[c] >= 0 ? cursors[key[c]] : 0;
      __syncwarp();
      if (key[c] >= 0 && rank == 0) cursors[key[c]] = static_cast<unsigned short>(cursor + __popc(peers));
      if (key[c] >= 0) put(cursor + rank, key[c], base + lane, c);
      __syncwarp();
    }
  }
}

/// Sum of x over the threads before this one; `total` that over all. `scratch` is shared memory for 32; ends with the block in step.
__device__ inline int sum_before(int x, int* scratch, int& total) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32, warps = static_cast<int>(blockDim.x) / 32;
  int upto = x;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(kAllLanes, upto, distance);
    if (lane >= distance) upto += other;
  }
  if (lane == 31) scratch[warp] = upto;
  __syncthreads();
  int before = 0;
  total = 0;
  for (int i = 0; i < warps; ++i) {
    const int sum = scratch[i];
    if (i < warp) before += sum;
    total += sum;
  }
  __syncthreads();
  return before + upto - x;
}

/// Turns the warps' histograms (rows of `words` words) into cursors of lists sorted by (key, warp).
__device__ inline void cursors_of(unsigned* histograms, int words, int keys, int* scratch) {
  auto* counts = reinterpret_cast<unsigned short*>(histograms);
  const int warps = static_cast<int>(blockDim.x) / 32, threads = static_cast<int>(blockDim.x);
  const int each = (keys + threads - 1) / threads, begin = min(keys, static_cast<int>(threadIdx.x) * each), end = min(keys, begin + each);
  int own = 0, total;
  for (int key = begin; key < end; ++key) {
    for (int warp = 0; warp < warps; ++warp) own += counts[warp * words * 2 + key];
  }
  int cursor = sum_before(own, scratch, total);
  for (int key = begin; key < end; ++key) {
    for (int warp = 0; warp < warps; ++warp) {
      unsigned short& count = counts[warp * words * 2 + key];
      const int next = cursor + count;
      count = static_cast<unsigned short>(cursor);
      cursor = next;
    }
  }
}

/// sum += weight * row for the entries begin, begin + step, ... of `ids`; entry(id, weight) gives the place of the row's channels.
template <class L, class Entry>
__device__ void add_entries(const unsigned short* ids, int begin, int end, int step, const Entry& entry, float (&sum)[L::kVec]) {
#pragma unroll 4
  for (int i = begin; i < end; i += step) {
    float weight, x[L::kVec];
    load_channels<L>(entry(ids[i], weight), x);
#pragma unroll
    for (int e = 0; e < L::kVec; ++e) sum[e] += weight * x[e];
  }
}

/// The same for the list of each group of lanes; one that holds up its warp is shared among the warp's groups. Which are, depends on
/// the lists' lengths alone. Called by whole warps.
template <class L, class Entry>
__device__ void add_lists(const unsigned short* ids, int begin, int end, const Entry& entry, float (&sum)[L::kVec]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, length = end - begin;
  const bool first = lane % L::kLanes == 0;
  const int all = __reduce_add_sync(kAllLanes, first ? length : 0);
  const bool is_long = length > kLongList && 4 * length > all;
  if (!is_long) add_entries<L>(ids, begin, end, 1, entry, sum);
  unsigned waiting = __ballot_sync(kAllLanes, is_long && first);
  while (waiting != 0) {
    const int leader = __ffs(static_cast<int>(waiting)) - 1;
    waiting &= waiting - 1;
    const int from = __shfl_sync(kAllLanes, begin, leader), to = __shfl_sync(kAllLanes, end, leader);
    float part[L::kVec] = {};
    add_entries<L>(ids, from + lane / L::kLanes, to, 32 / L::kLanes, entry, part);
#pragma unroll
    for (int e = 0; e < L::kVec; ++e) {
#pragma unroll
      for (int distance = L::kLanes; distance < 32; distance *= 2) part[e] += __shfl_xor_sync(kAllLanes, part[e], distance);
      if (lane / L::kLanes == leader / L::kLanes) sum[e] += part[e];
    }
  }
}

/// With lists a group of lanes has one cell of the tile.
template <class L, bool kListed>
constexpr int kTileThreads = kListed ? kTileSide * kTileSide * L::kLanes : 256;

/// dvalue at the cells of a tile, by a block for each (owner, tile) and, in grid.y, each slice of the channels.
/// Shared memory: a histogram of the cells for each warp, then 16-bit ids (4 item + corner) of the contributions, sorted by cell.
template <class L, bool kListed>
__global__ void __launch_bounds__((kTileThreads<L, kListed>), kListed ? 4 : 1)
    dvalue_kernel(const __grid_constant__ Geometry g, const __grid_constant__ Tiling tiling, const Record* __restrict__ records,
                  const int* __restrict__ lists, const int* __restrict__ starts, const typename L::T* __restrict__ dout,
                  typename L::T* __restrict__ dvalue) {
  extern __shared__ unsigned shared[];
  __shared__ int scratch[32];
  constexpr int kWarps = kTileThreads<L, kListed> / 32, kGroups = kTileThreads<L, kListed> / L::kLanes;
  const int owners = g.images * g.heads, block = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  // Tiles of the coarse levels, the last, have the most samples and start first.
  const int tile = tiling.tiles - 1 - block / owners, owner = block % owners;
  const int image = owner / g.heads, head = owner % g.heads;
  int v = 0;
#pragma unroll
  for (int i = 1; i < kMaxLevels; ++i) v += tile >= tiling.level[i].first;
  const Level& level = g.level[v];
  const LevelTiles& cut = tiling.level[v];
  const int local = tile - cut.first, top = local / cut.across * cut.h, left = local % cut.across * cut.w;
  const int rows = min(cut.h, level.h - top), columns = min(cut.w, level.w - left), cells = rows * columns;

  const std::int64_t first_sample = (static_cast<std::int64_t>(owner) * g.points + level.first_slot) * g.queries;
  const Record* samples = records + first_sample;
  int begin = 0, end = g.queries * level.points;
  const int* list = nullptr;
  if constexpr (kListed) {
    list = lists + 4 * first_sample;
    const int* from = starts + static_cast<std::int64_t>(owner) * tiling.counts + cut.first_count;
    begin = from[local * cut.chunks];
    end = from[(local + 1) * cut.chunks];
  }
  const auto sample_at = [&](int i) { return kListed ? list[i] : i; };
  const auto cell_of = [&](int u, int t) {
    const bool inside = t >= top && t < top + rows && u >= left && u < left + columns;
    return inside ? (t - top) * columns + u - left : -1;
  };

  const int words = (tiling.cells + 1) / 2, warp = thread / 32, group = thread / L::kLanes;
  auto* ids = reinterpret_cast<unsigned short*>(shared + kWarps * words);
  // The last warp's cursors have moved to where each cell's list ends.
  const unsigned short* ends = reinterpret_cast<const unsigned short*>(shared + (kWarps - 1) * words);
  const auto sort = [&](int first, int count) {
    const auto keys = [&](int i, int(&key)[4]) {
      const Sample s = sample_of(samples[sample_at(first + i)]);
#pragma unroll
      for (int c = 0; c < 4; ++c) key[c] = corner_weight(s, c) != 0 ? cell_of(s.u0 + (c & 1), s.t0 + c / 2) : -1;
    };
    for (int i = thread; i < kWarps * words; i += static_cast<int>(blockDim.x)) shared[i] = 0;
    __syncthreads();
    const int from = warp_begin(warp, count), to = warp_begin(warp + 1, count);
    count_keys(shared + warp * words, from, to, keys);
    __syncthreads();
    cursors_of(shared, words, cells, scratch);
    __syncthreads();
    place_keys(reinterpret_cast<unsigned short*>(shared + warp * words), from, to, keys,
               [&](int place, int, int i, int c) { ids[place] = static_cast<unsigned short>(4 * i + c); });
    __syncthreads();
  };

  const int depth = depth_of<L>(g), stride = g.heads * depth;
  const int channel = (static_cast<int>(blockIdx.y) * L::kLanes + thread % L::kLanes) * L::kVec;
  // Lanes beyond the channels read the last one and store nothing.
  const typename L::T* grads = dout + static_cast<std::int64_t>(image) * g.queries * stride + head * depth + min(channel, depth - L::kVec);
  const auto add_cell = [&](int cell, int first, float(&sum)[L::kVec]) {
    const int from = cell > 0 && cell <= cells ? ends[cell - 1] : 0, to = cell < cells ? ends[cell] : from;
    add_lists<L>(ids, from, to, [&](unsigned id, float& weight) {
      const int i = sample_at(first + static_cast<int>(id / 4));
      const Sample s = sample_of(samples[i]);
      weight = s.weight * corner_weight(s, static_cast<int>(id % 4));
      const unsigned query = level.reciprocal == 0 ? static_cast<unsigned>(i) : __umulhi(static_cast<unsigned>(i), level.reciprocal);
      return grads + static_cast<std::int64_t>(query) * stride;
    }, sum);
  };
  const auto store = [&](int cell, const float(&sum)[L::kVec]) {
    if (cell >= cells || channel >= depth) return;
    const int token = level.first + (top + cell / columns) * level.w + left + cell % columns;
    store_channels<L>(dvalue + (static_cast<std::int64_t>(image) * g.tokens + token) * stride + head * depth + channel, sum);
  };

  if constexpr (kListed) {
    float sum[L::kVec] = {};
    for (int first = begin; first < end; first += kListChunk) {
      sort(first, min(kListChunk, end - first));
      add_cell(group, first, sum);
      __syncthreads();
    }
    store(group, sum);
  } else {
    sort(0, end);
    for (int base = 0; base < cells; base += kGroups) {
      float sum[L::kVec] = {};
      add_cell(base + group, 0, sum);
      store(base + group, sum);
    }
  }
}

/// Lists of samples by tile, by a block for each (owner, chunk of a level's samples): first counts[tile][chunk] of each level, then,
/// with the counts turned into starts, the lists. A sample is in the list of each tile that it lies on.
template <bool kPlace>
__global__ void __launch_bounds__(kBinThreads)
    bin_kernel(const __grid_constant__ Geometry g, const __grid_constant__ Tiling tiling, const Record* __restrict__ records,
               int* __restrict__ counts, int* __restrict__ lists) {
  extern __shared__ unsigned shared[];
  constexpr int kWarps = kBinThreads / 32;
  const int owner = static_cast<int>(blockIdx.x) / tiling.chunks, thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  int chunk = static_cast<int>(blockIdx.x) % tiling.chunks, v = 0;
#pragma unroll
  for (int i = 1; i < kMaxLevels; ++i) v += chunk >= tiling.level[i].first_chunk;
  const Level& level = g.level[v];
  const LevelTiles& cut = tiling.level[v];
  chunk -= cut.first_chunk;
  const std::int64_t first_sample = (static_cast<std::int64_t>(owner) * g.points + level.first_slot) * g.queries;
  const int first = chunk * kBinChunk, count = min(kBinChunk, g.queries * level.points - first);
  const Record* samples = records + first_sample + first;
  const auto keys = [&](int i, int(&key)[4]) {
    const Sample s = sample_of(samples[i]);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int u = s.u0 + (c & 1), t = s.t0 + c / 2;
      const bool inside = u >= 0 && u < level.w && t >= 0 && t < level.h && corner_weight(s, c) != 0;
      key[c] = inside ? (t >> cut.shift) * cut.across + (u >> cut.shift) : -1;
#pragma unroll
      for (int other = 0; other < c; ++other) {
        if (key[other] == key[c]) key[c] = -1;
      }
    }
  };
  const int words = (cut.tiles + 1) / 2;
  for (int i = thread; i < kWarps * words; i += kBinThreads) shared[i] = 0;
  __syncthreads();
  const int from = warp_begin(warp, count), to = warp_begin(warp + 1, count);
  count_keys(shared + warp * words, from, to, keys);
  __syncthreads();
  auto* cursors = reinterpret_cast<unsigned short*>(shared);
  int* level_counts = counts + static_cast<std::int64_t>(owner) * tiling.counts + cut.first_count;
  for (int tile = thread; tile < cut.tiles; tile += kBinThreads) {
    int sum = 0;
    for (int w = 0; w < kWarps; ++w) {
      unsigned short& cursor = cursors[w * words * 2 + tile];
      const int next = sum + cursor;
      cursor = static_cast<unsigned short>(sum);
      sum = next;
    }
    if constexpr (!kPlace) level_counts[tile * cut.chunks + chunk] = sum;
  }
  if constexpr (kPlace) {
    __syncthreads();
    place_keys(cursors + warp * words * 2, from, to, keys, [&](int place, int tile, int i, int) {
      lists[4 * first_sample + level_counts[tile * cut.chunks + chunk] + place] = first + i;
    });
  }
}

/// Turns the counts of each (owner, level), a block each, into starts: the sums of those before, and that of all at the end.
__global__ void __launch_bounds__(1024) starts_kernel(const __grid_constant__ Tiling tiling, int levels, int* __restrict__ counts) {
  __shared__ int scratch[32];
  const LevelTiles& cut = tiling.level[static_cast<int>(blockIdx.x) % levels];
  const int count = cut.tiles * cut.chunks;
  int* x = counts + static_cast<std::int64_t>(static_cast<int>(blockIdx.x) / levels) * tiling.counts + cut.first_count;
  int carry = 0;
  for (int base = 0; base < count; base += 4096) {
    const int begin = base + static_cast<int>(threadIdx.x) * 4;
    int own[4], sum = 0, total;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += own[i] = begin + i < count ? x[begin + i] : 0;
    int start = carry + sum_before(sum, scratch, total);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (begin + i < count) x[begin + i] = start;
      start += own[i];
    }
    carry += total;
  }
  if (threadIdx.x == 0) x[count] = carry;
}

/// Tiles for blocks that look through all samples of a level (listed false), or that have lists.
inline Tiling tiling_of(const DeformableOptions& options, std::int64_t queries, bool listed) {
  Tiling tiling;
  for (LevelTiles& cut : tiling.level) cut = {1, 1, 1, INT_MAX, 0, 0, INT_MAX, 0, 0};
  for (std::size_t i = 0; i < options.levels.size(); ++i) {
    const int h = static_cast<int>(options.levels[i][0]), w = static_cast<int>(options.levels[i][1]);
    LevelTiles& cut = tiling.level[i];
    const std::int64_t whole_tiles = static_cast<std::int64_t>((h + kTileSide - 1) / kTileSide) * ((w + kTileSide - 1) / kTileSide);
    cut.shift = queries * options.points[i] > kTileSamples * whole_tiles ? 2 : 3;
    cut.w = listed ? 1 << cut.shift : std::min(w, kDirectCells);
    cut.h = listed ? 1 << cut.shift : std::min(h, kDirectCells / cut.w);
    const int down = (h + cut.h - 1) / cut.h;
    if (!listed) cut.h = (h + down - 1) / down;   // even heights
    cut.across = (w + cut.w - 1) / cut.w;
    cut.tiles = cut.across * ((h + cut.h - 1) / cut.h);
    cut.chunks = static_cast<int>((queries * options.points[i] + kBinChunk - 1) / kBinChunk);
    cut.first = tiling.tiles;
    cut.first_chunk = tiling.chunks;
    cut.first_count = tiling.counts;
    tiling.tiles += cut.tiles;
    tiling.cells = std::max(tiling.cells, cut.h * cut.w);
    if (!listed) continue;
    tiling.chunks += cut.chunks;
    const std::int64_t counts = tiling.counts + static_cast<std::int64_t>(cut.tiles) * cut.chunks + 1;
    DETR_CHECK(counts <= INT_MAX, "deformable_attention: too many queries and cells for 32-bit indices");
    tiling.counts = static_cast<int>(counts);
  }
  return tiling;
}

/// dvalue (N, S, A d) from the samples' records, which lie as [image][head][level][query][point].
template <class L>
void value_gradient(const Stream& stream, const Geometry& g, const DeformableOptions& options, const Record* records, const Tensor& dout,
                    Tensor& dvalue) {
  using T = typename L::T;
  const std::int64_t samples = g.queries * *std::max_element(options.points.begin(), options.points.end());   // of the largest level
  const bool listed = samples > kDirectSamples;
  const Tiling tiling = tiling_of(options, g.queries, listed);
  const std::int64_t owners = static_cast<std::int64_t>(g.images) * g.heads;
  const int slice = L::kLanes * L::kVec;
  const dim3 grid(blocks_for(owners * tiling.tiles, 1), static_cast<unsigned>((g.depth + slice - 1) / slice));
  const auto launch_tiles = [&](auto is_listed, const int* lists, const int* starts) {
    constexpr bool kListed = decltype(is_listed)::value;
    constexpr int kThreads = kTileThreads<L, kListed>;
    const std::int64_t ids = 4 * (kListed ? kListChunk : samples);
    const std::size_t shared = static_cast<std::size_t>(kThreads / 32 * ((tiling.cells + 1) / 2) * 4 + ids * 2);
    allow_shared(stream, "deformable_attention", dvalue_kernel<L, kListed>, shared);
    launch(stream, dvalue_kernel<L, kListed>, grid, dim3(kThreads), shared, g, tiling, records, lists, starts, dout.data<T>(), dvalue.data<T>());
  };
  if (!listed) return launch_tiles(std::false_type{}, nullptr, nullptr);

  int most_tiles = 0;
  for (const LevelTiles& cut : tiling.level) most_tiles = std::max(most_tiles, cut.tiles);
  const std::size_t shared = static_cast<std::size_t>(kBinThreads / 32 * ((most_tiles + 1) / 2) * 4);
  DETR_CHECK(shared <= most_shared(stream), "deformable_attention: a level's map is too large for this GPU and so many queries");
  // Each sample is in at most four lists.
  const Tensor lists = stream.empty({owners * g.points * g.queries * 4 * 4}, DType::u8);
  const Tensor counts = stream.empty({owners * tiling.counts * 4}, DType::u8);
  int* const list = static_cast<int*>(lists.raw());
  int* const count = static_cast<int*>(counts.raw());
  const dim3 bins(blocks_for(owners * tiling.chunks, 1));
  allow_shared(stream, "deformable_attention", bin_kernel<false>, shared);
  allow_shared(stream, "deformable_attention", bin_kernel<true>, shared);
  launch(stream, bin_kernel<false>, bins, dim3(kBinThreads), shared, g, tiling, records, count, list);
  const int levels = static_cast<int>(options.levels.size());
  launch(stream, starts_kernel, dim3(blocks_for(owners * levels, 1)), dim3(1024), 0, tiling, levels, count);
  launch(stream, bin_kernel<true>, bins, dim3(kBinThreads), shared, g, tiling, records, count, list);
  launch_tiles(std::true_type{}, list, count);
}

}  // namespace
}  // namespace detr::kernels::cuda
