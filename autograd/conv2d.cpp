#include "autograd/conv2d.h"

namespace detr {

Variable conv2d(Context& ctx, const Variable& x, const Variable& weight, const kernels::Conv2dOptions& options) {
  Tensor y = ctx.empty(kernels::conv2d_shape(x.shape(), weight.shape(), options), x.value().dtype());
  kernels::conv2d_forward(ctx.stream(), x.value(), weight.value(), options, y);
  return ctx.record("conv2d", {x, weight}, y, [x = x.value(), weight = weight.value(), options](Context& c, const Tensor& dy, Wanted want) {
    kernels::conv2d_backward(c.stream(), dy, x, weight, options, want[0], want[1]);
  });
}

}  // namespace detr
