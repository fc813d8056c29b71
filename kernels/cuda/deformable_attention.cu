#include "kernels/deformable_attention.h"

#include <algorithm>
#include <climits>
#include <cmath>

#include "kernels/cuda/deformable_backward.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/shared_memory.cuh"

namespace detr::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMostPoints = 512;

// A group of lanes has one (query, head), neighbouring groups the heads of a query. For each kLanes slots, a lane works out the sample
// of one; the group then goes through them, each lane reading its channels of the corners. Corners beyond the map are read at the
// nearest cell, so that no read waits for a branch, and count nothing.

/// The place of slot `slot` of a query whose box is (cx, cy, w, h). Rounds as the CPU does: no multiplication is fused with an addition,
/// since a cell may be decided by the last bit.
__device__ Sample place_of(const Geometry& g, const Level& level, const float (&box)[4], float dx, float dy) {
  const float x = __fadd_rn(box[0], __fmul_rn(__fmul_rn(__fmul_rn(dx, level.per_point), box[2]), g.scale));
  const float y = __fadd_rn(box[1], __fmul_rn(__fmul_rn(__fmul_rn(dy, level.per_point), box[3]), g.scale));
  const float w = static_cast<float>(level.w), h = static_cast<float>(level.h);
  Sample s{kNowhere, kNowhere, 0, 0, 0};
  if (g.discrete) {
    if (!isfinite(x) || !isfinite(y)) return s;
    const float u = __fadd_rn(__fmul_rn(x, w), 0.5F), t = __fadd_rn(__fmul_rn(y, h), 0.5F);
    s.u0 = static_cast<int>(fminf(fmaxf(u, 0.0F), fminf(h, w) - 1));
    s.t0 = static_cast<int>(fminf(fmaxf(t, 0.0F), h - 1));
    return s;
  }
  const float u = __fadd_rn(__fmul_rn(x, w), -0.5F), t = __fadd_rn(__fmul_rn(y, h), -0.5F);
  if (!(u > -1 && u < w && t > -1 && t < h)) return s;   // NaN as well
  const float u_floor = floorf(u), t_floor = floorf(t);
  s.u0 = static_cast<int>(u_floor);
  s.t0 = static_cast<int>(t_floor);
  s.fu = u - u_floor;
  s.ft = t - t_floor;
  return s;
}

__device__ int level_of(const Geometry& g, int slot) {
  int level = 0;
#pragma unroll
  for (int i = 1; i < kMaxLevels; ++i) level += slot >= g.level[i].first_slot;
  return level;
}

/// Where a lane's sample reads: elements from the image's first channel of the head to the upper left corner, and from there one cell
/// to the right and one down, 0 where the nearest cell is the same. Corners (t0, u0), (t0, u0 + 1), (t0 + 1, u0), (t0 + 1, u0 + 1).
struct Corners {
  int at = 0, right = 0, down = 0;
  bool inside[4] = {false, false, false, false};
  float weight[4] = {0, 0, 0, 0};   // 0 outside; without the slot's
};

__device__ Corners corners_of(const Level& level, const Sample& s, int stride) {
  const int u0 = max(s.u0, 0), u1 = min(max(s.u0 + 1, 0), level.w - 1), t0 = max(s.t0, 0), t1 = min(max(s.t0 + 1, 0), level.h - 1);
  Corners c;
  c.at = (level.first + t0 * level.w + u0) * stride;
  c.right = (u1 - u0) * stride;
  c.down = (t1 - t0) * level.w * stride;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int u = s.u0 + i % 2, t = s.t0 + i / 2;
    c.inside[i] = u >= 0 && u < level.w && t >= 0 && t < level.h;
    c.weight[i] = c.inside[i] ? corner_weight(s, i) : 0;
  }
  return c;
}

