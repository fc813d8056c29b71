#include "kernels/batch_norm.h"

#include "kernels/dispatch.h"

namespace detr::kernels {
namespace {

void check_forward(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor* residual, Activation activation, double eps,
                   const Tensor& running_mean, const Tensor& running_var, const Tensor& y, const Tensor& mean, const Tensor& rstd) {
  DETR_CHECK(x.rank() >= 1, "batch_norm: x must be (..., C), got ", x);
  const Shape channels{x.dim(-1)};
  expect_wide(x, "batch_norm: weight", weight, channels);
  expect_wide(x, "batch_norm: bias", bias, channels);
  expect_like(x, "batch_norm: residual", residual, x.shape());
  expect_wide(x, "batch_norm: running_mean", running_mean, channels);
  expect_wide(x, "batch_norm: running_var", running_var, channels);
  expect_like(x, "batch_norm: y", y, x.shape());
  expect_wide(x, "batch_norm: mean", mean, channels);
  expect_wide(x, "batch_norm: rstd", rstd, channels);
  DETR_CHECK(activation == Activation::none || activation == Activation::relu || activation == Activation::silu,
             "batch_norm: the activation must be none, relu or silu");
  DETR_CHECK(eps > 0, "batch_norm: eps must be > 0, got ", eps);
}

}  // namespace

void batch_norm_forward(const Stream& stream, const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor* residual,
                        Activation activation, double eps, double momentum, Tensor& running_mean, Tensor& running_var, Tensor& y,
                        Tensor& mean, Tensor& rstd) {
  check_forward(x, weight, bias, residual, activation, eps, running_mean, running_var, y, mean, rstd);
  DETR_CHECK(x.rows() >= 1, "batch_norm: no rows to take statistics of in ", x);
  DETR_CHECK(momentum >= 0 && momentum <= 1, "batch_norm: momentum must be in [0, 1], got ", momentum);
  DETR_DISPATCH(x.device(), batch_norm_forward, stream, x, weight, bias, residual, activation, eps, momentum, running_mean, running_var, y,
                mean, rstd);
}

void batch_norm_inference(const Stream& stream, const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor* residual,
                          Activation activation, double eps, const Tensor& running_mean, const Tensor& running_var, Tensor& y,
                          Tensor& mean, Tensor& rstd) {
  check_forward(x, weight, bias, residual, activation, eps, running_mean, running_var, y, mean, rstd);
  DETR_DISPATCH(x.device(), batch_norm_inference, stream, x, weight, bias, residual, activation, eps, running_mean, running_var, y, mean,
                rstd);
}

void batch_norm_backward(const Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& bias,
                         const Tensor* residual, const Tensor& y, const Tensor& mean, const Tensor& rstd, Activation activation,
                         bool batch_statistics, Tensor* dx, Tensor* dweight, Tensor* dbias, Tensor* dresidual) {
  const bool reads_x = batch_statistics || dweight || dbias || activation == Activation::silu;
  const Tensor& map = reads_x || x.defined() ? x : dy;
  DETR_CHECK(map.defined() && map.rank() >= 1, "batch_norm: ", reads_x || x.defined() ? "x" : "dy", " must be (..., C), got ", map);
  const Shape channels{map.dim(-1)};
  expect_like(map, "batch_norm: dy", dy, map.shape());
  expect_wide(map, "batch_norm: weight", weight, channels);
  expect_wide(map, "batch_norm: bias", bias, channels);
  expect_wide(map, "batch_norm: mean", mean, channels);
  expect_wide(map, "batch_norm: rstd", rstd, channels);
  if (activation == Activation::silu) expect_like(map, "batch_norm: residual", residual, map.shape());
  if (activation == Activation::relu) expect_like(map, "batch_norm: y", y, map.shape());
  expect_like(map, "batch_norm: dx", dx, map.shape());
  expect_wide(map, "batch_norm: dweight", dweight, channels);
  expect_wide(map, "batch_norm: dbias", dbias, channels);
  expect_like(map, "batch_norm: dresidual", dresidual, map.shape());
  DETR_CHECK(activation == Activation::none || activation == Activation::relu || activation == Activation::silu,
             "batch_norm: the activation must be none, relu or silu");
  DETR_DISPATCH(map.device(), batch_norm_backward, stream, dy, x, weight, bias, residual, y, mean, rstd, activation, batch_statistics, dx,
                dweight, dbias, dresidual);
}

}  // namespace detr::kernels
