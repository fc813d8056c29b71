#pragma once
#include "kernels/cuda/attention_mask.cuh"
#include "kernels/cuda/mma.cuh"

// Attention in bf16 on the tensor cores. A block has 4 warps and a tile of 64 queries (or keys) of one head, of which each warp owns
// 16 rows; tiles of the other side pass through shared memory in two stages, the next one on its way while this one is used. A warp's
// scores stay in registers: the accumulator of one product (16 x 16 scores) has the layout of operand A of the next.
// In a fragment a thread has rows lane / 4 and lane / 4 + 8, and columns 2 (lane % 4) and the one after, in each 8 columns.

namespace detr::kernels::cuda {
namespace {

constexpr int kMmaThreads = 128;
constexpr int kWarpRows = 16;

/// Elements from a row of a tile to the next: 16 bytes of padding put the eight rows that ldmatrix reads at once into different banks.
template <int D>
constexpr int kPitch = D + 8;
template <int D>
constexpr int kTileElements = kTile * kPitch<D>;

__device__ inline unsigned shared_address(const void* place) { return static_cast<unsigned>(__cvta_generic_to_shared(place)); }

/// Four 8 x 8 matrices; lanes 8 i to 8 i + 7 point at the rows of matrix i.
__device__ inline void load_matrices(unsigned (&x)[4], const bf16* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared_address(row)));
}
/// The same, each matrix transposed.
__device__ inline void load_matrices_transposed(unsigned (&x)[4], const bf16* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared_address(row)));
}
/// 2^x within 2 units in the last place; results below the normal range are 0.
__device__ inline float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/// Copies 16 or 4 bytes to shared memory behind the thread's back, or zeros if not `used` (then nothing is read).
__device__ inline void copy_16(void* to, const void* from, bool used) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(used ? 16 : 0) : "memory");
}
__device__ inline void copy_4(void* to, const void* from, bool used) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(used ? 4 : 0) : "memory");
}
/// Waits for the thread's own copies.
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

/// Begins to load tile `tile` of the block's head, of kCount tensors (N, count, A d) whose head begins at `rows[i]`. Rows of padding
/// slots and beyond the end are zero, as are channels beyond d.
template <int D, int kCount>
__device__ inline void load_tiles(const AttentionSizes& sizes, int tile, int count, const bf16* const (&rows)[kCount], bf16* const (&to)[kCount]) {
#pragma unroll
  for (int i = 0; i < kTile * D / 8 / kMmaThreads; ++i) {
    const int piece = i * kMmaThreads + static_cast<int>(threadIdx.x), row = piece / (D / 8), channel = piece % (D / 8) * 8;
    const int slot = tile * kTile + row, place = row * kPitch<D> + channel;
    const bool used = channel < sizes.depth && is_used(sizes, slot, count);
    const std::int64_t from = used ? static_cast<std::int64_t>(slot) * sizes.width + channel : 0;
#pragma unroll
    for (int x = 0; x < kCount; ++x) {
      if (sizes.vectors) {
        copy_16(to[x] + place, rows[x] + from, used);
      } else {
        for (int e = 0; e < 8; ++e) to[x][place + e] = used && channel + e < sizes.depth ? rows[x][from + e] : from_float<bf16>(0);
      }
    }
  }
}

/// The warp's 16 rows of a tile as operand A, channels [16 step, 16 step + 16) at a time. Held in registers while these suffice.
template <int D>
class OwnRows {
 public:
  __device__ explicit OwnRows(const bf16* rows) : rows_(rows) {
    if constexpr (kHeld) {
#pragma unroll
      for (int step = 0; step < D / 16; ++step) load(step, held_[step]);
    }
  }
  __device__ void get(int step, unsigned (&a)[4]) const {
    if constexpr (kHeld) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = held_[step][i];
    } else {
      load(step, a);
    }
  }

 private:
  static constexpr bool kHeld = D <= 64;

  __device__ void load(int step, unsigned (&a)[4]) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    load_matrices(a, rows_ + lane % 16 * kPitch<D> + step * 16 + lane / 16 * 8);
  }

  const bf16* rows_;
  unsigned held_[kHeld ? D / 16 : 1][4];
};