/// Sum and maximum over the group's lanes, the same bits in each.
template <class L>
__device__ float group_sum(float x) {
#pragma unroll
  for (int distance = L::kLanes / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(kAllLanes, x, distance);
  return x;
}
template <class L>
__device__ float group_max(float x) {
#pragma unroll
  for (int distance = L::kLanes / 2; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, distance));
  return x;
}

/// What a group of lanes knows of its (query, head).
template <class L>
struct Group {
  using T = typename L::T;
  int lane, image, query, head, stride;
  bool active;                     // groups past the last one repeat it and store nothing
  std::int64_t first, channels;    // its first slot among all logits; its first channel in out
  float box[4], largest, inverse;  // softmax: exp(logit - largest) * inverse

  __device__ Group(const Geometry& g, const T* logits, const float* reference) {
    const std::int64_t groups = static_cast<std::int64_t>(g.images) * g.queries * g.heads;
    const std::int64_t thread = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    active = thread / L::kLanes < groups;
    const std::int64_t index = active ? thread / L::kLanes : groups - 1;
    lane = static_cast<int>(threadIdx.x) % L::kLanes;
    const int row = static_cast<int>(index / g.heads);
    head = static_cast<int>(index - static_cast<std::int64_t>(row) * g.heads);
    image = row / g.queries;
    query = row - image * g.queries;
    stride = g.heads * depth_of<L>(g);
    first = index * g.points;
    channels = index * depth_of<L>(g);
#pragma unroll
    for (int i = 0; i < 4; ++i) box[i] = reference[static_cast<std::int64_t>(row) * 4 + i];
    largest = -INFINITY;
    for (int k = lane; k < g.points; k += L::kLanes) largest = fmaxf(largest, to_float(logits[first + k]));
    largest = group_max<L>(largest);
    float sum = 0;
    for (int k = lane; k < g.points; k += L::kLanes) sum += expf(to_float(logits[first + k]) - largest);
    inverse = 1 / group_sum<L>(sum);
  }

  /// Of a slot < P.
  __device__ float weight(const T* logits, int slot) const { return expf(to_float(logits[first + slot]) - largest) * inverse; }

  /// The sample of a slot; beyond P, nowhere with weight 0.
  __device__ Sample sample(const Geometry& g, const Level& level, const T* offsets, const T* logits, int slot) const {
    if (slot >= g.points) return {kNowhere, kNowhere, 0, 0, 0};
    const T* offset = offsets + (first + slot) * 2;
    Sample s = place_of(g, level, box, to_float(offset[0]), to_float(offset[1]));
    s.weight = weight(logits, slot);
    return s;
  }

  /// The image's values from the head's first channel.
  __device__ const T* values(const Geometry& g, const T* value) const {
    return value + static_cast<std::int64_t>(image) * g.tokens * stride + head * depth_of<L>(g);
  }
};

template <class L>
__global__ void __launch_bounds__(kThreads, 4)
    forward_kernel(const __grid_constant__ Geometry g, const typename L::T* __restrict__ value, const typename L::T* __restrict__ offsets,
                   const typename L::T* __restrict__ logits, const float* __restrict__ reference, typename L::T* __restrict__ out) {
  using T = typename L::T;
  constexpr int kTogether = 2;   // samples whose corners are read before the first is used
  const Group<L> group(g, logits, reference);
  const int depth = depth_of<L>(g);
  for (int slice = 0; slice < depth; slice += L::kLanes * L::kVec) {
    const int channel = slice + group.lane * L::kVec;
    const T* values = group.values(g, value) + min(channel, depth - L::kVec);   // lanes beyond the channels store nothing
    float sum[L::kVec] = {};
    for (int base = 0; base < g.points; base += L::kLanes) {
      const int slot = base + group.lane;
      const Level& level = g.level[level_of(g, slot)];
      const Sample s = group.sample(g, level, offsets, logits, slot);
      Corners c = corners_of(level, s, group.stride);
#pragma unroll
      for (float& weight : c.weight) weight *= s.weight;
#pragma unroll
      for (int j = 0; j < L::kLanes; j += kTogether) {
        if (base + j >= g.points) continue;   // in all lanes
        float x[kTogether][4][L::kVec];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const T* at = values + __shfl_sync(kAllLanes, c.at, j + i, L::kLanes);
          const int right = __shfl_sync(kAllLanes, c.right, j + i, L::kLanes), down = __shfl_sync(kAllLanes, c.down, j + i, L::kLanes);
          load_channels<L>(at, x[i][0]);
          load_channels<L>(at + right, x[i][1]);
          load_channels<L>(at + down, x[i][2]);
          load_channels<L>(at + down + right, x[i][3]);
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
#pragma unroll
          for (int corner = 0; corner < 4; ++corner) {
            const float weight = __shfl_sync(kAllLanes, c.weight[corner], j + i, L::kLanes);
#pragma unroll
            for (int e = 0; e < L::kVec; ++e) sum[e] += weight * x[i][corner][e];
          }
        }
      }
    }
    if (group.active && channel < depth) store_channels<L>(out + group.channels + channel, sum);
  }
}

