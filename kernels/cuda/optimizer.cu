#include "kernels/optimizer.h"

#include <algorithm>

#include "kernels/cuda/launch.cuh"

// Note [Tiles and segments]
// The flat buffers are cut into tiles of a fixed number of elements, a warp each, so that the launch depends on their size alone. Where segments
// lie is known to the device only: a warp searches the first one that reaches into its tile and goes on from there. Segments come in
// ascending order and do not overlap, hence along the pairs (tile, segment) that meet, tile + segment never has the same value twice:
// it is the place of the pair's partial sum, in an array of tiles + segments.

namespace detr::kernels::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kTile = 1024;                                    // elements of a warp
constexpr int kNormTile = 512, kVectors = kNormTile / 128;     // where it keeps them in registers: float4 in each lane
constexpr unsigned kAllLanes = 0xffffffffU;

void expect_f32(const char* op, const Tensor& tensor) {
  DETR_CHECK(tensor.dtype() == DType::f32, op, ": flat buffers are f32 on CUDA, got ", tensor);
}

bool aligned(const Tensor& tensor) { return fits_vectors<float>(tensor.raw(), 4); }

/// Where the segments lie.
struct Table {
  const std::int64_t* begin;
  const std::int64_t* count;
  const double* used;
  int size;

  explicit Table(const Segments& s)
      : begin(s.begin.data<std::int64_t>()), count(s.count.data<std::int64_t>()), used(s.used.data<double>()),
        size(static_cast<int>(s.begin.numel())) {}
};

/// The first segment that ends behind `at`, found by the whole warp: a round of 32 probes divides the range by as many.
__device__ inline int first_segment(const Table& segments, std::int64_t at) {
  int low = 0, high = segments.size;   // it is in [low, high]
  while (low < high) {
    const int step = (high - low + 31) / 32, probe = low + static_cast<int>(threadIdx.x) % 32 * step;
    const bool before = probe < high && segments.begin[probe] + segments.count[probe] <= at;
    const int passed = __popc(__ballot_sync(kAllLanes, before));
    if (passed == 0) break;            // the first probe is at `low`
    high = min(high, low + passed * step);
    low += (passed - 1) * step + 1;
  }
  return low;
}

/// Calls fn(segment, first, last) for each used segment in a tile: its elements in the tile are [first, last), counted from tile_begin.
template <class F>
__device__ inline void for_segments(const Table& segments, std::int64_t tile_begin, int tile_size, F&& fn) {
  for (int s = first_segment(segments, tile_begin); s < segments.size; ++s) {
    const std::int64_t begin = segments.begin[s] - tile_begin, end = begin + segments.count[s];
    if (begin >= tile_size) break;
    const int first = begin > 0 ? static_cast<int>(begin) : 0, last = end < tile_size ? static_cast<int>(end) : tile_size;
    if (segments.used[s] != 0 && first < last) fn(s, first, last);
  }
}

/// partial[tile + s] = sum of squares of the elements of used segment s in the tile, in f64. See Note [Tiles and segments].
/// `vectors`: grads (count) may be read in vectors.
__global__ void __launch_bounds__(kThreads, 4) tile_norms_kernel(Table segments, const float* __restrict__ grads, std::int64_t count, bool vectors,
                                                              double* __restrict__ partial) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t tile = static_cast<std::int64_t>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32, tile_begin = tile * kNormTile;
  if (tile_begin >= count) return;
  const int tile_size = count - tile_begin < kNormTile ? static_cast<int>(count - tile_begin) : kNormTile;
  float x[kVectors][4];   // of element 4 (32 v + lane) and its neighbours
  if (vectors && tile_size == kNormTile) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) load_vector(grads + tile_begin + 4 * (32 * v + lane), x[v]);
  } else {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * (32 * v + lane) + i;
        x[v][i] = at < tile_size ? grads[tile_begin + at] : 0;
      }
    }
  }
  for_segments(segments, tile_begin, tile_size, [&](int s, int first, int last) {
    double sum = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * (32 * v + lane) + i;
        const double g = first <= at && at < last ? x[v][i] : 0;
        sum += g * g;
      }
    }
    sum = warp_sum(sum);
    if (lane == 0) partial[tile + s] = sum;
  });
}

