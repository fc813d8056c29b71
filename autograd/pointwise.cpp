#include "autograd/pointwise.h"

#include <vector>

#include "kernels/pointwise.h"
#include "runtime/error.h"

namespace detr {

using kernels::Activation;

Variable activation(Context& ctx, const Variable& x, Activation kind) {
  if (kind == Activation::none) return x;
  Tensor y = ctx.empty_like(x.value());
  kernels::activation_forward(ctx.stream(), x.value(), kind, y);
  // One of the two is enough for backward; the other's memory is free to go.
  const bool reads_x = kind == Activation::silu || kind == Activation::gelu;
  return ctx.record("activation", {x}, y,
                    [x = reads_x ? x.value() : Tensor(), y = reads_x ? Tensor() : y, kind](Context& c, const Tensor& dy, Wanted want) {
                      kernels::activation_backward(c.stream(), dy, x, y, kind, want[0]);
                    });
}

Variable add(Context& ctx, const Variable& a, const Variable& b) {
  Tensor y = ctx.empty_like(a.value());
  kernels::add_forward(ctx.stream(), a.value(), b.value(), y);
  return ctx.record("add", {a, b}, y,
                    [](Context& c, const Tensor& dy, Wanted want) { kernels::add_backward(c.stream(), dy, want[0], want[1]); },
                    {.passes = a.shape() == b.shape() ? 3U : 1U});
}

Variable cast(Context& ctx, const Variable& x, DType dtype) {
  if (x.value().dtype() == dtype) return x;
  Tensor y = ctx.empty(x.shape(), dtype);
  kernels::cast(ctx.stream(), x.value(), y);
  return ctx.record("cast", {x}, y, [](Context& c, const Tensor& dy, Wanted want) { kernels::cast(c.stream(), dy, *want[0]); });
}

Variable sum(Context& ctx, std::span<const Variable> inputs) {
  DETR_CHECK(!inputs.empty(), "sum: there must be at least one input");
  std::vector<Tensor> values;
  for (const Variable& input : inputs) values.push_back(input.value());
  Tensor total = ctx.empty({1}, values.front().dtype());
  kernels::sum_forward(ctx.stream(), values, total);
  return ctx.record("sum", inputs, total,
                    [](Context& c, const Tensor& dy, Wanted want) { kernels::sum_backward(c.stream(), dy, want); });
}

}  // namespace detr
