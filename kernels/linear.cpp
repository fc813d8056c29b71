#include "kernels/linear.h"

#include <vector>

#include "kernels/dispatch.h"

namespace detr::kernels {
namespace {

/// Checks x and weight; returns the shape of y.
Shape checked_output(const Tensor& x, const Tensor& weight) {
  DETR_CHECK(x.defined() && weight.defined(), "linear: x and weight must be defined, got ", x, " and ", weight);
  const Shape output = linear_shape(x.shape(), weight.shape());
  expect_like(x, "linear: weight", weight, weight.shape());
  return output;
}

}  // namespace

Shape linear_shape(const Shape& x, const Shape& weight) {
  DETR_CHECK(x.rank() >= 1, "linear: x must be (..., I), got ", x);
  DETR_CHECK(weight.rank() == 2 && weight[1] == x[-1], "linear: weight must be (O, ", x[-1], "), got ", weight);
  std::vector<std::int64_t> dims(x.dims().begin(), x.dims().end());
  dims.back() = weight[0];
  return Shape(dims);
}

void linear_forward(const Stream& stream, const Tensor& x, const Tensor& weight, const Tensor* bias, Tensor& y) {
  const Shape output = checked_output(x, weight);
  expect_like(x, "linear: bias", bias, {weight.dim(0)});
  expect_like(x, "linear: y", y, output);
  DETR_DISPATCH(x.device(), linear_forward, stream, x, weight, bias, y);
}

void linear_backward(const Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& weight, Tensor* dx, Tensor* dweight,
                     Tensor* dbias, bool add_dx) {
  expect_like(x, "linear: dy", dy, checked_output(x, weight));
  expect_like(x, "linear: dx", dx, x.shape());
  expect_wide(x, "linear: dweight", dweight, weight.shape());
  expect_wide(x, "linear: dbias", dbias, {weight.dim(0)});
  DETR_DISPATCH(x.device(), linear_backward, stream, dy, x, weight, dx, dweight, dbias, add_dx);
}

}  // namespace detr::kernels
