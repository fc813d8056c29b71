#include "autograd/conv2d.h"

#include "kernels/conv2d_norm.h"
#include "kernels/pointwise.h"

namespace detr {

using kernels::Activation;

Variable conv2d(Context& ctx, const Variable& x, const Variable& weight, const kernels::Conv2dOptions& options) {
  Tensor y = ctx.empty(kernels::conv2d_shape(x.shape(), weight.shape(), options), x.value().dtype());
  kernels::conv2d_forward(ctx.stream(), x.value(), weight.value(), options, y);
  return ctx.record("conv2d", {x, weight}, y, [x = x.value(), weight = weight.value(), options](Context& c, const Tensor& dy, Wanted want) {
    if (want[1]) c.beside({x, dy, weight, *want[1]}, [&](const Stream& stream) { kernels::conv2d_backward(stream, dy, x, weight, options, nullptr, want[1]); });
    if (want[0]) kernels::conv2d_backward(c.stream(), dy, x, weight, options, want[0], nullptr, c.adds(0), c.masks(0));
  }, {.adds = 1, .masks = 1});
}

Variable conv2d_norm(Context& ctx, const Variable& x, const Variable& weight, const Tensor& exact, const ConstantNorm& norm, const Variable& residual,
                     Activation activation, const kernels::Conv2dOptions& options) {
  Tensor folded = ctx.empty_like(weight.value()), scale = ctx.empty_like(norm.weight), shift = ctx.empty_like(norm.weight);
  kernels::fold_norm(ctx.stream(), exact, norm.weight, norm.bias, norm.mean, norm.var, norm.eps, folded, scale, shift);
  Tensor y = ctx.empty(kernels::conv2d_shape(x.shape(), folded.shape(), options), x.value().dtype());
  kernels::conv2d_shift_forward(ctx.stream(), x.value(), folded, shift, residual.defined() ? &residual.value() : nullptr, activation, options, y);
  const Tensor kept_y = activation == Activation::relu ? y : Tensor();
  return ctx.record("conv2d_norm", {x, weight, residual}, y, [x = x.value(), folded, scale, y = kept_y, activation, options](Context& c, const Tensor& dy, Wanted want) {
    // Before the activation the gradient is the residual's and the convolution's alike.
    Tensor dz = dy;
    if (activation == Activation::relu && !c.before_relu()) {
      dz = want[2] ? *want[2] : c.empty_like(dy);
      kernels::activation_backward(c.stream(), dy, Tensor(), y, activation, &dz);
    } else if (want[2]) {
      kernels::cast(c.stream(), dy, *want[2]);
    }
    if (want[1]) {
      c.beside({x, dz, folded, scale, *want[1]}, [&](const Stream& stream) {
        kernels::conv2d_backward(stream, dz, x, folded, options, nullptr, want[1]);
        kernels::scale_rows(stream, scale, *want[1]);
      });
    }
    if (want[0]) kernels::conv2d_backward(c.stream(), dz, x, folded, options, want[0], nullptr, c.adds(0), c.masks(0));
  }, {.adds = 1, .masks = 1, .ends_in_relu = activation == Activation::relu, .passes_before_relu = 4});
}

}  // namespace detr