/// x (16, 16) = a b^T, summed over the channels; b are 16 rows of a tile. x[n] has columns 8 n to 8 n + 7.
template <int D>
__device__ inline void multiply_rows(float (&x)[2][4], const OwnRows<D>& a, const bf16* b) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bf16* place = b + (lane % 8 + lane / 16 * 8) * kPitch<D> + lane / 8 % 2 * 8;
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i / 4][i % 4] = 0;
#pragma unroll
  for (int step = 0; step < D / 16; ++step) {
    unsigned own[4], other[4];
    a.get(step, own);
    load_matrices(other, place + step * 16);
    multiply_add(x[0], own, other[0], other[1]);
    multiply_add(x[1], own, other[2], other[3]);
  }
}

/// x (16, D) += w b, with w (16, 16) rounded to bf16; b are 16 rows of a tile.
template <int D>
__device__ inline void add_weighted(float (&x)[D / 8][4], const float (&w)[2][4], const bf16* b) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  unsigned a[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(w[i / 2][i % 2 * 2], w[i / 2][i % 2 * 2 + 1]);
    a[i] = reinterpret_cast<const unsigned&>(pair);
  }
#pragma unroll
  for (int step = 0; step < D / 16; ++step) {
    unsigned other[4];
    load_matrices_transposed(other, b + lane % 16 * kPitch<D> + step * 16 + lane / 16 * 8);
    multiply_add(x[2 * step], a, other[0], other[1]);
    multiply_add(x[2 * step + 1], a, other[2], other[3]);
  }
}

/// Writes the warp's 16 rows, from slot `first` on, of one head: x times factor[r], or 0 in rows without data. `stage` is
/// shared memory for the rows, of which nothing is needed any more; through it global memory is written 16 bytes at a time.
template <int D>
__device__ inline void store_rows(const AttentionSizes& sizes, const float (&x)[D / 8][4], const bool (&used)[2], const float (&factor)[2],
                                  bf16* stage, bf16* rows, int first, int count) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  __syncwarp();
#pragma unroll
  for (int n = 0; n < D / 8; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float left = used[r] ? x[n][2 * r] * factor[r] : 0, right = used[r] ? x[n][2 * r + 1] * factor[r] : 0;
      *reinterpret_cast<__nv_bfloat162*>(stage + (lane / 4 + 8 * r) * kPitch<D> + n * 8 + lane % 4 * 2) = __floats2bfloat162_rn(left, right);
    }
  }
  __syncwarp();
  for (int piece = lane; piece < kWarpRows * D / 8; piece += 32) {
    const int row = piece / (D / 8), channel = piece % (D / 8) * 8;
    if (first + row >= count || channel >= sizes.depth) continue;
    bf16* to = rows + static_cast<std::int64_t>(first + row) * sizes.width + channel;
    const bf16* from = stage + row * kPitch<D> + channel;
    if (sizes.vectors) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    } else {
      for (int e = 0; e < min(8, sizes.depth - channel); ++e) to[e] = from[e];
    }
  }
}

