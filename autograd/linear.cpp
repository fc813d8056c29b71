#include "autograd/linear.h"

#include "kernels/linear.h"

namespace detr {

Variable linear(Context& ctx, const Variable& x, const Variable& weight, const Variable& bias) {
  Tensor y = ctx.empty(kernels::linear_shape(x.shape(), weight.shape()), x.value().dtype());
  kernels::linear_forward(ctx.stream(), x.value(), weight.value(), bias.defined() ? &bias.value() : nullptr, y);
  return ctx.record("linear", {x, weight, bias}, y, [x = x.value(), weight = weight.value()](Context& c, const Tensor& dy, Wanted want) {
    kernels::linear_backward(c.stream(), dy, x, weight, want[0], want[1], want[2], c.adds(0));
  }, {.adds = 1});
}

}  // namespace detr
