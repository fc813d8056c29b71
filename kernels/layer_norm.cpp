#include "kernels/layer_norm.h"

#include "kernels/dispatch.h"

namespace detr::kernels {

void layer_norm_forward(const Stream& stream, const Tensor& x, const Tensor* residual, const Tensor& weight, const Tensor& bias,
                        double eps, Tensor* sum, Tensor& y, Tensor& mean, Tensor& rstd) {
  DETR_CHECK(x.rank() >= 1 && x.dim(-1) >= 1, "layer_norm: x must be (..., D) with D >= 1, got ", x);
  DETR_CHECK((sum == nullptr) == (residual == nullptr), "layer_norm: sum must be given exactly where residual is");
  DETR_CHECK(eps > 0, "layer_norm: eps must be > 0, got ", eps);
  expect_like(x, "layer_norm: residual", residual, x.shape());
  expect_wide(x, "layer_norm: weight", weight, {x.dim(-1)});
  expect_wide(x, "layer_norm: bias", bias, {x.dim(-1)});
  expect_like(x, "layer_norm: sum", sum, x.shape());
  expect_like(x, "layer_norm: y", y, x.shape());
  expect_wide(x, "layer_norm: mean", mean, {x.rows()});
  expect_wide(x, "layer_norm: rstd", rstd, {x.rows()});
  DETR_DISPATCH(x.device(), layer_norm_forward, stream, x, residual, weight, bias, eps, sum, y, mean, rstd);
}

void layer_norm_backward(const Stream& stream, const Tensor& dy, const Tensor& sum, const Tensor& weight, const Tensor& mean,
                         const Tensor& rstd, Tensor* ds, Tensor* dweight, Tensor* dbias) {
  DETR_CHECK(sum.rank() >= 1 && sum.dim(-1) >= 1, "layer_norm: sum must be (..., D) with D >= 1, got ", sum);
  expect_like(sum, "layer_norm: dy", dy, sum.shape());
  expect_wide(sum, "layer_norm: weight", weight, {sum.dim(-1)});
  expect_wide(sum, "layer_norm: mean", mean, {sum.rows()});
  expect_wide(sum, "layer_norm: rstd", rstd, {sum.rows()});
  expect_like(sum, "layer_norm: ds", ds, sum.shape());
  expect_wide(sum, "layer_norm: dweight", dweight, {sum.dim(-1)});
  expect_wide(sum, "layer_norm: dbias", dbias, {sum.dim(-1)});
  DETR_DISPATCH(sum.device(), layer_norm_backward, stream, dy, sum, weight, mean, rstd, ds, dweight, dbias);
}

}  // namespace detr::kernels
