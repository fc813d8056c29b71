#include "kernels/topk.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "kernels/dispatch.h"

namespace detr::kernels::cpu {
namespace {

template <class T>
T larger(T a, T b) {
  // Without a branch. The first comparison fails for a NaN on either side; the second keeps one that is in `a`.
  return static_cast<int>(!(b <= a)) & static_cast<int>(a == a) ? b : a;
}

template <class T>
T largest(const T* x, std::int64_t count) {
  constexpr std::int64_t kLanes = 64 / static_cast<std::int64_t>(sizeof(T));   // independent maxima, so that the loop is vectorised
  std::int64_t i = 0;
  T best = x[0];
  if (count >= kLanes) {
    std::array<T, kLanes> lanes;
    std::copy_n(x, kLanes, lanes.begin());
    for (i = kLanes; i + kLanes <= count; i += kLanes) {
#pragma GCC unroll 1   // unrolled here, it is no longer seen as a loop to vectorise
      for (std::int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] = larger(lanes[lane], x[i + lane]);
    }
    for (const T value : lanes) best = larger(best, value);
  }
  for (; i < count; ++i) best = larger(best, x[i]);
  return best;
}

template <class T>
struct Entry {
  T value;
  std::int64_t index;
};

/// The order of the result: a total order, so that the set and its order do not depend on the selection algorithm.
template <class T>
bool before(const Entry<T>& a, const Entry<T>& b) {
  if (a.value > b.value) return true;
  if (a.value < b.value) return false;
  const bool a_nan = std::isnan(a.value), b_nan = std::isnan(b.value);
  return a_nan != b_nan ? a_nan : a.index < b.index;
}

template <class T>
void largest_k(const T* x, std::int64_t count, std::int64_t k, T* values, std::int64_t* indices) {
  std::vector<Entry<T>> entries(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) entries[i] = {x[i], i};
  const auto end = entries.begin() + k;
  if (k < count) std::nth_element(entries.begin(), end, entries.end(), before<T>);
  std::sort(entries.begin(), end, before<T>);
  for (std::int64_t i = 0; i < k; ++i) {
    values[i] = entries[i].value;
    indices[i] = entries[i].index;
  }
}

}  // namespace

void max_last(const Stream& stream, const Tensor& x, Tensor& y) {
  dispatch_float("max_last", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const std::int64_t width = x.dim(-1);
    const T* from = x.data<T>();
    T* to = y.data<T>();
    stream.parallel_blocks(x.rows(), 512, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) to[row] = largest(from + row * width, width);
    });
  });
}

void topk(const Stream& stream, const Tensor& x, Tensor& values, Tensor& indices) {
  dispatch_float("topk", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const std::int64_t count = x.dim(1), k = values.dim(1);
    stream.parallel_blocks(x.dim(0), 1, [&](std::int64_t row, std::int64_t) {
      largest_k(x.data<T>() + row * count, count, k, values.data<T>() + row * k, indices.data<std::int64_t>() + row * k);
    });
  });
}

}  // namespace detr::kernels::cpu