/// Dot products dot[j][corner] of slot j of the lanes' own channels, summed over the lanes: lane j keeps those of slot j, in dot[0].
template <int Half, int Lanes>
__device__ void sum_to_owners(float (&dot)[Lanes][4], int lane) {
  const bool upper = (lane & Half) != 0;
#pragma unroll
  for (int j = 0; j < Half; ++j) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float give = upper ? dot[j][c] : dot[j + Half][c], keep = upper ? dot[j + Half][c] : dot[j][c];
      dot[j][c] = keep + __shfl_xor_sync(kAllLanes, give, Half);
    }
  }
  if constexpr (Half > 1) sum_to_owners<Half / 2>(dot, lane);
}

/// doffsets, dlogits and the samples' records, [image][head][level][query][point]; each may be null. Shared memory: a float for each
/// thread and each kLanes slots.
template <class L>
__global__ void __launch_bounds__(kThreads, 3)
    points_kernel(const __grid_constant__ Geometry g, const typename L::T* __restrict__ dout, const typename L::T* __restrict__ value,
                  const typename L::T* __restrict__ offsets, const typename L::T* __restrict__ logits, const float* __restrict__ reference,
                  typename L::T* __restrict__ doffsets, typename L::T* __restrict__ dlogits, Record* __restrict__ records) {
  using T = typename L::T;
  extern __shared__ float dweights[];
  constexpr int kTogether = 2;
  const bool wants_dots = doffsets != nullptr || dlogits != nullptr;
  const Group<L> group(g, logits, reference);
  const int depth = depth_of<L>(g);
  float* const own_dweights = dweights + threadIdx.x;
  float mean = 0;
  for (int base = 0; base < g.points; base += L::kLanes) {
    const int slot = base + group.lane;
    const Level& level = g.level[level_of(g, slot)];
    const Sample s = group.sample(g, level, offsets, logits, slot);
    const bool stores = group.active && slot < g.points;
    if (records != nullptr && stores) {
      const std::int64_t first = (static_cast<std::int64_t>(group.image) * g.heads + group.head) * g.points + level.first_slot;
      records[first * g.queries + group.query * level.points + slot - level.first_slot] = record_of(s);
    }
    if (!wants_dots) continue;
    const Corners c = corners_of(level, s, group.stride);
    float dot[L::kLanes][4] = {};
    for (int slice = 0; slice < depth; slice += L::kLanes * L::kVec) {
      const int channel = slice + group.lane * L::kVec, readable = min(channel, depth - L::kVec);
      const T* values = group.values(g, value) + readable;
      float grad[L::kVec];
      load_channels<L>(dout + group.channels + readable, grad);
      if (channel >= depth) grad[0] = 0;   // only where kVec is 1
#pragma unroll
      for (int j = 0; j < L::kLanes; j += kTogether) {
        if (base + j >= g.points) continue;   // in all lanes
        float x[kTogether][4][L::kVec];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const T* at = values + __shfl_sync(kAllLanes, c.at, j + i, L::kLanes);
          const int right = __shfl_sync(kAllLanes, c.right, j + i, L::kLanes), down = __shfl_sync(kAllLanes, c.down, j + i, L::kLanes);
          load_channels<L>(at, x[i][0]);
          load_channels<L>(at + right, x[i][1]);
          load_channels<L>(at + down, x[i][2]);
          load_channels<L>(at + down + right, x[i][3]);
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
#pragma unroll
          for (int corner = 0; corner < 4; ++corner) {
#pragma unroll
            for (int e = 0; e < L::kVec; ++e) dot[j + i][corner] += grad[e] * x[i][corner][e];
          }
        }
      }
    }
    sum_to_owners<L::kLanes / 2>(dot, group.lane);
    float d[4];
    float dweight = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      d[i] = c.inside[i] ? dot[0][i] : 0;
      dweight += c.weight[i] * d[i];
    }
    own_dweights[base / L::kLanes * kThreads] = dweight;
    mean += s.weight * dweight;
    if (doffsets == nullptr || !stores) continue;
    const float du = (1 - s.ft) * (d[1] - d[0]) + s.ft * (d[3] - d[2]), dt = (1 - s.fu) * (d[2] - d[0]) + s.fu * (d[3] - d[1]);
    const float per_unit = s.weight * level.per_point * g.scale;
    T* to = doffsets + (group.first + slot) * 2;
    to[0] = from_float<T>(g.discrete ? 0 : per_unit * du * static_cast<float>(level.w) * group.box[2]);
    to[1] = from_float<T>(g.discrete ? 0 : per_unit * dt * static_cast<float>(level.h) * group.box[3]);
  }
  if (dlogits == nullptr) return;
  mean = group_sum<L>(mean);
  if (!group.active) return;
  for (int slot = group.lane; slot < g.points; slot += L::kLanes) {
    const float dweight = own_dweights[slot / L::kLanes * kThreads];
    dlogits[group.first + slot] = from_float<T>(group.weight(logits, slot) * (dweight - mean));
  }
}