/// norms[s] = sum of the segment's partial sums, a block each; 0 where unused.
__global__ void __launch_bounds__(kThreads) segment_norms_kernel(Table segments, const double* __restrict__ partial, std::int64_t tiles,
                                                                 double* __restrict__ norms) {
  __shared__ double scratch[32];
  const int s = static_cast<int>(blockIdx.x);
  const std::int64_t begin = segments.begin[s], end = begin + segments.count[s];
  double sum = 0;
  if (segments.used[s] != 0 && begin >= 0 && begin < end) {
    const std::int64_t last = min((end - 1) / kNormTile, tiles - 1);
    for (std::int64_t tile = begin / kNormTile + threadIdx.x; tile <= last; tile += kThreads) sum += partial[tile + s];
  }
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) norms[s] = sum;
}

/// One block. norms (count).
__global__ void __launch_bounds__(kThreads) finish_norm_kernel(const double* __restrict__ norms, int count, double max_norm,
                                                               double* __restrict__ scalars) {
  __shared__ double scratch[32];
  double sum = 0;
  for (int s = static_cast<int>(threadIdx.x); s < count; s += kThreads) sum += norms[s];
  sum = block_sum(sum, scratch);
  if (threadIdx.x != 0) return;
  const double norm = sqrt(sum), clip = max_norm / (norm + 1e-6);
  scalars[kGradNorm] = norm;
  scalars[kClip] = max_norm > 0 && clip < 1 ? clip : 1;
  if (!isfinite(norm)) scalars[kApply] = 0;
}

/// Status arrays, count[i] elements at place[i].
struct Statuses {
  const std::int64_t* place[kMaxStatuses];
  std::int64_t count[kMaxStatuses];
  int size;
};

/// One block.
template <class T>
__global__ void __launch_bounds__(kThreads) check_step_kernel(const T* __restrict__ total, const __grid_constant__ Statuses statuses,
                                                              double* __restrict__ scalars) {
  bool healthy = isfinite(to_float(total[0]));
  for (int i = 0; i < statuses.size; ++i) {
    for (std::int64_t j = threadIdx.x; j < statuses.count[i]; j += kThreads) healthy = healthy && statuses.place[i][j] == -1;
  }
  healthy = __syncthreads_and(healthy);
  if (threadIdx.x == 0 && !healthy) scalars[kApply] = 0;
}

/// Copies `words` words where kApply is 0, in strides of the grid: nearly always there is nothing to do, so the grid is small.
template <class Word>
__global__ void __launch_bounds__(kThreads) restore_kernel(const double* __restrict__ scalars, const Word* __restrict__ kept, std::int64_t words,
                                                           Word* __restrict__ buffers) {
  if (scalars[kApply] != 0) return;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < words; i += stride) buffers[i] = kept[i];
}

__global__ void check_votes_kernel(const double* __restrict__ votes, std::int64_t count, double wanted, double* __restrict__ scalars) {
  for (std::int64_t i = 0; i < count; ++i) {
    if (votes[i] != wanted) scalars[kApply] = 0;
  }
}

/// Counts the update of each used segment and writes what its elements need: (1 - lr wd, lr / (1 - b1^t), 1 / sqrt(1 - b2^t), 0).
__global__ void __launch_bounds__(kThreads) adamw_segments_kernel(Table segments, const double* __restrict__ scalars, const double* __restrict__ lrs,
                                                                  const double* __restrict__ weight_decays, AdamWOptions options,
                                                                  std::int64_t* __restrict__ steps, float4* __restrict__ rates) {
  const int s = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (s >= segments.size || scalars[kApply] == 0 || segments.used[s] == 0) return;
  const std::int64_t t = steps[s] + 1;
  steps[s] = t;
  const double lr = scalars[kLrFactor] * lrs[s], updates = static_cast<double>(t);
  rates[s] = make_float4(static_cast<float>(1 - lr * weight_decays[s]), static_cast<float>(lr / (1 - pow(options.beta1, updates))),
                         static_cast<float>(1 / sqrt(1 - pow(options.beta2, updates))), 0);
}

/// AdamWOptions as the elements need them.
struct Betas {
  float b1, b2, one_b1, one_b2, eps;
};

