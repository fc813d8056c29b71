#include "kernels/deformable_attention.h"

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 takes the deliberately undefined registers of its own AVX-512 intrinsics for a mistake (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
// The stream's pool spreads the work; Eigen must not start threads of its own.
#define EIGEN_DONT_PARALLELIZE
#include <Eigen/Core>
#include <algorithm>
#include <array>
#include <cmath>
#include <type_traits>
#include <vector>

#include "kernels/dispatch.h"

namespace detr::kernels::cpu {
namespace {

constexpr std::int64_t kOutside = -1;

/// One of the P sampling points.
template <class T>
struct Slot {
  std::int64_t h, w, first;   // its level's map and that map's first token
  T per_point;                // 1 / points of the level
};

template <class T>
std::vector<Slot<T>> slots_of(const DeformableOptions& options) {
  std::vector<Slot<T>> slots;
  std::int64_t first = 0;
  for (std::size_t i = 0; i < options.levels.size(); ++i) {
    const auto [h, w] = options.levels[i];
    for (std::int64_t k = 0; k < options.points[i]; ++k) slots.push_back({h, w, first, 1 / static_cast<T>(options.points[i])});
    first += h * w;
  }
  return slots;
}

/// Where a point samples: the tokens at (t0, u0), (t0, u0 + 1), (t0 + 1, u0), (t0 + 1, u0 + 1), or kOutside, and their weights.
template <class T>
struct Corners {
  std::array<std::int64_t, 4> token{kOutside, kOutside, kOutside, kOutside};
  std::array<T, 4> weight{};
  T fu = 0, ft = 0;   // fractions towards u0 + 1 and t0 + 1
};

template <class T>
Corners<T> bilinear_corners(const Slot<T>& slot, T x, T y) {
  Corners<T> corners;
  const T u = x * static_cast<T>(slot.w) - T(0.5), t = y * static_cast<T>(slot.h) - T(0.5);
  // In floating point, so that NaN and what no integer holds end here as well.
  if (!(u > -1 && u < static_cast<T>(slot.w) && t > -1 && t < static_cast<T>(slot.h))) return corners;
  const T u_floor = std::floor(u), t_floor = std::floor(t);
  const auto u0 = static_cast<std::int64_t>(u_floor), t0 = static_cast<std::int64_t>(t_floor);
  corners.fu = u - u_floor;
  corners.ft = t - t_floor;
  const T gu = 1 - corners.fu, gt = 1 - corners.ft;
  corners.weight = {gt * gu, gt * corners.fu, corners.ft * gu, corners.ft * corners.fu};
  const std::int64_t token = slot.first + t0 * slot.w + u0;
  const bool left = u0 >= 0, right = u0 + 1 < slot.w, top = t0 >= 0, bottom = t0 + 1 < slot.h;
  corners.token = {top && left ? token : kOutside, top && right ? token + 1 : kOutside, bottom && left ? token + slot.w : kOutside,
                   bottom && right ? token + slot.w + 1 : kOutside};
  return corners;
}

/// Clamped before the conversion, which is undefined for what no integer holds.
template <class T>
std::int64_t clamped_cell(T coordinate, std::int64_t last) {
  return static_cast<std::int64_t>(std::clamp(coordinate, T(0), static_cast<T>(last)));
}

template <class T>
Corners<T> discrete_cell(const Slot<T>& slot, T x, T y) {
  Corners<T> corners;
  if (!std::isfinite(x) || !std::isfinite(y)) return corners;
  const std::int64_t column = clamped_cell(x * static_cast<T>(slot.w) + T(0.5), std::min(slot.h, slot.w) - 1);
  const std::int64_t row = clamped_cell(y * static_cast<T>(slot.h) + T(0.5), slot.h - 1);
  corners.token[0] = slot.first + row * slot.w + column;
  corners.weight[0] = 1;
  return corners;
}

/// Corners of a point from its box and its offset; rounds as the reference does, which decides at the edges of discrete cells.
template <class T>
Corners<T> corners_of(const DeformableOptions& options, const Slot<T>& slot, const T* box, const T* offset) {
  const T scale = static_cast<T>(options.offset_scale);
  const T x = box[0] + offset[0] * slot.per_point * box[2] * scale;
  const T y = box[1] + offset[1] * slot.per_point * box[3] * scale;
  return options.sampling == Sampling::bilinear ? bilinear_corners(slot, x, y) : discrete_cell(slot, x, y);
}

template <class T>
void softmax(const T* logits, std::int64_t count, T* weights) {
  const T largest = *std::max_element(logits, logits + count);
  T sum = 0;
  for (std::int64_t k = 0; k < count; ++k) sum += weights[k] = std::exp(logits[k] - largest);
  for (std::int64_t k = 0; k < count; ++k) weights[k] /= sum;
}

/// The sizes, and the channels of one head as Eigen arrays; Depth is d, or Eigen::Dynamic.
template <class T, int Depth>
struct Problem {
  using Channels = Eigen::Map<Eigen::Array<T, Depth, 1>>;
  using ConstChannels = Eigen::Map<const Eigen::Array<T, Depth, 1>>;

  const DeformableOptions& options;
  std::vector<Slot<T>> slots;
  std::int64_t images, queries, tokens, heads, points, depth;

  Problem(const Tensor& value, const Tensor& offsets, const DeformableOptions& opts)
      : options(opts), slots(slots_of<T>(opts)), images(value.dim(0)), queries(offsets.dim(1)), tokens(value.dim(1)),
        heads(opts.heads), points(static_cast<std::int64_t>(slots.size())), depth(value.dim(2) / heads) {}

  /// Channels of a token; `outside` stands for each token beyond the map.
  template <class U>
  U* channels(U* values, std::int64_t image, std::int64_t token, std::int64_t head, U* outside) const {
    return token == kOutside ? outside : values + ((image * tokens + token) * heads + head) * depth;
  }
};

template <class T, int Depth>
void forward(const Stream& stream, const Tensor& value, const Tensor& offsets, const Tensor& logits, const Tensor& reference,
             const DeformableOptions& options, Tensor& out) {
  const Problem<T, Depth> problem(value, offsets, options);
  using ConstChannels = typename Problem<T, Depth>::ConstChannels;
  const std::int64_t heads = problem.heads, points = problem.points, depth = problem.depth;
  const T* values = value.data<T>();
  stream.parallel_blocks(problem.images * problem.queries, 16, [&](std::int64_t begin, std::int64_t end) {
    const std::vector<T> zeros(static_cast<std::size_t>(depth), 0);
    std::vector<T> weights(static_cast<std::size_t>(points));
    for (std::int64_t row = begin; row < end; ++row) {   // of all images' queries
      const std::int64_t image = row / problem.queries;
      const T* box = reference.data<T>() + row * 4;
      for (std::int64_t head = 0; head < heads; ++head) {
        const std::int64_t first = (row * heads + head) * points;
        softmax(logits.data<T>() + first, points, weights.data());
        typename Problem<T, Depth>::Channels sum(out.data<T>() + (row * heads + head) * depth, depth);
        sum.setZero();
        for (std::int64_t k = 0; k < points; ++k) {
          const Corners<T> corners = corners_of(options, problem.slots[k], box, offsets.data<T>() + (first + k) * 2);
          const auto at = [&](std::size_t corner) {
            return ConstChannels(problem.channels(values, image, corners.token[corner], head, zeros.data()), depth);
          };
          sum += weights[k] * (corners.weight[0] * at(0) + corners.weight[1] * at(1) + corners.weight[2] * at(2) + corners.weight[3] * at(3));
        }
      }
    }
  });
}

/// All queries of one head of one image, in order.
template <class T, int Depth>
void backward_head(const Problem<T, Depth>& problem, std::int64_t image, std::int64_t head, const T* dout, const T* values,
                   const T* offsets, const T* logits, const T* reference, T* dvalues, T* doffsets, T* dlogits) {
  using Channels = typename Problem<T, Depth>::Channels;
  using ConstChannels = typename Problem<T, Depth>::ConstChannels;
  const std::int64_t points = problem.points, depth = problem.depth;
  const T scale = static_cast<T>(problem.options.offset_scale);
  const bool moves = problem.options.sampling == Sampling::bilinear;
  const std::vector<T> zeros(static_cast<std::size_t>(depth), 0);
  std::vector<T> sink(static_cast<std::size_t>(depth));   // takes what falls outside
  std::vector<T> weights(static_cast<std::size_t>(points)), dweights(static_cast<std::size_t>(points));
  for (std::int64_t query = 0; query < problem.queries; ++query) {
    const std::int64_t row = image * problem.queries + query;
    const std::int64_t first = (row * problem.heads + head) * points;
    const T* box = reference + row * 4;
    const ConstChannels g(dout + (row * problem.heads + head) * depth, depth);
    softmax(logits + first, points, weights.data());
    for (std::int64_t k = 0; k < points; ++k) {
      const Slot<T>& slot = problem.slots[k];
      const Corners<T> corners = corners_of(problem.options, slot, box, offsets + (first + k) * 2);
      if (dvalues) {
        for (std::size_t corner = 0; corner < 4; ++corner) {
          Channels(problem.channels(dvalues, image, corners.token[corner], head, sink.data()), depth) +=
              (weights[k] * corners.weight[corner]) * g;
        }
      }
      if (!doffsets && !dlogits) continue;
      std::array<T, 4> dot;   // of g with each corner's channels
      for (std::size_t corner = 0; corner < 4; ++corner) {
        const ConstChannels channels(problem.channels(values, image, corners.token[corner], head, zeros.data()), depth);
        dot[corner] = (g * channels).sum();
      }
      dweights[k] = corners.weight[0] * dot[0] + corners.weight[1] * dot[1] + corners.weight[2] * dot[2] + corners.weight[3] * dot[3];
      if (!doffsets) continue;
      const T du = (1 - corners.ft) * (dot[1] - dot[0]) + corners.ft * (dot[3] - dot[2]);
      const T dt = (1 - corners.fu) * (dot[2] - dot[0]) + corners.fu * (dot[3] - dot[1]);
      T* to = doffsets + (first + k) * 2;
      to[0] = moves ? weights[k] * du * static_cast<T>(slot.w) * slot.per_point * box[2] * scale : T(0);
      to[1] = moves ? weights[k] * dt * static_cast<T>(slot.h) * slot.per_point * box[3] * scale : T(0);
    }
    if (!dlogits) continue;
    T mean = 0;
    for (std::int64_t k = 0; k < points; ++k) mean += weights[k] * dweights[k];
    for (std::int64_t k = 0; k < points; ++k) dlogits[first + k] = weights[k] * (dweights[k] - mean);
  }
}

template <class T, int Depth>
void backward(const Stream& stream, const Tensor& dout, const Tensor& value, const Tensor& offsets, const Tensor& logits,
              const Tensor& reference, const DeformableOptions& options, Tensor* dvalue, Tensor* doffsets, Tensor* dlogits) {
  const Problem<T, Depth> problem(value, offsets, options);
  if (dvalue) {
    stream.parallel_blocks(dvalue->numel(), 1 << 16, [&](std::int64_t begin, std::int64_t end) {
      std::fill(dvalue->data<T>() + begin, dvalue->data<T>() + end, T(0));
    });
  }
  stream.parallel_blocks(problem.images * problem.heads, 1, [&](std::int64_t i, std::int64_t) {
    backward_head(problem, i / problem.heads, i % problem.heads, dout.data<T>(), value.data<T>(), offsets.data<T>(), logits.data<T>(),
                  reference.data<T>(), dvalue ? dvalue->data<T>() : nullptr, doffsets ? doffsets->data<T>() : nullptr,
                  dlogits ? dlogits->data<T>() : nullptr);
  });
}

/// Calls fn(TypeTag<T>, depth) with the depth of a head as a constant where it is the usual one, so that its loops are unrolled.
template <class F>
void dispatch_depth(const Tensor& value, const DeformableOptions& options, F&& fn) {
  dispatch_float("deformable_attention", value.dtype(), [&](auto tag) {
    if (value.dim(2) / options.heads == 32) fn(tag, std::integral_constant<int, 32>{});
    else fn(tag, std::integral_constant<int, Eigen::Dynamic>{});
  });
}

}  // namespace

void deformable_attention_forward(const Stream& stream, const Tensor& value, const Tensor& offsets, const Tensor& logits,
                                  const Tensor& reference, const DeformableOptions& options, Tensor& out) {
  dispatch_depth(value, options, [&](auto tag, auto depth) {
    forward<typename decltype(tag)::type, depth()>(stream, value, offsets, logits, reference, options, out);
  });
}

void deformable_attention_backward(const Stream& stream, const Tensor& dout, const Tensor& value, const Tensor& offsets,
                                   const Tensor& logits, const Tensor& reference, const DeformableOptions& options, Tensor* dvalue,
                                   Tensor* doffsets, Tensor* dlogits) {
  dispatch_depth(value, options, [&](auto tag, auto depth) {
    backward<typename decltype(tag)::type, depth()>(stream, dout, value, offsets, logits, reference, options, dvalue, doffsets, dlogits);
  });
}

}  // namespace detr::kernels::cpu
