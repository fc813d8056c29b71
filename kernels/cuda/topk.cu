#include "kernels/topk.h"

#include <algorithm>

#include "kernels/cuda/launch.cuh"

namespace detr::kernels::cuda {
namespace {

constexpr unsigned kAllLanes = 0xffffffffU;

// ---- max_last

constexpr int kMaxThreads = 256;
constexpr int kMaxLoads = 5;   // of a thread at once: 80 classes in bf16 are ten vectors, five for each of two threads

/// The larger of two; NaN is larger than anything.
__device__ inline float larger(float a, float b) { return !(b <= a) && a == a ? b : a; }

/// y (rows) = largest of each row of x (rows, chunks W): `lanes` neighbouring threads, a power of two up to 32, share a row.
template <class T, int W>
__global__ void __launch_bounds__(kMaxThreads) max_last_kernel(const T* __restrict__ x, std::int64_t rows, int chunks, int lanes, T* __restrict__ y) {
  const int rows_per_block = kMaxThreads / lanes, lane = static_cast<int>(threadIdx.x) % lanes;
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * rows_per_block + static_cast<int>(threadIdx.x) / lanes;
  float best = -INFINITY;
  if (row < rows) {
    const T* from = x + row * chunks * W;
    for (int begin = lane; begin < chunks; begin += kMaxLoads * lanes) {
      // Loads beyond the row's end read its last chunk again, which changes no maximum: without branches all are in flight at once.
      float values[kMaxLoads][W];
#pragma unroll
      for (int u = 0; u < kMaxLoads; ++u) {
        const int chunk = min(begin + u * lanes, chunks - 1);
        if constexpr (W == 1) values[u][0] = to_float(from[chunk]);
        else load_vector(from + chunk * W, values[u]);
      }
#pragma unroll
      for (int u = 0; u < kMaxLoads; ++u) {
#pragma unroll
        for (int i = 0; i < W; ++i) best = larger(best, values[u][i]);
      }
    }
  }
  for (int distance = lanes / 2; distance > 0; distance /= 2) best = larger(best, __shfl_xor_sync(kAllLanes, best, distance));
  if (row < rows && lane == 0) y[row] = from_float<T>(best);
}

template <class T, int W>
void launch_max_last(const Stream& stream, const Tensor& x, Tensor& y) {
  const int chunks = static_cast<int>(x.dim(-1) / W);
  int lanes = 1;
  while (lanes < 32 && lanes * kMaxLoads < chunks) lanes *= 2;
  launch(stream, max_last_kernel<T, W>, blocks_for(y.numel(), kMaxThreads / lanes), kMaxThreads, 0, x.data<T>(), y.numel(), chunks, lanes, y.data<T>());
}

// ---- topk

constexpr int kThreads = 1024, kWarps = kThreads / 32;   // a block a row
constexpr int kDigitBits = 11, kBins = 1 << kDigitBits;
constexpr int kFusedK = 1024;                            // winners up to here are sorted in shared memory, by the block that finds them
constexpr int kRankThreads = 256;
using Winner = unsigned long long;                       // key above, complement of the index below: the larger one comes first

/// The lowest bit of a key that differs between values of T: bf16 fills the upper half of an f32.
template <class T>
constexpr int kLowBit = sizeof(T) == 2 ? 16 : 0;

/// Bits that order as the values do, none zero: equal for +0 and -0, and the largest for every NaN.
template <class T>
__device__ inline unsigned key_of(T value) {
  const float x = to_float(value);
  const unsigned bits = x == 0 ? 0 : __float_as_uint(x);
  const unsigned key = x != x ? ~0U : bits & 0x80000000U ? ~bits : bits | 0x80000000U;
  return key & (~0U << kLowBit<T>);
}

__device__ inline Winner winner(unsigned key, int index) { return static_cast<Winner>(key) << 32 | ~static_cast<unsigned>(index); }
__device__ inline int index_of(Winner w) { return static_cast<int>(~static_cast<unsigned>(w)); }

/// Sum of x over the threads before this one, in a block of kThreads. `totals` is shared memory for kWarps values.
__device__ inline int sum_before(int x, int* totals) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  int upto = x;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(kAllLanes, upto, distance);
    if (lane >= distance) upto += other;
  }
  if (lane == 31) totals[warp] = upto;
  __syncthreads();
  return warp_sum(lane < warp ? totals[lane] : 0) + upto - x;
}