/// One element; rates as adamw_segments_kernel writes them.
__device__ inline void adamw_element(const Betas& betas, float4 rates, float gradient, float& w, float& m, float& v) {
  m = betas.b1 * m + betas.one_b1 * gradient;
  v = betas.b2 * v + betas.one_b2 * gradient * gradient;
  w = rates.x * w - rates.y * m / (sqrtf(v) * rates.z + betas.eps);
}

/// Flat buffers of `count` elements; a warp a tile. What lies between segments is not touched.
__global__ void __launch_bounds__(kThreads) adamw_kernel(Table segments, const double* __restrict__ scalars, const float4* __restrict__ rates, Betas betas,
                                                         std::int64_t count, bool vectors, const float* __restrict__ grads, float* __restrict__ weights,
                                                         float* __restrict__ exp_avg, float* __restrict__ exp_avg_sq) {
  if (scalars[kApply] == 0) return;
  const auto clip = static_cast<float>(scalars[kClip]);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t tile_begin = (static_cast<std::int64_t>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32) * kTile;
  if (tile_begin >= count) return;
  const int tile_size = count - tile_begin < kTile ? static_cast<int>(count - tile_begin) : kTile;
  grads += tile_begin;
  weights += tile_begin;
  exp_avg += tile_begin;
  exp_avg_sq += tile_begin;
  for_segments(segments, tile_begin, tile_size, [&](int s, int first, int last) {
    const float4 rate = rates[s];
    for (int at = first / 4 * 4 + 4 * lane; at < last; at += 128) {
      if (vectors && at >= first && at + 4 <= last) {
        float g[4], w[4], m[4], v[4];
        load_vector(grads + at, g);
        load_vector(exp_avg + at, m);
        load_vector(exp_avg_sq + at, v);
        load_vector(weights + at, w);
#pragma unroll
        for (int i = 0; i < 4; ++i) adamw_element(betas, rate, clip * g[i], w[i], m[i], v[i]);
        store_vector(exp_avg + at, m);
        store_vector(exp_avg_sq + at, v);
        store_vector(weights + at, w);
      } else {
        for (int i = max(at, first); i < min(at + 4, last); ++i) adamw_element(betas, rate, clip * grads[i], weights[i], exp_avg[i], exp_avg_sq[i]);
      }
    }
  });
}

/// One thread. Counts the update; factors = (d, 1 - d).
__global__ void ema_factors_kernel(double decay, double ramp, double* scalars, float* factors) {
  if (scalars[kApply] == 0) return;
  const double updates = scalars[kEmaUpdates] + 1, d = decay * (1 - exp(-updates / ramp));
  scalars[kEmaUpdates] = updates;
  factors[0] = static_cast<float>(d);
  factors[1] = static_cast<float>(1 - d);
}

/// ema = d ema + (1 - d) weights, `count` elements; a thread W neighbours, and the first threads one each of the last count % W.
template <int W>
__global__ void __launch_bounds__(kThreads) ema_kernel(const double* __restrict__ scalars, const float* __restrict__ factors, std::int64_t count,
                                                       const float* __restrict__ weights, float* __restrict__ ema) {
  if (scalars[kApply] == 0) return;
  const float keep = factors[0], take = factors[1];
  const std::int64_t thread = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x, vectors = count / W;
  if constexpr (W > 1) {
    if (thread < vectors) {
      float w[W], e[W];
      load_vector(weights + thread * W, w);
      load_vector(ema + thread * W, e);
#pragma unroll
      for (int i = 0; i < W; ++i) e[i] = keep * e[i] + take * w[i];
      store_vector(ema + thread * W, e);
    }
  }
  const std::int64_t at = W > 1 ? vectors * W + thread : thread;
  if (at < count) ema[at] = keep * ema[at] + take * weights[at];
}

}  // namespace

void squared_norms(const Stream& stream, const Segments& segments, const Tensor& grads, Tensor& norms) {
  expect_f32("squared_norms", grads);
  const std::int64_t tiles = blocks_for(grads.numel(), kNormTile);
  const Table table(segments);
  const Tensor partial = stream.empty({tiles + table.size}, DType::f64);
  launch(stream, tile_norms_kernel, blocks_for(tiles, kWarps), kThreads, 0, table, grads.data<float>(), grads.numel(), aligned(grads), partial.data<double>());
  launch(stream, segment_norms_kernel, blocks_for(table.size, 1), kThreads, 0, table, partial.data<double>(), tiles, norms.data<double>());
}

