#include "kernels/attention.h"

#include <cmath>
#include <initializer_list>
#include <type_traits>

#include "kernels/cuda/attention_mma.cuh"
#include "kernels/cuda/shared_memory.cuh"

// f32 takes kernels with plain FMA arithmetic, bf16 those of attention_mma.cuh; both have the same structure. Forward keeps a running
// maximum and sum per query over tiles of keys. Backward recomputes the weights from lse twice, by tiles of keys for dk and dv and by
// tiles of queries for dq, so that each gradient is summed by one block in a fixed order.

namespace detr::kernels::cuda {
namespace {

constexpr int kSide = 16;                  // f32: 16 x 16 threads; thread (y, x) has rows y + 16 r and columns x + 16 c
constexpr int kThreads = kSide * kSide;
constexpr int kShare = kTile / kSide;
constexpr int kWeightPitch = kTile + 1;

/// Floats from a row of a tile to the next; odd, so that neighbouring rows lie in different banks.
template <int D>
constexpr int kPlainPitch = D + 1;
template <int D>
constexpr int kPlainElements = kTile * kPlainPitch<D>;

/// Loads tile `tile` of one head, whose rows begin at `rows` in a tensor (N, count, A d); zero where there is no data.
template <int D>
__device__ void load_tile(const AttentionSizes& sizes, int tile, int count, const float* rows, float* to) {
  for (int i = static_cast<int>(threadIdx.x); i < kTile * D; i += kThreads) {
    const int row = i / D, channel = i % D, slot = tile * kTile + row;
    const bool used = channel < sizes.depth && is_used(sizes, slot, count);
    to[row * kPlainPitch<D> + channel] = used ? rows[static_cast<std::int64_t>(slot) * sizes.width + channel] : 0;
  }
}

/// x = a b^T over the channels, the thread's share of (64, 64).
template <int D>
__device__ void multiply_rows(float (&x)[kShare][kShare], const float* a, const float* b) {
  const int row = static_cast<int>(threadIdx.x) / kSide, column = static_cast<int>(threadIdx.x) % kSide;
#pragma unroll
  for (int i = 0; i < kShare * kShare; ++i) x[i / kShare][i % kShare] = 0;
#pragma unroll 4
  for (int channel = 0; channel < D; ++channel) {
    float left[kShare], right[kShare];
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      left[i] = a[(row + kSide * i) * kPlainPitch<D> + channel];
      right[i] = b[(column + kSide * i) * kPlainPitch<D> + channel];
    }
#pragma unroll
    for (int r = 0; r < kShare; ++r) {
#pragma unroll
      for (int c = 0; c < kShare; ++c) x[r][c] = fmaf(left[r], right[c], x[r][c]);
    }
  }
}

/// x += w b, the thread's share of (64, D); w (64, 64) has rows of kWeightPitch.
template <int D>
__device__ void add_weighted(float (&x)[kShare][D / kSide], const float* w, const float* b) {
  const int row = static_cast<int>(threadIdx.x) / kSide, column = static_cast<int>(threadIdx.x) % kSide;
#pragma unroll 4
  for (int i = 0; i < kTile; ++i) {
    float left[kShare];
#pragma unroll
    for (int r = 0; r < kShare; ++r) left[r] = w[(row + kSide * r) * kWeightPitch + i];
#pragma unroll
    for (int c = 0; c < D / kSide; ++c) {
      const float right = b[i * kPlainPitch<D> + column + kSide * c];
#pragma unroll
      for (int r = 0; r < kShare; ++r) x[r][c] = fmaf(left[r], right, x[r][c]);
    }
  }
}

/// Puts the thread's share of (64, 64) into shared memory.
__device__ void store_weights(const float (&x)[kShare][kShare], float* w) {
  const int row = static_cast<int>(threadIdx.x) / kSide, column = static_cast<int>(threadIdx.x) % kSide;
#pragma unroll
  for (int r = 0; r < kShare; ++r) {
#pragma unroll
    for (int c = 0; c < kShare; ++c) w[(row + kSide * r) * kWeightPitch + column + kSide * c] = x[r][c];
  }
}

/// Writes x times factor[r], or 0 where !used[r], to the rows of tile `tile` of one head.
template <int D>
__device__ void store_tile(const AttentionSizes& sizes, const float (&x)[kShare][D / kSide], const bool (&used)[kShare],
                           const float (&factor)[kShare], float* rows, int tile, int count) {
  const int row = static_cast<int>(threadIdx.x) / kSide, column = static_cast<int>(threadIdx.x) % kSide;
#pragma unroll
  for (int r = 0; r < kShare; ++r) {
    const int slot = tile * kTile + row + kSide * r;
    if (slot >= count) continue;
#pragma unroll
    for (int c = 0; c < D / kSide; ++c) {
      const int channel = column + kSide * c;
      if (channel < sizes.depth) rows[static_cast<std::int64_t>(slot) * sizes.width + channel] = used[r] ? x[r][c] * factor[r] : 0;
    }
  }
}

/// out (N, Tq, A d) and lse (N, A, Tq) for one tile of queries.
template <int D>
__global__ void __launch_bounds__(kThreads) attention_forward_kernel(AttentionSizes sizes, const float* q, const float* k, const float* v,
                                                                     float* out, float* lse) {
  extern __shared__ __align__(16) unsigned char shared[];
  float* const q_tile = reinterpret_cast<float*>(shared);
  float* const k_tile = q_tile + kPlainElements<D>;
  float* const v_tile = k_tile + kPlainElements<D>;
  float* const weights = v_tile + kPlainElements<D>;
  const TileMeetings meetings(sizes, false, reinterpret_cast<unsigned char*>(weights + kTile * kWeightPitch));
  const int row = static_cast<int>(threadIdx.x) / kSide, column = static_cast<int>(threadIdx.x) % kSide;
  const std::int64_t own_rows = meetings.rows(sizes, sizes.queries), other_rows = meetings.rows(sizes, sizes.keys);
  load_tile<D>(sizes, meetings.tile, sizes.queries, q + own_rows, q_tile);
  int own_group[kShare];
  float largest[kShare], sum[kShare] = {}, shift[kShare] = {}, total[kShare][D / kSide] = {};
#pragma unroll
  for (int r = 0; r < kShare; ++r) {
    own_group[r] = query_group(sizes, meetings.tile * kTile + row + kSide * r);
    largest[r] = -INFINITY;
  }
  for (int tile = meetings.next(0); meetings.valid(tile); tile = meetings.next(tile + 1)) {
    __syncthreads();   // nobody needs the tile before
    load_tile<D>(sizes, tile, sizes.keys, k + other_rows, k_tile);
    load_tile<D>(sizes, tile, sizes.keys, v + other_rows, v_tile);
    __syncthreads();
    float x[kShare][kShare];
    multiply_rows<D>(x, q_tile, k_tile);
#pragma unroll
    for (int c = 0; c < kShare; ++c) {
      const int other = key_group(sizes, tile * kTile + column + kSide * c);
#pragma unroll
      for (int r = 0; r < kShare; ++r) x[r][c] = may_look(own_group[r], other) ? x[r][c] * sizes.scale : -INFINITY;
    }
#pragma unroll
    for (int r = 0; r < kShare; ++r) {
      float bound = largest[r];
#pragma unroll
      for (int c = 0; c < kShare; ++c) bound = fmaxf(bound, x[r][c]);
#pragma unroll
      for (int distance = kSide / 2; distance > 0; distance /= 2) bound = fmaxf(bound, __shfl_xor_sync(0xffffffffU, bound, distance));
      shift[r] = bound == -INFINITY ? 0 : bound;   // no allowed key yet: not -inf - -inf
      const float shrink = expf(largest[r] - shift[r]);
      largest[r] = bound;
      sum[r] *= shrink;
#pragma unroll
      for (int c = 0; c < D / kSide; ++c) total[r][c] *= shrink;
#pragma unroll
      for (int c = 0; c < kShare; ++c) {
        x[r][c] = expf(x[r][c] - shift[r]);
        sum[r] += x[r][c];
      }
    }
    store_weights(x, weights);
    __syncthreads();
    add_weighted<D>(total, weights, v_tile);
  }
  bool used[kShare];
  float inverse[kShare];
#pragma unroll
  for (int r = 0; r < kShare; ++r) {
#pragma unroll
    for (int distance = kSide / 2; distance > 0; distance /= 2) sum[r] += __shfl_xor_sync(0xffffffffU, sum[r], distance);
    used[r] = own_group[r] != kNoQuery && sum[r] != 0;
    inverse[r] = 1 / sum[r];
    const int slot = meetings.tile * kTile + row + kSide * r;
    if (column == 0 && slot < sizes.queries) lse[meetings.statistics(sizes, sizes.queries) + slot] = used[r] ? shift[r] + logf(sum[r]) : 0;
  }
  store_tile<D>(sizes, total, used, inverse, out + own_rows, meetings.tile, sizes.queries);
}

/// dk and dv (N, Tk, A d), each or null, for one tile of keys: transposed scores, rows keys and columns queries.
template <int D>
__global__ void __launch_bounds__(kThreads) attention_dkv_kernel(AttentionSizes sizes, const float* dout, const float* q, const float* k,
                                                                 const float* v, const float* lse, const float* delta, float* dk, float* dv) {
  extern __shared__ __align__(16) unsigned char shared[];
  float* const k_tile = reinterpret_cast<float*>(shared);
  float* const v_tile = k_tile + kPlainElements<D>;
  float* const q_tile = v_tile + kPlainElements<D>;
  float* const dout_tile = q_tile + kPlainElements<D>;
  float* const weights = dout_tile + kPlainElements<D>;
  const TileMeetings meetings(sizes, true, reinterpret_cast<unsigned char*>(weights + kTile * kWeightPitch));
  const int row = static_cast<int>(threadIdx.x) / kSide, column = static_cast<int>(threadIdx.x) % kSide;
  const std::int64_t own_rows = meetings.rows(sizes, sizes.keys), other_rows = meetings.rows(sizes, sizes.queries);
  const std::int64_t statistics = meetings.statistics(sizes, sizes.queries);
  load_tile<D>(sizes, meetings.tile, sizes.keys, k + own_rows, k_tile);
  load_tile<D>(sizes, meetings.tile, sizes.keys, v + own_rows, v_tile);
  int own_group[kShare];
#pragma unroll
  for (int r = 0; r < kShare; ++r) own_group[r] = key_group(sizes, meetings.tile * kTile + row + kSide * r);
  float dk_total[kShare][D / kSide] = {}, dv_total[kShare][D / kSide] = {};
  for (int tile = meetings.next(0); meetings.valid(tile); tile = meetings.next(tile + 1)) {
    __syncthreads();   // nobody needs the tile before
    load_tile<D>(sizes, tile, sizes.queries, q + other_rows, q_tile);
    load_tile<D>(sizes, tile, sizes.queries, dout + other_rows, dout_tile);
    __syncthreads();
    float x[kShare][kShare];
    multiply_rows<D>(x, k_tile, q_tile);
#pragma unroll
    for (int c = 0; c < kShare; ++c) {
      const int slot = tile * kTile + column + kSide * c, other = query_group(sizes, slot);
      const float shift = slot < sizes.queries ? lse[statistics + slot] : 0;
#pragma unroll
      for (int r = 0; r < kShare; ++r) x[r][c] = may_look(other, own_group[r]) ? expf(x[r][c] * sizes.scale - shift) : 0;
    }
    if (dv) {
      store_weights(x, weights);
      __syncthreads();
      add_weighted<D>(dv_total, weights, dout_tile);
    }
    if (!dk) continue;
    float dx[kShare][kShare];
    multiply_rows<D>(dx, v_tile, dout_tile);
#pragma unroll
    for (int c = 0; c < kShare; ++c) {
      const int slot = tile * kTile + column + kSide * c, other = query_group(sizes, slot);
      const float mean = slot < sizes.queries ? delta[statistics + slot] : 0;
#pragma unroll
      for (int r = 0; r < kShare; ++r) dx[r][c] = may_look(other, own_group[r]) ? x[r][c] * (dx[r][c] - mean) : 0;
    }
    __syncthreads();   // nobody needs the weights of dv
    store_weights(dx, weights);
    __syncthreads();
    add_weighted<D>(dk_total, weights, q_tile);
  }
  bool used[kShare];
  float factor[kShare], one[kShare];
#pragma unroll
  for (int r = 0; r < kShare; ++r) {
    used[r] = own_group[r] != kNoKey;
    factor[r] = sizes.scale;
    one[r] = 1;
  }
  if (dk) store_tile<D>(sizes, dk_total, used, factor, dk + own_rows, meetings.tile, sizes.keys);
  if (dv) store_tile<D>(sizes, dv_total, used, one, dv + own_rows, meetings.tile, sizes.keys);
}

/// dq (N, Tq, A d) for one tile of queries.
template <int D>
__global__ void __launch_bounds__(kThreads) attention_dq_kernel(AttentionSizes sizes, const float* dout, const float* q, const float* k,
                                                                const float* v, const float* lse, const float* delta, float* dq) {
  extern __shared__ __align__(16) unsigned char shared[];
  float* const q_tile = reinterpret_cast<float*>(shared);
  float* const dout_tile = q_tile + kPlainElements<D>;
  float* const k_tile = dout_tile + kPlainElements<D>;
  float* const v_tile = k_tile + kPlainElements<D>;
  float* const weights = v_tile + kPlainElements<D>;
  const TileMeetings meetings(sizes, false, reinterpret_cast<unsigned char*>(weights + kTile * kWeightPitch));
  const int row = static_cast<int>(threadIdx.x) / kSide, column = static_cast<int>(threadIdx.x) % kSide;
  const std::int64_t own_rows = meetings.rows(sizes, sizes.queries), other_rows = meetings.rows(sizes, sizes.keys);
  load_tile<D>(sizes, meetings.tile, sizes.queries, q + own_rows, q_tile);
  load_tile<D>(sizes, meetings.tile, sizes.queries, dout + own_rows, dout_tile);
  int own_group[kShare];
  bool used[kShare];
  float shift[kShare], mean[kShare], factor[kShare], total[kShare][D / kSide] = {};
#pragma unroll
  for (int r = 0; r < kShare; ++r) {
    const int slot = meetings.tile * kTile + row + kSide * r;
    const std::int64_t place = meetings.statistics(sizes, sizes.queries) + slot;
    own_group[r] = query_group(sizes, slot);
    shift[r] = slot < sizes.queries ? lse[place] : 0;
    mean[r] = slot < sizes.queries ? delta[place] : 0;
    used[r] = own_group[r] != kNoQuery;
    factor[r] = sizes.scale;
  }
  for (int tile = meetings.next(0); meetings.valid(tile); tile = meetings.next(tile + 1)) {
    __syncthreads();   // nobody needs the tile before
    load_tile<D>(sizes, tile, sizes.keys, k + other_rows, k_tile);
    load_tile<D>(sizes, tile, sizes.keys, v + other_rows, v_tile);
    __syncthreads();
    float x[kShare][kShare], dx[kShare][kShare];
    multiply_rows<D>(x, q_tile, k_tile);
    multiply_rows<D>(dx, dout_tile, v_tile);
#pragma unroll
    for (int c = 0; c < kShare; ++c) {
      const int other = key_group(sizes, tile * kTile + column + kSide * c);
#pragma unroll
      for (int r = 0; r < kShare; ++r) {
        dx[r][c] = may_look(own_group[r], other) ? expf(x[r][c] * sizes.scale - shift[r]) * (dx[r][c] - mean[r]) : 0;
      }
    }
    store_weights(dx, weights);
    __syncthreads();
    add_weighted<D>(total, weights, k_tile);
  }
  store_tile<D>(sizes, total, used, factor, dq + own_rows, meetings.tile, sizes.queries);
}

constexpr int kDeltaLanes = 4, kDeltaThreads = 256;

/// delta (N, A, Tq) = sum over the channels of dout out, which is the sum over keys of weight times its gradient; 0 for padding
/// slots. A row (n, i, a) of `rows` is shared by kDeltaLanes lanes.
template <class T>
__global__ void __launch_bounds__(kDeltaThreads) attention_delta_kernel(AttentionSizes sizes, int rows, const T* dout, const T* out, float* delta) {
  const int row = static_cast<int>(blockIdx.x) * (kDeltaThreads / kDeltaLanes) + static_cast<int>(threadIdx.x) / kDeltaLanes;
  const int lane = static_cast<int>(threadIdx.x) % kDeltaLanes, token = row / sizes.heads, head = row % sizes.heads;
  const int image = token / sizes.queries, slot = token % sizes.queries;
  float sum = 0;
  if (row < rows && is_used(sizes, slot, sizes.queries)) {
    const std::int64_t first = static_cast<std::int64_t>(row) * sizes.depth;
    if (sizes.vectors) {
      for (int channel = lane * kVector<T>; channel < sizes.depth; channel += kDeltaLanes * kVector<T>) {
        float x[kVector<T>], y[kVector<T>];
        load_vector(dout + first + channel, x);
        load_vector(out + first + channel, y);
#pragma unroll
        for (int i = 0; i < kVector<T>; ++i) sum = fmaf(x[i], y[i], sum);
      }
    } else {
      for (int channel = lane; channel < sizes.depth; channel += kDeltaLanes) {
        sum = fmaf(to_float(dout[first + channel]), to_float(out[first + channel]), sum);
      }
    }
  }
#pragma unroll
  for (int distance = kDeltaLanes / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffU, sum, distance);
  if (lane == 0 && row < rows) delta[(static_cast<std::int64_t>(image) * sizes.heads + head) * sizes.queries + slot] = sum;
}

/// Calls fn with the channels of a head rounded up to what there are kernels for.
template <class F>
void dispatch_depth(std::int64_t depth, F&& fn) {
  DETR_CHECK(depth <= 128, "attention: CUDA takes heads of up to 128 channels, got ", depth);
  if (depth <= 32) fn(std::integral_constant<int, 32>{});
  else if (depth <= 48) fn(std::integral_constant<int, 48>{});
  else if (depth <= 64) fn(std::integral_constant<int, 64>{});
  else fn(std::integral_constant<int, 128>{});
}

constexpr std::int64_t kLimit = std::int64_t{1} << 30;   // of slots, channels and rows; indices past the end still fit 32 bits

/// `x` are the tensors that kernels access; null ones do not count.
AttentionSizes sizes_of(const Tensor& q, const Tensor& k, std::int64_t heads, const Tensor* groups, std::initializer_list<const Tensor*> x) {
  DETR_CHECK(q.dim(1) < kLimit && k.dim(1) < kLimit && q.dim(2) < kLimit, "attention: too many tokens or channels for CUDA: ", q, " and ", k);
  const std::int64_t depth = q.dim(2) / heads;
  bool vectors = depth * size_of(q.dtype()) % 16 == 0;
  for (const Tensor* tensor : x) vectors = vectors && (!tensor || reinterpret_cast<std::uintptr_t>(tensor->raw()) % 16 == 0);
  return {static_cast<int>(q.dim(1)), static_cast<int>(k.dim(1)), static_cast<int>(heads), static_cast<int>(depth), static_cast<int>(q.dim(2)),
          groups ? groups->data<std::int64_t>() : nullptr, static_cast<float>(1 / std::sqrt(static_cast<double>(depth))), vectors};
}

/// Enqueues a kernel with one block for each tile of `own_slots` slots of each head and image.
template <class... Parameters, class... Arguments>
void launch_tiles(const Stream& stream, void (*kernel)(Parameters...), const Tensor& q, const AttentionSizes& sizes, int own_slots, int threads,
                  std::size_t shared_bytes, Arguments&&... arguments) {
  allow_shared(stream, "attention", kernel, shared_bytes);
  const unsigned blocks = blocks_for(q.dim(0) * sizes.heads * tiles_of(own_slots), 1);
  launch(stream, kernel, blocks, threads, shared_bytes, sizes, std::forward<Arguments>(arguments)...);
}

/// Bytes of dynamic shared memory for `tiles` tiles of f32, a tile of weights, and a byte for each tile of the other side.
template <int D>
std::size_t plain_shared_bytes(int tiles, int other_slots) {
  return static_cast<std::size_t>((tiles * kPlainElements<D> + kTile * kWeightPitch) * 4 + tiles_of(other_slots));
}

}  // namespace