/// Checks the limits of the kernels as well.
Geometry geometry_of(const Tensor& value, const Tensor& offsets, const DeformableOptions& options) {
  const std::int64_t images = value.dim(0), tokens = value.dim(1), queries = offsets.dim(1);
  DETR_CHECK(options.levels.size() <= kMaxLevels, "deformable_attention: CUDA takes at most ", kMaxLevels, " levels, got ", options.levels.size());
  Geometry g{};
  g.images = static_cast<int>(images);
  g.queries = static_cast<int>(queries);
  g.tokens = static_cast<int>(tokens);
  g.heads = static_cast<int>(options.heads);
  g.depth = static_cast<int>(value.dim(2) / options.heads);
  g.scale = static_cast<float>(options.offset_scale);
  g.discrete = options.sampling == Sampling::discrete;
  for (Level& level : g.level) level = {1, 1, 0, INT_MAX, 1, 1, 0};
  std::int64_t first = 0, slots = 0;
  for (std::size_t i = 0; i < options.levels.size(); ++i) {
    const auto [h, w] = options.levels[i];
    const std::int64_t points = options.points[i];
    DETR_CHECK(h <= SHRT_MAX && w <= SHRT_MAX, "deformable_attention: level ", i, " is too large for CUDA: ", h, " x ", w);
    slots += points;
    DETR_CHECK(slots <= kMostPoints, "deformable_attention: CUDA takes at most ", kMostPoints, " points");
    // Division by multiplication is exact below 2^32 / points.
    DETR_CHECK(queries * points * points < (std::int64_t{1} << 31), "deformable_attention: too many queries for CUDA: ", queries);
    const std::uint64_t reciprocal = ((std::uint64_t{1} << 32) + static_cast<std::uint64_t>(points) - 1) / static_cast<std::uint64_t>(points);
    g.level[i] = {static_cast<int>(h),      static_cast<int>(w),      static_cast<int>(first), g.points,
                  static_cast<int>(points), 1.0F / static_cast<float>(points), points == 1 ? 0U : static_cast<unsigned>(reciprocal)};
    first += h * w;
    g.points = static_cast<int>(slots);
  }
  DETR_CHECK(tokens * value.dim(2) <= INT_MAX && images * queries <= INT_MAX && images * options.heads <= INT_MAX,
             "deformable_attention: value ", value, " with ", queries, " queries is too large for 32-bit indices");
  DETR_CHECK(g.depth <= 1 << 16, "deformable_attention: CUDA takes heads of at most 65536 channels");
  return g;
}

