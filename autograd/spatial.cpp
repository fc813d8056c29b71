#include "autograd/spatial.h"

#include <vector>

#include "kernels/gather.h"
#include "kernels/pointwise.h"
#include "kernels/pool.h"
#include "runtime/error.h"

namespace detr {
namespace {

void expect_map(const char* op, const Variable& x) { DETR_CHECK(x.shape().rank() == 4, op, ": x must be (N, H, W, C), got ", x.value()); }

Tensor empty_half(const Context& ctx, const Variable& x) {
  return ctx.empty({x.dim(0), (x.dim(1) + 1) / 2, (x.dim(2) + 1) / 2, x.dim(3)}, x.value().dtype());
}

}  // namespace

Variable max_pool(Context& ctx, const Variable& x) {
  expect_map("max_pool", x);
  Tensor y = empty_half(ctx, x);
  kernels::max_pool_forward(ctx.stream(), x.value(), y);
  return ctx.record("max_pool", {x}, y, [x = x.value()](Context& c, const Tensor& dy, Wanted want) {
    kernels::max_pool_backward(c.stream(), dy, x, want[0]);
  });
}

Variable avg_pool(Context& ctx, const Variable& x) {
  expect_map("avg_pool", x);
  Tensor y = empty_half(ctx, x);
  kernels::avg_pool_forward(ctx.stream(), x.value(), y);
  return ctx.record("avg_pool", {x}, y,
                    [](Context& c, const Tensor& dy, Wanted want) { kernels::avg_pool_backward(c.stream(), dy, want[0]); });
}

Variable upsample(Context& ctx, const Variable& x) {
  expect_map("upsample", x);
  Tensor y = ctx.empty({x.dim(0), 2 * x.dim(1), 2 * x.dim(2), x.dim(3)}, x.value().dtype());
  kernels::upsample_forward(ctx.stream(), x.value(), y);
  return ctx.record("upsample", {x}, y,
                    [](Context& c, const Tensor& dy, Wanted want) { kernels::upsample_backward(c.stream(), dy, want[0]); });
}

Variable concatenate(Context& ctx, std::span<const Variable> inputs, int axis) {
  DETR_CHECK(!inputs.empty(), "concatenate: there must be at least one input");
  DETR_CHECK(axis >= 0 && axis < inputs[0].shape().rank(), "concatenate: axis ", axis, " of ", inputs[0].value());
  std::vector<Tensor> values;
  std::vector<std::int64_t> sizes, dims(inputs[0].shape().dims().begin(), inputs[0].shape().dims().end());
  dims[static_cast<std::size_t>(axis)] = 0;
  for (const Variable& input : inputs) {
    values.push_back(input.value());
    sizes.push_back(axis < input.shape().rank() ? input.dim(axis) : 0);
    dims[static_cast<std::size_t>(axis)] += sizes.back();
  }
  Tensor y = ctx.empty(Shape(dims), values.front().dtype());
  kernels::concat_forward(ctx.stream(), values, axis, y);
  return ctx.record("concatenate", inputs, y, [sizes, axis](Context& c, const Tensor& dy, Wanted want) {
    kernels::concat_backward(c.stream(), dy, axis, sizes, want);
  });
}

Variable reshape(Context& ctx, const Variable& x, const Shape& shape) {
  return ctx.record("reshape", {x}, x.value().reshape(shape), [](Context& c, const Tensor& dy, Wanted want) {
    if (want[0]) kernels::cast(c.stream(), dy.reshape(want[0]->shape()), *want[0]);
  }, {.passes = 1});
}

}  // namespace detr