void attention_forward(const Stream& stream, const Tensor& q, const Tensor& k, const Tensor& v, std::int64_t heads,
                       const Tensor* groups, Tensor& out, Tensor& lse) {
  const AttentionSizes sizes = sizes_of(q, k, heads, groups, {&q, &k, &v, &out});
  dispatch_float("attention", q.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    dispatch_depth(sizes.depth, [&](auto depth) {
      constexpr int D = decltype(depth)::value;
      const auto run = [&](auto kernel, int threads, std::size_t shared_bytes) {
        launch_tiles(stream, kernel, q, sizes, sizes.queries, threads, shared_bytes, q.data<T>(), k.data<T>(), v.data<T>(), out.data<T>(),
                     lse.data<float>());
      };
      if constexpr (std::is_same_v<T, bf16>) run(attention_forward_mma_kernel<D>, kMmaThreads, mma_shared_bytes<D>(5, 2 * kTile, sizes.keys));
      else run(attention_forward_kernel<D>, kThreads, plain_shared_bytes<D>(3, sizes.keys));
    });
  });
}

void attention_backward(const Stream& stream, const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                        const Tensor& lse, std::int64_t heads, const Tensor* groups, Tensor* dq, Tensor* dk, Tensor* dv) {
  const AttentionSizes sizes = sizes_of(q, k, heads, groups, {&dout, &q, &k, &v, &out, dq, dk, dv});
  dispatch_float("attention", q.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const bool wants_delta = dq || dk;
    const Tensor delta = stream.empty(wants_delta ? lse.shape() : Shape{0}, DType::f32);
    const auto data = [](Tensor* x) { return x ? x->data<T>() : nullptr; };
    if (wants_delta) {
      DETR_CHECK(lse.numel() < kLimit, "attention: too many queries for CUDA: lse ", lse);
      launch(stream, attention_delta_kernel<T>, blocks_for(lse.numel(), kDeltaThreads / kDeltaLanes), kDeltaThreads, 0, sizes,
             static_cast<int>(lse.numel()), dout.data<T>(), out.data<T>(), delta.data<float>());
    }
    dispatch_depth(sizes.depth, [&](auto depth) {
      constexpr int D = decltype(depth)::value;
      const auto run_dkv = [&](auto kernel, int threads, std::size_t shared_bytes) {
        launch_tiles(stream, kernel, q, sizes, sizes.keys, threads, shared_bytes, dout.data<T>(), q.data<T>(), k.data<T>(), v.data<T>(),
                     lse.data<float>(), delta.data<float>(), data(dk), data(dv));
      };
      const auto run_dq = [&](auto kernel, int threads, std::size_t shared_bytes) {
        launch_tiles(stream, kernel, q, sizes, sizes.queries, threads, shared_bytes, dout.data<T>(), q.data<T>(), k.data<T>(), v.data<T>(),
                     lse.data<float>(), delta.data<float>(), dq->data<T>());
      };
      if constexpr (std::is_same_v<T, bf16>) {
        const std::size_t dkv_bytes = mma_shared_bytes<D>(6, 6 * kTile, sizes.queries);
        if (dk && dv) run_dkv(attention_dkv_mma_kernel<D, true, true>, kMmaThreads, dkv_bytes);
        else if (dk) run_dkv(attention_dkv_mma_kernel<D, true, false>, kMmaThreads, dkv_bytes);
        else if (dv) run_dkv(attention_dkv_mma_kernel<D, false, true>, kMmaThreads, dkv_bytes);
        if (dq) run_dq(attention_dq_mma_kernel<D>, kMmaThreads, mma_shared_bytes<D>(6, 2 * kTile, sizes.keys));
      } else {
        if (dk || dv) run_dkv(attention_dkv_kernel<D>, kThreads, plain_shared_bytes<D>(4, sizes.queries));
        if (dq) run_dq(attention_dq_kernel<D>, kThreads, plain_shared_bytes<D>(4, sizes.keys));
      }
    });
  });
}

}  // namespace detr::kernels::cuda
