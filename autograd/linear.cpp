#include "autograd/linear.h"

#include <utility>
#include <vector>

#include "kernels/linear.h"

namespace detr {

Variable linear(Context& ctx, const Variable& x, const Variable& weight, const Variable& bias) {
  Tensor y = ctx.empty(kernels::linear_shape(x.shape(), weight.shape()), x.value().dtype());
  kernels::linear_forward(ctx.stream(), x.value(), weight.value(), bias.defined() ? &bias.value() : nullptr, y);
  return ctx.record("linear", {x, weight, bias}, y, [x = x.value(), weight = weight.value()](Context& c, const Tensor& dy, Wanted want) {
    if (want[1] || want[2]) {
      std::vector<Tensor> touched = {x, dy, weight};
      for (const Tensor* gradient : {want[1], want[2]}) {
        if (gradient) touched.push_back(*gradient);
      }
      c.beside(std::move(touched), [&](const Stream& stream) { kernels::linear_backward(stream, dy, x, weight, nullptr, want[1], want[2]); });
    }
    if (want[0]) kernels::linear_backward(c.stream(), dy, x, weight, want[0], nullptr, nullptr, c.adds(0));
  }, {.adds = 1});
}

}  // namespace detr