void finish_norm(const Stream& stream, const Tensor& norms, double max_norm, Tensor& scalars) {
  launch(stream, finish_norm_kernel, 1, kThreads, 0, norms.data<double>(), static_cast<int>(norms.numel()), max_norm, scalars.data<double>());
}

void check_step(const Stream& stream, const Tensor& total, std::span<const Tensor> statuses, Tensor& scalars) {
  Statuses table{};
  for (const Tensor& status : statuses) {
    table.place[table.size] = status.data<std::int64_t>();
    table.count[table.size++] = status.numel();
  }
  dispatch_float("check_step", total.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch(stream, check_step_kernel<T>, 1, kThreads, 0, total.data<T>(), table, scalars.data<double>());
  });
}

void check_votes(const Stream& stream, const Tensor& votes, double wanted, Tensor& scalars) {
  launch(stream, check_votes_kernel, 1, 1, 0, votes.data<double>(), votes.numel(), wanted, scalars.data<double>());
}

void restore_unless_applied(const Stream& stream, const Tensor& scalars, const Tensor& kept, Tensor& buffers) {
  expect_f32("restore_unless_applied", buffers);
  const std::int64_t count = buffers.numel();
  const unsigned most = 2 * static_cast<unsigned>(stream.cuda_state().multiprocessors());
  const auto restore = [&](auto word, std::int64_t words) {
    using Word = decltype(word);
    launch(stream, restore_kernel<Word>, std::min(blocks_for(words, kThreads), most), kThreads, 0, scalars.data<double>(),
           static_cast<const Word*>(kept.raw()), words, static_cast<Word*>(buffers.raw()));
  };
  if (count % 4 == 0 && aligned(kept) && aligned(buffers)) restore(float4{}, count / 4);
  else restore(float{}, count);
}

void adamw(const Stream& stream, Segments& segments, const AdamWOptions& options, const Tensor& scalars, const Tensor& grads,
           Tensor& weights, Tensor& exp_avg, Tensor& exp_avg_sq) {
  expect_f32("adamw", grads);
  const Table table(segments);
  const Tensor rates = stream.empty({table.size, 4}, DType::f32);
  auto* rows = static_cast<float4*>(rates.raw());
  launch(stream, adamw_segments_kernel, blocks_for(table.size, kThreads), kThreads, 0, table, scalars.data<double>(), segments.lr.data<double>(),
         segments.weight_decay.data<double>(), options, segments.steps.data<std::int64_t>(), rows);
  const Betas betas{static_cast<float>(options.beta1), static_cast<float>(options.beta2), static_cast<float>(1 - options.beta1),
                    static_cast<float>(1 - options.beta2), static_cast<float>(options.eps)};
  const bool vectors = aligned(grads) && aligned(weights) && aligned(exp_avg) && aligned(exp_avg_sq);
  launch(stream, adamw_kernel, blocks_for(grads.numel(), kTile * kWarps), kThreads, 0, table, scalars.data<double>(), rows, betas, grads.numel(), vectors,
         grads.data<float>(), weights.data<float>(), exp_avg.data<float>(), exp_avg_sq.data<float>());
}

void update_ema(const Stream& stream, double decay, double ramp, Tensor& scalars, const Tensor& weights, Tensor& ema) {
  expect_f32("update_ema", weights);
  const Tensor factors = stream.empty({2}, DType::f32);
  launch(stream, ema_factors_kernel, 1, 1, 0, decay, ramp, scalars.data<double>(), factors.data<float>());
  const bool vectors = aligned(weights) && aligned(ema);
  const std::int64_t count = weights.numel();
  launch(stream, vectors ? ema_kernel<4> : ema_kernel<1>, blocks_for(count, (vectors ? 4 : 1) * kThreads), kThreads, 0, scalars.data<double>(),
         factors.data<float>(), count, weights.data<float>(), ema.data<float>());
}

}  // namespace detr::kernels::cuda