/// out (N, Tq, A d) and lse (N, A, Tq) for one tile of queries, with a running maximum and sum per query.
template <int D>
__global__ void __launch_bounds__(kMmaThreads) attention_forward_mma_kernel(AttentionSizes sizes, const bf16* q, const bf16* k, const bf16* v,
                                                                            bf16* out, float* lse) {
  extern __shared__ __align__(16) unsigned char shared[];
  bf16* const q_tile = reinterpret_cast<bf16*>(shared);
  bf16* const stages = q_tile + kTileElements<D>;                                    // 2 x (K, V)
  int* const groups = reinterpret_cast<int*>(stages + 4 * kTileElements<D>);         // 2 x 64, of the keys
  const TileMeetings meetings(sizes, false, reinterpret_cast<unsigned char*>(groups + 2 * kTile));
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, first_row = thread / 32 * kWarpRows;
  const bf16* const k_rows = k + meetings.rows(sizes, sizes.keys);
  const bf16* const v_rows = v + meetings.rows(sizes, sizes.keys);
  const auto load = [&](int tile, int stage) {
    bf16* const to = stages + stage * 2 * kTileElements<D>;
    load_tiles<D, 2>(sizes, tile, sizes.keys, {k_rows, v_rows}, {to, to + kTileElements<D>});
    if (thread < kTile) groups[stage * kTile + thread] = key_group(sizes, tile * kTile + thread);
  };

  load_tiles<D, 1>(sizes, meetings.tile, sizes.queries, {q + meetings.rows(sizes, sizes.queries)}, {q_tile});
  wait_for_copies();
  __syncthreads();
  const OwnRows<D> own_q(q_tile + first_row * kPitch<D>);
  const int first = meetings.tile * kTile + first_row;
  const int own_group[2] = {query_group(sizes, first + lane / 4), query_group(sizes, first + lane / 4 + 8)};
  const float scale_log2 = sizes.scale * kLog2e;
  float largest[2] = {-INFINITY, -INFINITY}, sum[2] = {}, shift[2] = {}, total[D / 8][4] = {};   // shift: the maximum times scale_log2
  int tile = meetings.next(0), stage = 0;
  if (meetings.valid(tile)) load(tile, stage);
  for (int next; meetings.valid(tile); tile = next, stage ^= 1) {
    wait_for_copies();
    __syncthreads();   // this tile is there, and nobody needs the one before
    next = meetings.next(tile + 1);
    if (meetings.valid(next)) load(next, stage ^ 1);
    const bf16* const k_tile = stages + stage * 2 * kTileElements<D>;
    const bf16* const v_tile = k_tile + kTileElements<D>;
    float scores[4][2][4];   // (16, 64)
#pragma unroll
    for (int part = 0; part < 4; ++part) multiply_rows<D>(scores[part], own_q, k_tile + part * 16 * kPitch<D>);
    if (meetings.is_masked(tile)) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const int2 other = *reinterpret_cast<const int2*>(groups + stage * kTile + n * 8 + lane % 4 * 2);
        float(&x)[4] = scores[n / 2][n % 2];
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = may_look(own_group[i / 2], i % 2 ? other.y : other.x) ? x[i] : -INFINITY;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float bound = largest[r];
#pragma unroll
      for (int n = 0; n < 8; ++n) bound = fmaxf(bound, fmaxf(scores[n / 2][n % 2][2 * r], scores[n / 2][n % 2][2 * r + 1]));
      bound = fmaxf(bound, __shfl_xor_sync(0xffffffffU, bound, 1));
      bound = fmaxf(bound, __shfl_xor_sync(0xffffffffU, bound, 2));
      shift[r] = bound == -INFINITY ? 0 : bound * scale_log2;   // no allowed key yet: not -inf - -inf
      const float shrink = fast_exp2(fmaf(largest[r], scale_log2, -shift[r]));
      largest[r] = bound;
      sum[r] *= shrink;
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
        total[n][2 * r] *= shrink;
        total[n][2 * r + 1] *= shrink;
      }
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int i = 2 * r; i < 2 * r + 2; ++i) {
          float& x = scores[n / 2][n % 2][i];
          x = fast_exp2(fmaf(x, scale_log2, -shift[r]));
          sum[r] += x;
        }
      }
    }
#pragma unroll
    for (int part = 0; part < 4; ++part) add_weighted<D>(total, scores[part], v_tile + part * 16 * kPitch<D>);
  }

  bool used[2];
  float inverse[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sum[r] += __shfl_xor_sync(0xffffffffU, sum[r], 1);
    sum[r] += __shfl_xor_sync(0xffffffffU, sum[r], 2);
    used[r] = own_group[r] != kNoQuery && sum[r] != 0;
    inverse[r] = 1 / sum[r];
    const int slot = first + lane / 4 + 8 * r;
    float* const to = lse + meetings.statistics(sizes, sizes.queries) + slot;
    if (lane % 4 == 0 && slot < sizes.queries) *to = used[r] ? fmaf(shift[r], kLn2, logf(sum[r])) : 0;
  }
  store_rows<D>(sizes, total, used, inverse, q_tile + first_row * kPitch<D>, out + meetings.rows(sizes, sizes.queries), first, sizes.queries);
}