/// The k-th largest key of a row, and how many entries that have it are among the k largest.
struct Threshold {
  unsigned key;
  int ties;
};

/// Radix select: digit by digit from the top, a histogram of the keys that agree with the digits found so far. The block ends in step.
template <class T>
__device__ Threshold find_threshold(const T* x, int M, int k) {
  __shared__ int histogram[kBins];
  __shared__ int totals[kWarps];
  __shared__ int digit_found, left;
  const int thread = static_cast<int>(threadIdx.x);
  unsigned prefix = 0, mask = 0;
#pragma unroll
  for (int high = 32; high > kLowBit<T>; high -= kDigitBits) {
    const int low = high - kDigitBits > kLowBit<T> ? high - kDigitBits : kLowBit<T>, bins = 1 << (high - low);
    for (int b = thread; b < bins; b += kThreads) histogram[b] = 0;
    __syncthreads();
#pragma unroll 4
    for (int i = thread; i < M; i += kThreads) {
      const unsigned key = key_of(x[i]);
      if ((key & mask) == prefix) atomicAdd(&histogram[key >> low & (bins - 1)], 1);
    }
    __syncthreads();
    // Two bins a thread, from the largest digit down; the one in which the count reaches k speaks.
    const int upper = bins - 1 - 2 * thread;
    const int first = upper >= 0 ? histogram[upper] : 0, second = upper >= 1 ? histogram[upper - 1] : 0;
    const int before = sum_before(first + second, totals);
    if (before < k && k <= before + first + second) {
      const bool in_first = k <= before + first;
      digit_found = in_first ? upper : upper - 1;
      left = k - (in_first ? before : before + first);
    }
    __syncthreads();
    prefix |= static_cast<unsigned>(digit_found) << low;
    mask = ~0U << low;
    k = left;
  }
  return {prefix, k};
}

/// Puts the k largest entries of a row at `winners`: those above the threshold, then of those on it the ones with the lowest indices.
/// Each warp has a range of the row; it counts, and places behind the warps before it.
template <class T>
__device__ void place_winners(const T* x, int M, int k, Threshold threshold, Winner* winners) {
  __shared__ int warp_above[kWarps], warp_ties[kWarps];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int range = (M + kThreads - 1) / kThreads * 32, begin = min(M, warp * range), end = min(M, begin + range);
  int above = 0, ties = 0;
#pragma unroll 4
  for (int i = begin + lane; i < end; i += 32) {
    const unsigned key = key_of(x[i]);
    above += key > threshold.key;
    ties += key == threshold.key;
  }
  above = warp_sum(above);
  ties = warp_sum(ties);
  if (lane == 0) {
    warp_above[warp] = above;
    warp_ties[warp] = ties;
  }
  __syncthreads();
  above = warp_sum(lane < warp ? warp_above[lane] : 0);
  ties = warp_sum(lane < warp ? warp_ties[lane] : 0);
  const unsigned lanes_before = (1U << lane) - 1;
#pragma unroll 4
  for (int base = begin; base < end; base += 32) {
    const int i = base + lane;
    const unsigned key = i < end ? key_of(x[i]) : 0;
    const unsigned is_above = __ballot_sync(kAllLanes, key > threshold.key), is_tie = __ballot_sync(kAllLanes, key == threshold.key);
    const int tie = ties + __popc(is_tie & lanes_before);
    if (key > threshold.key) winners[above + __popc(is_above & lanes_before)] = winner(key, i);
    else if (key == threshold.key && tie < threshold.ties) winners[k - threshold.ties + tie] = winner(key, i);
    above += __popc(is_above);
    ties += __popc(is_tie);
  }
}

