#include "kernels/boxes.h"

#include <algorithm>
#include <cmath>

#include "kernels/dispatch.h"

namespace detr::kernels::cpu {
namespace {

constexpr std::int64_t kGrain = 4096;   // elements of a block

template <class T>
T inverse_sigmoid(T x) {
  constexpr T eps = T(kInverseSigmoidEps);
  const T c = std::clamp(x, T(0), T(1));
  return std::log(std::max(c, eps) / std::max(1 - c, eps));
}

/// A clamp passes gradient where its bound is not violated, bound included.
template <class T>
T inverse_sigmoid_derivative(T x) {
  constexpr T eps = T(kInverseSigmoidEps);
  if (!(x >= 0 && x <= 1)) return 0;
  return (x >= eps ? 1 / x : T(0)) + (1 - x >= eps ? 1 / (1 - x) : T(0));
}

}  // namespace

void refine_boxes_forward(const Stream& stream, const Tensor& delta, const Tensor& reference, Tensor& box) {
  dispatch_float("refine_boxes", delta.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    stream.parallel_blocks(delta.numel(), kGrain,
                           [d = delta.data<T>(), r = reference.data<T>(), b = box.data<T>()](std::int64_t begin, std::int64_t end) {
                             for (std::int64_t i = begin; i < end; ++i) b[i] = 1 / (1 + std::exp(-(d[i] + inverse_sigmoid(r[i]))));
                           });
  });
}

void refine_boxes_backward(const Stream& stream, const Tensor& dbox, const Tensor& box, const Tensor& reference, Tensor* ddelta,
                           Tensor* dreference) {
  dispatch_float("refine_boxes", box.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T *db = dbox.data<T>(), *b = box.data<T>(), *r = reference.data<T>();
    T* dd = ddelta ? ddelta->data<T>() : nullptr;
    T* dr = dreference ? dreference->data<T>() : nullptr;
    stream.parallel_blocks(box.numel(), kGrain, [=](std::int64_t begin, std::int64_t end) {
      if (dd) {
        for (std::int64_t i = begin; i < end; ++i) dd[i] = db[i] * (b[i] * (1 - b[i]));
      }
      if (dr) {
        for (std::int64_t i = begin; i < end; ++i) dr[i] = db[i] * (b[i] * (1 - b[i])) * inverse_sigmoid_derivative(r[i]);
      }
    });
  });
}

}  // namespace detr::kernels::cpu