/// dk and dv (N, Tk, A d) for one tile of keys: transposed scores, rows keys and columns queries, recomputed from lse.
template <int D, bool kWantK, bool kWantV>
__global__ void __launch_bounds__(kMmaThreads) attention_dkv_mma_kernel(AttentionSizes sizes, const bf16* dout, const bf16* q, const bf16* k,
                                                                        const bf16* v, const float* lse, const float* delta, bf16* dk, bf16* dv) {
  extern __shared__ __align__(16) unsigned char shared[];
  bf16* const k_tile = reinterpret_cast<bf16*>(shared);
  bf16* const v_tile = k_tile + kTileElements<D>;
  bf16* const stages = v_tile + kTileElements<D>;                                    // 2 x (Q, dout)
  float* const statistics = reinterpret_cast<float*>(stages + 4 * kTileElements<D>); // 2 x (lse, delta) x 64
  int* const groups = reinterpret_cast<int*>(statistics + 4 * kTile);                // 2 x 64, of the queries
  const TileMeetings meetings(sizes, true, reinterpret_cast<unsigned char*>(groups + 2 * kTile));
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, first_row = thread / 32 * kWarpRows;
  const std::int64_t own_rows = meetings.rows(sizes, sizes.keys), other_rows = meetings.rows(sizes, sizes.queries);
  const std::int64_t other_statistics = meetings.statistics(sizes, sizes.queries);
  const auto load = [&](int tile, int stage) {
    bf16* const to = stages + stage * 2 * kTileElements<D>;
    load_tiles<D, 2>(sizes, tile, sizes.queries, {q + other_rows, dout + other_rows}, {to, to + kTileElements<D>});
    const int column = thread % kTile, slot = tile * kTile + column;
    const bool exists = slot < sizes.queries;
    const std::int64_t from = other_statistics + (exists ? slot : 0);
    if (thread < kTile) {
      copy_4(statistics + stage * 2 * kTile + column, lse + from, exists);
      groups[stage * kTile + column] = query_group(sizes, slot);
    } else if (kWantK) {
      copy_4(statistics + (stage * 2 + 1) * kTile + column, delta + from, exists);
    }
  };

  load_tiles<D, 2>(sizes, meetings.tile, sizes.keys, {k + own_rows, v + own_rows}, {k_tile, v_tile});
  wait_for_copies();
  __syncthreads();
  const OwnRows<D> own_k(k_tile + first_row * kPitch<D>), own_v(v_tile + first_row * kPitch<D>);
  const int first = meetings.tile * kTile + first_row;
  const int own_group[2] = {key_group(sizes, first + lane / 4), key_group(sizes, first + lane / 4 + 8)};
  const float scale_log2 = sizes.scale * kLog2e;
  float dk_total[D / 8][4] = {}, dv_total[D / 8][4] = {};
  int tile = meetings.next(0), stage = 0;
  if (meetings.valid(tile)) load(tile, stage);
  for (int next; meetings.valid(tile); tile = next, stage ^= 1) {
    wait_for_copies();
    __syncthreads();   // this tile is there, and nobody needs the one before
    next = meetings.next(tile + 1);
    if (meetings.valid(next)) load(next, stage ^ 1);
    const bool masked = meetings.is_masked(tile);
#pragma unroll
    for (int part = 0; part < 4; ++part) {   // 16 queries
      const bf16* const q_rows = stages + stage * 2 * kTileElements<D> + part * 16 * kPitch<D>;
      const bf16* const dout_rows = q_rows + kTileElements<D>;
      float weights[2][4], dscores[2][4];
      multiply_rows<D>(weights, own_k, q_rows);
      if constexpr (kWantK) multiply_rows<D>(dscores, own_v, dout_rows);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int column = part * 16 + n * 8 + lane % 4 * 2;
        const float2 log_sum = *reinterpret_cast<const float2*>(statistics + stage * 2 * kTile + column);
        const float2 mean = kWantK ? *reinterpret_cast<const float2*>(statistics + (stage * 2 + 1) * kTile + column) : float2{};
        const int2 other = *reinterpret_cast<const int2*>(groups + stage * kTile + column);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float shift = (i % 2 ? log_sum.y : log_sum.x) * kLog2e;
          const bool allowed = !masked || may_look(i % 2 ? other.y : other.x, own_group[i / 2]);
          weights[n][i] = allowed ? fast_exp2(fmaf(weights[n][i], scale_log2, -shift)) : 0;
          if constexpr (kWantK) dscores[n][i] = allowed ? weights[n][i] * (dscores[n][i] - (i % 2 ? mean.y : mean.x)) : 0;
        }
      }
      if constexpr (kWantV) add_weighted<D>(dv_total, weights, dout_rows);
      if constexpr (kWantK) add_weighted<D>(dk_total, dscores, q_rows);
    }
  }
  const bool used[2] = {own_group[0] != kNoKey, own_group[1] != kNoKey};
  bf16* const stage_rows = k_tile + first_row * kPitch<D>;
  if constexpr (kWantK) store_rows<D>(sizes, dk_total, used, {sizes.scale, sizes.scale}, stage_rows, dk + own_rows, first, sizes.keys);
  if constexpr (kWantV) store_rows<D>(sizes, dv_total, used, {1, 1}, stage_rows, dv + own_rows, first, sizes.keys);
}