/// x (R, M). The k winners of each row, k in [1, M]: sorted into values and indices (R, k) if kFused (k <= kFusedK), else as they come
/// into `winners` (R, k).
template <class T, bool kFused>
__global__ void __launch_bounds__(kThreads) topk_kernel(const T* __restrict__ x, int M, int k, Winner* __restrict__ winners, T* __restrict__ values,
                                                        std::int64_t* __restrict__ indices) {
  __shared__ Winner sorted[kFused ? kFusedK : 1];
  const std::int64_t row = blockIdx.x;
  x += row * M;
  const Threshold threshold = find_threshold(x, M, k);
  place_winners(x, M, k, threshold, kFused ? sorted : winners + row * k);
  if constexpr (kFused) {
    __syncthreads();
    const int i = static_cast<int>(threadIdx.x);
    if (i >= k) return;
    // All winners differ, so the number of larger ones is the place.
    const Winner mine = sorted[i];
    int place = 0;
#pragma unroll 8
    for (int j = 0; j < k; ++j) place += sorted[j] > mine;
    values[row * k + place] = x[index_of(mine)];
    indices[row * k + place] = index_of(mine);
  }
}

/// Sorts the winners (R, k) of topk_kernel into values and indices. A block ranks kRankThreads winners of a row against all of it.
template <class T>
__global__ void __launch_bounds__(kRankThreads) topk_rank_kernel(const T* __restrict__ x, int M, int k, int blocks_per_row, const Winner* __restrict__ winners,
                                                                 T* __restrict__ values, std::int64_t* __restrict__ indices) {
  __shared__ Winner tile[kRankThreads];
  const std::int64_t row = blockIdx.x / blocks_per_row;
  const int thread = static_cast<int>(threadIdx.x), i = static_cast<int>(blockIdx.x) % blocks_per_row * kRankThreads + thread;
  winners += row * k;
  const Winner mine = i < k ? winners[i] : 0;
  int place = 0;
  for (int begin = 0; begin < k; begin += kRankThreads) {
    tile[thread] = begin + thread < k ? winners[begin + thread] : 0;   // 0 is larger than none
    __syncthreads();
#pragma unroll 8
    for (int j = 0; j < kRankThreads; ++j) place += tile[j] > mine;
    __syncthreads();
  }
  if (i >= k) return;
  values[row * k + place] = x[row * M + index_of(mine)];
  indices[row * k + place] = index_of(mine);
}

}  // namespace

void max_last(const Stream& stream, const Tensor& x, Tensor& y) {
  DETR_CHECK(x.dim(-1) <= 1 << 30, "max_last: rows are too long: ", x);
  dispatch_float("max_last", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (fits_vectors<T>(x.raw(), x.dim(-1))) launch_max_last<T, kVector<T>>(stream, x, y);
    else launch_max_last<T, 1>(stream, x, y);
  });
}

void topk(const Stream& stream, const Tensor& x, Tensor& values, Tensor& indices) {
  DETR_CHECK(x.dim(1) <= 1 << 30, "topk: rows are too long: ", x);
  const int M = static_cast<int>(x.dim(1)), k = static_cast<int>(values.dim(1));
  dispatch_float("topk", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (values.numel() == 0) return;
    const unsigned rows = blocks_for(x.dim(0), 1);
    const T* px = x.data<T>();
    T* pv = values.data<T>();
    std::int64_t* pi = indices.data<std::int64_t>();
    if (k <= kFusedK) {
      launch(stream, topk_kernel<T, true>, rows, kThreads, 0, px, M, k, nullptr, pv, pi);
    } else {
      const Tensor scratch = stream.empty(values.shape(), DType::i64);
      auto* winners = static_cast<Winner*>(scratch.raw());
      const unsigned blocks_per_row = blocks_for(k, kRankThreads);
      launch(stream, topk_kernel<T, false>, rows, kThreads, 0, px, M, k, winners, pv, pi);
      launch(stream, topk_rank_kernel<T>, blocks_for(x.dim(0) * blocks_per_row, 1), kRankThreads, 0, px, M, k, static_cast<int>(blocks_per_row), winners, pv, pi);
    }
  });
}

}  // namespace detr::kernels::cuda
