#pragma once
#include <climits>

#include "kernels/attention.h"
#include "kernels/cuda/launch.cuh"

// What the f32 and the bf16 kernels of attention share: sizes, and which tiles of queries and keys meet under the denoising mask.

namespace detr::kernels::cuda {
namespace {

constexpr int kTile = 64;       // slots of a tile, of queries as of keys
constexpr int kNoQuery = -2;    // group of a query that looks at nothing: a padding slot, or beyond the end
constexpr int kNoKey = -3;      // of a key that nobody looks at; another value, so that equal groups may always look
constexpr float kLog2e = 1.4426950408889634F, kLn2 = 0.6931471805599453F;

/// Sizes and mask of one call.
struct AttentionSizes {
  int queries, keys;            // Tq, Tk
  int heads, depth, width;      // A, d, A d
  const std::int64_t* groups;   // (T) or null
  float scale;                  // 1 / sqrt(d)
  bool vectors;                 // all tensors may be accessed 16 bytes at a time
};

constexpr int tiles_of(int slots) { return slots / kTile + (slots % kTile != 0); }

/// Group of a query slot.
__device__ inline int query_group(const AttentionSizes& sizes, int slot) {
  if (slot >= sizes.queries) return kNoQuery;
  return sizes.groups ? static_cast<int>(sizes.groups[slot]) : static_cast<int>(kOrdinaryQuery);
}
/// Group of a key slot.
__device__ inline int key_group(const AttentionSizes& sizes, int slot) {
  if (slot >= sizes.keys) return kNoKey;
  if (!sizes.groups) return static_cast<int>(kOrdinaryQuery);
  return sizes.groups[slot] == kPaddingSlot ? kNoKey : static_cast<int>(sizes.groups[slot]);
}
/// Whether a query may look at a key. True also for a padding slot that looks at an ordinary key: its row is discarded.
__device__ inline bool may_look(int query, int key) { return key == static_cast<int>(kOrdinaryQuery) || key == query; }
/// Whether there is data in slot `slot` of `count`.
__device__ inline bool is_used(const AttentionSizes& sizes, int slot, int count) {
  return slot < count && !(sizes.groups && sizes.groups[slot] == kPaddingSlot);
}

/// The groups in one tile.
struct TileGroups {
  int low, high;                    // range of its denoising groups; low > high without any
  bool any_ordinary, all_ordinary;  // among its slots, padding and those beyond the end included
};

/// Called by a whole warp.
__device__ inline TileGroups tile_groups(const AttentionSizes& sizes, int tile, int count) {
  if (!sizes.groups) return {INT_MAX, INT_MIN, tile * kTile < count, count - tile * kTile >= kTile};
  TileGroups result{INT_MAX, INT_MIN, false, true};
  for (int slot = tile * kTile + static_cast<int>(threadIdx.x) % 32, end = slot + kTile; slot < end; slot += 32) {
    const int group = is_used(sizes, slot, count) ? static_cast<int>(sizes.groups[slot]) : kNoKey;
    const bool ordinary = group == static_cast<int>(kOrdinaryQuery), denoising = !ordinary && group != kNoKey;
    result.low = min(result.low, __reduce_min_sync(0xffffffffU, denoising ? group : INT_MAX));
    result.high = max(result.high, __reduce_max_sync(0xffffffffU, denoising ? group : INT_MIN));
    result.any_ordinary = __any_sync(0xffffffffU, ordinary) || result.any_ordinary;
    result.all_ordinary = __all_sync(0xffffffffU, ordinary) && result.all_ordinary;
  }
  return result;
}

/// How a tile of queries meets a tile of keys: not at all, under the mask, or each query with each key.
enum Meeting : unsigned char { kSkip, kMasked, kOpen };

__device__ inline Meeting meeting(const TileGroups& queries, const TileGroups& keys) {
  if (!queries.any_ordinary && queries.low > queries.high) return kSkip;   // nothing but padding
  if (keys.all_ordinary) return kOpen;
  const bool share = max(queries.low, keys.low) <= min(queries.high, keys.high);
  return keys.any_ordinary || share ? kMasked : kSkip;
}

/// One tile of one head of one image, which a block works on, and how it meets the tiles of the other side.
class TileMeetings {
 public:
  int image, head, tile;

  /// `own_are_keys`: the block has a tile of keys. `kinds` is shared memory for a byte per tile of the other side. Ends with the
  /// block in step.
  __device__ TileMeetings(const AttentionSizes& sizes, bool own_are_keys, unsigned char* kinds) : kinds_(kinds) {
    const int own_count = own_are_keys ? sizes.keys : sizes.queries, other_count = own_are_keys ? sizes.queries : sizes.keys;
    const int own_tiles = tiles_of(own_count), block = static_cast<int>(blockIdx.x), plane = block / own_tiles;
    tile = block % own_tiles;
    image = plane / sizes.heads;
    head = plane % sizes.heads;
    others_ = tiles_of(other_count);
    const TileGroups own = tile_groups(sizes, tile, own_count);
    for (int i = static_cast<int>(threadIdx.x) / 32; i < others_; i += static_cast<int>(blockDim.x) / 32) {
      const TileGroups other = tile_groups(sizes, i, other_count);
      if (threadIdx.x % 32 == 0) kinds_[i] = own_are_keys ? meeting(other, own) : meeting(own, other);
    }
    __syncthreads();
  }

  /// The first tile of the other side, from `from` on, that is not to be skipped; valid() tells whether there is one.
  __device__ int next(int from) const {
    while (from < others_ && kinds_[from] == kSkip) ++from;
    return from;
  }
  __device__ bool valid(int other) const { return other < others_; }
  __device__ bool is_masked(int other) const { return kinds_[other] == kMasked; }

  /// Where the rows of this head and image begin in a tensor (N, count, A d).
  __device__ std::int64_t rows(const AttentionSizes& sizes, int count) const {
    return static_cast<std::int64_t>(image) * count * sizes.width + head * sizes.depth;
  }
  /// Where they begin in a tensor (N, A, count).
  __device__ std::int64_t statistics(const AttentionSizes& sizes, int count) const {
    return (static_cast<std::int64_t>(image) * sizes.heads + head) * count;
  }

 private:
  unsigned char* kinds_;
  int others_;
};

}  // namespace
}  // namespace detr::kernels::cuda
