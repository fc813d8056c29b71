#include "kernels/conv2d_norm.h"

#include <algorithm>
#include <cmath>

#include "kernels/dispatch.h"

namespace detr::kernels::cpu {

void fold_norm(const Stream&, const Tensor& weight, const Tensor& norm_weight, const Tensor& norm_bias, const Tensor& mean, const Tensor& var,
               double eps, Tensor& folded, Tensor& scale, Tensor& shift) {
  dispatch_float("fold_norm", folded.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const std::int64_t channels = weight.dim(0), size = weight.numel() / std::max<std::int64_t>(channels, 1);
    for (std::int64_t o = 0; o < channels; ++o) {
      const T s = norm_weight.data<T>()[o] / std::sqrt(var.data<T>()[o] + static_cast<T>(eps));
      scale.data<T>()[o] = s;
      shift.data<T>()[o] = norm_bias.data<T>()[o] - mean.data<T>()[o] * s;
      for (std::int64_t i = o * size; i < (o + 1) * size; ++i) folded.data<T>()[i] = s * weight.data<T>()[i];
    }
  });
}

void conv2d_shift_forward(const Stream& stream, const Tensor& x, const Tensor& weight, const Tensor& shift, const Tensor* residual,
                          Activation activation, const Conv2dOptions& options, Tensor& y) {
  cpu::conv2d_forward(stream, x, weight, options, y);
  dispatch_float("conv2d_shift", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const std::int64_t channels = y.dim(-1);
    const T *add = shift.data<T>(), *more = residual ? residual->data<T>() : nullptr;
    T* out = y.data<T>();
    stream.parallel_blocks(y.rows(), 64, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin * channels, c = 0; i < end * channels; ++i, c = c + 1 == channels ? 0 : c + 1) {
        const T value = out[i] + add[c] + (more ? more[i] : T(0));
        out[i] = activation == Activation::relu && value <= 0 ? T(0) : value;   // NaN stays
      }
    });
  });
}

void scale_rows(const Stream&, const Tensor& scale, Tensor& x) {
  dispatch_float("scale_rows", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const std::int64_t size = x.numel() / std::max<std::int64_t>(x.dim(0), 1);
    for (std::int64_t i = 0; i < x.numel(); ++i) x.data<T>()[i] *= scale.data<T>()[i / size];
  });
}

}  // namespace detr::kernels::cpu
