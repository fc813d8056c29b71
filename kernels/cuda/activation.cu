#include "kernels/activation.h"

#include "kernels/activation_tag.h"
#include "kernels/cuda/activation_math.cuh"
#include "kernels/cuda/pointwise_map.cuh"

namespace detr::kernels::cuda {
namespace {

template <Activation kind, class T>
struct Forward {
  __device__ T operator()(T x) const { return from_float<T>(activate<kind, T>(to_float(x))); }
};

template <Activation kind, class T>
struct Backward {
  __device__ T operator()(T dy, T v) const { return from_float<T>(activate_backward<kind, T>(to_float(dy), to_float(v))); }
};

}  // namespace

void activation_forward(const Stream& stream, const Tensor& x, Activation activation, Tensor& y) {
  dispatch_float("activation", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    dispatch_activation(activation, [&](auto kind) {
      constexpr Activation kKind = decltype(kind)::value;
      if constexpr (kKind == Activation::none) stream.copy(x, y);
      else map(stream, x.numel(), Forward<kKind, T>{}, x.data<T>(), y.data<T>());
    });
  });
}

void activation_backward(const Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& y, Activation activation, Tensor* dx) {
  dispatch_float("activation", dy.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    dispatch_activation(activation, [&](auto kind) {
      constexpr Activation kKind = decltype(kind)::value;
      if constexpr (kKind == Activation::none) {
        stream.copy(dy, *dx);
      } else {
        const Tensor& v = kReadsOutput<kKind> ? y : x;
        map(stream, dy.numel(), Backward<kKind, T>{}, dy.data<T>(), v.data<T>(), dy.numel(), dx->data<T>());
      }
    });
  });
}

}  // namespace detr::kernels::cuda
