#include "kernels/conv2d.h"

#include "kernels/dispatch.h"

namespace detr::kernels {
namespace {

/// Checks x and weight; returns the shape of y.
Shape checked_output(const Tensor& x, const Tensor& weight, const Conv2dOptions& options) {
  DETR_CHECK(x.defined() && weight.defined(), "conv2d: x and weight must be defined, got ", x, " and ", weight);
  const Shape output = conv2d_shape(x.shape(), weight.shape(), options);
  expect_like(x, "conv2d: weight", weight, weight.shape());
  return output;
}

}  // namespace

Shape conv2d_shape(const Shape& x, const Shape& weight, const Conv2dOptions& options) {
  DETR_CHECK(x.rank() == 4, "conv2d: x must be (N, H, W, I), got ", x);
  DETR_CHECK(weight.rank() == 4 && weight[1] >= 1 && weight[2] >= 1 && weight[3] == x[3],
             "conv2d: weight must be (O, kh, kw, ", x[3], "), got ", weight);
  DETR_CHECK(options.stride >= 1 && options.padding >= 0, "conv2d: stride must be >= 1 and padding >= 0, got ", options.stride, " and ",
             options.padding);
  const std::int64_t free_h = x[1] + 2 * options.padding - weight[1], free_w = x[2] + 2 * options.padding - weight[2];
  DETR_CHECK(free_h >= 0 && free_w >= 0, "conv2d: weight ", weight, " is larger than the map ", x, " padded by ", options.padding);
  return {x[0], free_h / options.stride + 1, free_w / options.stride + 1, weight[0]};
}

void conv2d_forward(const Stream& stream, const Tensor& x, const Tensor& weight, const Conv2dOptions& options, Tensor& y) {
  expect_like(x, "conv2d: y", y, checked_output(x, weight, options));
  DETR_DISPATCH(x.device(), conv2d_forward, stream, x, weight, options, y);
}

void conv2d_backward(const Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& weight, const Conv2dOptions& options,
                     Tensor* dx, Tensor* dweight, bool add_dx, bool relu_x) {
  expect_like(x, "conv2d: dy", dy, checked_output(x, weight, options));
  expect_like(x, "conv2d: dx", dx, x.shape());
  expect_wide(x, "conv2d: dweight", dweight, weight.shape());
  DETR_DISPATCH(x.device(), conv2d_backward, stream, dy, x, weight, options, dx, dweight, add_dx, relu_x);
}

}  // namespace detr::kernels