/// dq (N, Tq, A d) for one tile of queries.
template <int D>
__global__ void __launch_bounds__(kMmaThreads) attention_dq_mma_kernel(AttentionSizes sizes, const bf16* dout, const bf16* q, const bf16* k,
                                                                       const bf16* v, const float* lse, const float* delta, bf16* dq) {
  extern __shared__ __align__(16) unsigned char shared[];
  bf16* const q_tile = reinterpret_cast<bf16*>(shared);
  bf16* const dout_tile = q_tile + kTileElements<D>;
  bf16* const stages = dout_tile + kTileElements<D>;                                 // 2 x (K, V)
  int* const groups = reinterpret_cast<int*>(stages + 4 * kTileElements<D>);         // 2 x 64, of the keys
  const TileMeetings meetings(sizes, false, reinterpret_cast<unsigned char*>(groups + 2 * kTile));
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, first_row = thread / 32 * kWarpRows;
  const std::int64_t own_rows = meetings.rows(sizes, sizes.queries), other_rows = meetings.rows(sizes, sizes.keys);
  const auto load = [&](int tile, int stage) {
    bf16* const to = stages + stage * 2 * kTileElements<D>;
    load_tiles<D, 2>(sizes, tile, sizes.keys, {k + other_rows, v + other_rows}, {to, to + kTileElements<D>});
    if (thread < kTile) groups[stage * kTile + thread] = key_group(sizes, tile * kTile + thread);
  };

  load_tiles<D, 2>(sizes, meetings.tile, sizes.queries, {q + own_rows, dout + own_rows}, {q_tile, dout_tile});
  wait_for_copies();
  __syncthreads();
  const OwnRows<D> own_q(q_tile + first_row * kPitch<D>), own_dout(dout_tile + first_row * kPitch<D>);
  const int first = meetings.tile * kTile + first_row;
  int own_group[2];
  float shift[2], mean[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int slot = first + lane / 4 + 8 * r;
    const std::int64_t place = meetings.statistics(sizes, sizes.queries) + slot;
    own_group[r] = query_group(sizes, slot);
    shift[r] = slot < sizes.queries ? lse[place] * kLog2e : 0;
    mean[r] = slot < sizes.queries ? delta[place] : 0;
  }
  const float scale_log2 = sizes.scale * kLog2e;
  float total[D / 8][4] = {};
  int tile = meetings.next(0), stage = 0;
  if (meetings.valid(tile)) load(tile, stage);
  for (int next; meetings.valid(tile); tile = next, stage ^= 1) {
    wait_for_copies();
    __syncthreads();   // this tile is there, and nobody needs the one before
    next = meetings.next(tile + 1);
    if (meetings.valid(next)) load(next, stage ^ 1);
    const bool masked = meetings.is_masked(tile);
#pragma unroll
    for (int part = 0; part < 4; ++part) {   // 16 keys
      const bf16* const k_rows = stages + stage * 2 * kTileElements<D> + part * 16 * kPitch<D>;
      float weights[2][4], dscores[2][4];
      multiply_rows<D>(weights, own_q, k_rows);
      multiply_rows<D>(dscores, own_dout, k_rows + kTileElements<D>);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int2 other = *reinterpret_cast<const int2*>(groups + stage * kTile + part * 16 + n * 8 + lane % 4 * 2);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const bool allowed = !masked || may_look(own_group[i / 2], i % 2 ? other.y : other.x);
          const float weight = fast_exp2(fmaf(weights[n][i], scale_log2, -shift[i / 2]));
          dscores[n][i] = allowed ? weight * (dscores[n][i] - mean[i / 2]) : 0;
        }
      }
      add_weighted<D>(total, dscores, k_rows);
    }
  }
  const bool used[2] = {own_group[0] != kNoQuery, own_group[1] != kNoQuery};
  store_rows<D>(sizes, total, used, {sizes.scale, sizes.scale}, q_tile + first_row * kPitch<D>, dq + own_rows, first, sizes.queries);
}

/// Bytes of dynamic shared memory for `tiles` tiles, `words` of 4 bytes, and a byte for each tile of the other side.
template <int D>
std::size_t mma_shared_bytes(int tiles, int words, int other_slots) {
  return static_cast<std::size_t>(tiles * kTileElements<D> * 2 + words * 4 + tiles_of(other_slots));
}

}  // namespace
}  // namespace detr::kernels::cuda
