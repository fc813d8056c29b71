#include "kernels/linear.h"

#include "kernels/dispatch.h"

namespace detr::kernels {
namespace {

/// Checks x and weight; returns the shape of y.
Shape checked_output(const Tensor& x, const Tensor& weight) {
  DETR_CHECK(x.defined() && x.rank() >= 1, "linear: x must be (..., I), got ", x);
  DETR_CHECK(weight.defined() && weight.rank() == 2, "linear: weight must be (O, I), got ", weight);
  expect_like(x, "linear: weight", weight, {weight.dim(0), x.dim(-1)});
  std::array<std::int64_t, Shape::kMaxRank> dims{};
  std::copy(x.shape().dims().begin(), x.shape().dims().end(), dims.begin());
  dims[static_cast<std::size_t>(x.rank() - 1)] = weight.dim(0);
  return Shape(std::span<const std::int64_t>(dims.data(), static_cast<std::size_t>(x.rank())));
}

}  // namespace

void linear_forward(const Stream& stream, const Tensor& x, const Tensor& weight, const Tensor* bias, Tensor& y) {
  const Shape output = checked_output(x, weight);
  expect_like(x, "linear: bias", bias, {weight.dim(0)});
  expect_like(x, "linear: y", y, output);
  DETR_DISPATCH(x.device(), linear_forward, stream, x, weight, bias, y);
}

void linear_backward(const Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& weight, Tensor* dx, Tensor* dweight,
                     Tensor* dbias) {
  expect_like(x, "linear: dy", dy, checked_output(x, weight));
  expect_like(x, "linear: dx", dx, x.shape());
  expect_like(x, "linear: dweight", dweight, weight.shape());
  expect_like(x, "linear: dbias", dbias, {weight.dim(0)});
  DETR_DISPATCH(x.device(), linear_backward, stream, dy, x, weight, dx, dweight, dbias);
}

}  // namespace detr::kernels
