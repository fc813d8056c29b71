#include "kernels/activation.h"

#include "kernels/cpu/activation_math.h"
#include "kernels/cpu/blocks.h"
#include "kernels/dispatch.h"

namespace detr::kernels::cpu {

void activation_forward(const Stream& stream, const Tensor& x, Activation activation, Tensor& y) {
  dispatch_float("activation", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* from = x.data<T>();
    T* to = y.data<T>();
    dispatch_activation(activation, [&](auto kind) {
      stream.parallel_blocks(x.numel(), kBlockElements, [&](std::int64_t begin, std::int64_t end) {
#pragma GCC ivdep
        for (std::int64_t i = begin; i < end; ++i) to[i] = activate<decltype(kind)::value>(from[i]);
      });
    });
  });
}

void activation_backward(const Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& y, Activation activation, Tensor* dx) {
  dispatch_float("activation", dy.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* pdy = dy.data<T>();
    T* pdx = dx->data<T>();
    dispatch_activation(activation, [&](auto kind) {
      constexpr Activation kKind = decltype(kind)::value;
      const T* v = kKind == Activation::none ? pdy : (kReadsOutput<kKind> ? y : x).template data<T>();
      stream.parallel_blocks(dy.numel(), kBlockElements, [&](std::int64_t begin, std::int64_t end) {
#pragma GCC ivdep
        for (std::int64_t i = begin; i < end; ++i) pdx[i] = activate_backward<kKind>(pdy[i], v[i]);
      });
    });
  });
}

}  // namespace detr::kernels::cpu
