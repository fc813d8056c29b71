#include "kernels/conv2d_norm.h"

#include "kernels/dispatch.h"

namespace detr::kernels {

void fold_norm(const Stream& stream, const Tensor& weight, const Tensor& norm_weight, const Tensor& norm_bias, const Tensor& mean,
               const Tensor& var, double eps, Tensor& folded, Tensor& scale, Tensor& shift) {
  DETR_CHECK(weight.rank() == 4, "fold_norm: weight must be (O, kh, kw, I), got ", weight);
  const Shape channels{weight.dim(0)};
  expect_like(weight, "fold_norm: norm_weight", norm_weight, channels);
  expect_like(weight, "fold_norm: norm_bias", norm_bias, channels);
  expect_like(weight, "fold_norm: mean", mean, channels);
  expect_like(weight, "fold_norm: var", var, channels);
  expect_tensor(weight, "fold_norm: folded", folded, weight.shape(), folded.dtype());
  DETR_CHECK(wide_dtype(folded.dtype()) == weight.dtype(), "fold_norm: folded must be ", weight.dtype(), " or its bf16, got ", folded);
  expect_like(weight, "fold_norm: scale", scale, channels);
  expect_like(weight, "fold_norm: shift", shift, channels);
  DETR_CHECK(eps > 0, "fold_norm: eps must be > 0, got ", eps);
  DETR_DISPATCH(weight.device(), fold_norm, stream, weight, norm_weight, norm_bias, mean, var, eps, folded, scale, shift);
}

void conv2d_shift_forward(const Stream& stream, const Tensor& x, const Tensor& weight, const Tensor& shift, const Tensor* residual,
                          Activation activation, const Conv2dOptions& options, Tensor& y) {
  DETR_CHECK(x.defined() && weight.defined(), "conv2d_shift: x and weight must be defined");
  const Shape output = conv2d_shape(x.shape(), weight.shape(), options);
  expect_like(x, "conv2d_shift: weight", weight, weight.shape());
  expect_wide(x, "conv2d_shift: shift", shift, {weight.dim(0)});
  expect_like(x, "conv2d_shift: residual", residual, output);
  expect_like(x, "conv2d_shift: y", y, output);
  DETR_CHECK(activation == Activation::none || activation == Activation::relu, "conv2d_shift: the activation must be none or relu");
  DETR_DISPATCH(x.device(), conv2d_shift_forward, stream, x, weight, shift, residual, activation, options, y);
}

void scale_rows(const Stream& stream, const Tensor& scale, Tensor& x) {
  DETR_CHECK(x.rank() >= 1, "scale_rows: x must be (O, ...), got ", x);
  expect_like(x, "scale_rows: scale", scale, {x.dim(0)});
  DETR_DISPATCH(x.device(), scale_rows, stream, scale, x);
}

}  // namespace detr::kernels