/// Calls fn with the Layout for heads of 32 channels if all of `places`, null or the start of rows of a token's channels, are fit for it.
template <class F>
void dispatch_layout(const Tensor& value, const DeformableOptions& options, std::initializer_list<const void*> places, F&& fn) {
  dispatch_float("deformable_attention", value.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const bool fits = value.dim(2) / options.heads == 32 &&
                      std::all_of(places.begin(), places.end(), [](const void* place) { return fits_vectors<T>(place, 32); });
    if (fits) fn(Layout<T, kVector<T>, 32 / kVector<T>, 32>{});
    else fn(Layout<T, 1, 8, 0>{});
  });
}

template <class L>
unsigned group_blocks(const Geometry& g) {
  return blocks_for(static_cast<std::int64_t>(g.images) * g.queries * g.heads * L::kLanes, kThreads);
}

}  // namespace

void deformable_attention_forward(const Stream& stream, const Tensor& value, const Tensor& offsets, const Tensor& logits,
                                  const Tensor& reference, const DeformableOptions& options, Tensor& out) {
  const Geometry g = geometry_of(value, offsets, options);
  dispatch_layout(value, options, {value.raw(), out.raw()}, [&](auto layout) {
    using L = decltype(layout);
    using T = typename L::T;
    launch(stream, forward_kernel<L>, dim3(group_blocks<L>(g)), dim3(kThreads), 0, g, value.data<T>(), offsets.data<T>(), logits.data<T>(),
           reference.data<float>(), out.data<T>());
  });
}

void deformable_attention_backward(const Stream& stream, const Tensor& dout, const Tensor& value, const Tensor& offsets,
                                   const Tensor& logits, const Tensor& reference, const DeformableOptions& options, Tensor* dvalue,
                                   Tensor* doffsets, Tensor* dlogits) {
  if (!dvalue && !doffsets && !dlogits) return;
  const Geometry g = geometry_of(value, offsets, options);
  // The same layout whatever is wanted, so that the same bits come out.
  dispatch_layout(value, options, {dout.raw(), value.raw(), dvalue ? dvalue->raw() : nullptr}, [&](auto layout) {
    using L = decltype(layout);
    using T = typename L::T;
    Tensor records;   // of all samples
    Record* record = nullptr;
    if (dvalue) {
      records = stream.empty({logits.numel() * static_cast<std::int64_t>(sizeof(Record))}, DType::u8);
      record = static_cast<Record*>(records.raw());
    }
    const std::size_t shared = static_cast<std::size_t>((g.points + L::kLanes - 1) / L::kLanes * kThreads) * sizeof(float);
    allow_shared(stream, "deformable_attention", points_kernel<L>, shared);
    launch(stream, points_kernel<L>, dim3(group_blocks<L>(g)), dim3(kThreads), shared, g, dout.data<T>(), value.data<T>(), offsets.data<T>(),
           logits.data<T>(), reference.data<float>(), doffsets ? doffsets->data<T>() : nullptr, dlogits ? dlogits->data<T>() : nullptr, record);
    if (dvalue) value_gradient<L>(stream, g, options, record, dout, *dvalue);
  });
}

}  // namespace detr::kernels::cuda
