#include "kernels/batch_norm.h"

#include "kernels/dispatch.h"

namespace detr::kernels {
namespace {

void check_activation(Activation activation) {
  DETR_CHECK(activation == Activation::none || activation == Activation::relu || activation == Activation::silu,
             "batch_norm: the activation must be none, relu or silu");
}

void check_output(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor* residual, Activation activation, const Tensor& mean,
                  const Tensor& rstd, const Tensor& y) {
  DETR_CHECK(x.rank() >= 1, "batch_norm: x must be (..., C), got ", x);
  const Shape channels{x.dim(-1)};
  expect_wide(x, "batch_norm: weight", weight, channels);
  expect_wide(x, "batch_norm: bias", bias, channels);
  expect_like(x, "batch_norm: residual", residual, x.shape());
  expect_like(x, "batch_norm: y", y, x.shape());
  expect_wide(x, "batch_norm: mean", mean, channels);
  expect_wide(x, "batch_norm: rstd", rstd, channels);
  check_activation(activation);
}

void check_eps(double eps) { DETR_CHECK(eps > 0, "batch_norm: eps must be > 0, got ", eps); }

void check_momentum(double momentum) {
  DETR_CHECK(momentum >= 0 && momentum <= 1, "batch_norm: momentum must be in [0, 1], got ", momentum);
}

void check_forward(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor* residual, Activation activation, double eps,
                   const Tensor& running_mean, const Tensor& running_var, const Tensor& y, const Tensor& mean, const Tensor& rstd) {
  check_output(x, weight, bias, residual, activation, mean, rstd, y);
  const Shape channels{x.dim(-1)};
  expect_wide(x, "batch_norm: running_mean", running_mean, channels);
  expect_wide(x, "batch_norm: running_var", running_var, channels);
  check_eps(eps);
}

void check_rows(const Tensor& x) { DETR_CHECK(x.rows() >= 1, "batch_norm: no rows to take statistics of in ", x); }

/// What all backwards read. Returns a tensor with the shape, dtype and device of the map: x, or dy where nothing of x is read.
const Tensor& check_backward(bool reads_x, const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor* residual,
                             const Tensor& y, const Tensor& mean, const Tensor& rstd, Activation activation) {
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
  check_activation(activation);
  return map;
}

/// (W, 2, C) or (W, K, 2, C) for some W, K >= 1.
void check_exchanged(const Tensor& like, const char* what, const Exchanged& exchanged, std::int64_t channels) {
  const Tensor& all = exchanged.all;
  const bool several = all.defined() && all.rank() == 4;
  DETR_CHECK(all.defined() && (several || all.rank() == 3) && all.dim(0) >= 1, what, " must be (W, 2, ", channels, ") of W ranks, got ", all);
  const std::int64_t norms = several ? all.dim(1) : 1;
  expect_tensor(like, what, all, several ? Shape{all.dim(0), norms, 2, channels} : Shape{all.dim(0), 2, channels}, DType::f64);
  DETR_CHECK(exchanged.norm >= 0 && exchanged.norm < norms, what, ": there is no norm ", exchanged.norm, " in ", all);
}

}  // namespace

void batch_norm_forward(const Stream& stream, const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor* residual,
                        Activation activation, double eps, double momentum, Tensor& running_mean, Tensor& running_var, Tensor& y,
                        Tensor& mean, Tensor& rstd) {
  check_forward(x, weight, bias, residual, activation, eps, running_mean, running_var, y, mean, rstd);
  check_rows(x);
  check_momentum(momentum);
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
  const Tensor& map = check_backward(reads_x, dy, x, weight, bias, residual, y, mean, rstd, activation);
  const Shape channels{map.dim(-1)};
  expect_like(map, "batch_norm: dx", dx, map.shape());
  expect_wide(map, "batch_norm: dweight", dweight, channels);
  expect_wide(map, "batch_norm: dbias", dbias, channels);
  expect_like(map, "batch_norm: dresidual", dresidual, map.shape());
  DETR_DISPATCH(map.device(), batch_norm_backward, stream, dy, x, weight, bias, residual, y, mean, rstd, activation, batch_statistics, dx,
                dweight, dbias, dresidual);
}

void batch_norm_moments(const Stream& stream, const Tensor& x, Tensor& moments) {
  DETR_CHECK(x.rank() >= 1, "batch_norm: x must be (..., C), got ", x);
  check_rows(x);
  expect_tensor(x, "batch_norm: moments", moments, {2, x.dim(-1)}, DType::f64);
  DETR_DISPATCH(x.device(), batch_norm_moments, stream, x, moments);
}

void batch_norm_combine(const Stream& stream, const Exchanged& moments, std::int64_t rows, double eps, double momentum, Tensor& running_mean,
                        Tensor& running_var, Tensor& mean, Tensor& rstd) {
  DETR_CHECK(mean.defined() && mean.rank() == 1, "batch_norm: mean must be (C), got ", mean);
  check_exchanged(mean, "batch_norm: moments", moments, mean.dim(0));
  expect_like(mean, "batch_norm: running_mean", running_mean, mean.shape());
  expect_like(mean, "batch_norm: running_var", running_var, mean.shape());
  expect_like(mean, "batch_norm: rstd", rstd, mean.shape());
  DETR_CHECK(rows >= 1, "batch_norm: each rank must have a row, got ", rows, " rows");
  check_eps(eps);
  check_momentum(momentum);
  DETR_DISPATCH(mean.device(), batch_norm_combine, stream, moments, rows, eps, momentum, running_mean, running_var, mean, rstd);
}

void batch_norm_apply(const Stream& stream, const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor* residual,
                      Activation activation, const Tensor& mean, const Tensor& rstd, Tensor& y) {
  check_output(x, weight, bias, residual, activation, mean, rstd, y);
  DETR_DISPATCH(x.device(), batch_norm_apply, stream, x, weight, bias, residual, activation, mean, rstd, y);
}

void batch_norm_backward_sums(const Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& bias,
                              const Tensor* residual, const Tensor& y, const Tensor& mean, const Tensor& rstd, Activation activation,
                              Tensor* sums, Tensor* dweight, Tensor* dbias, Tensor* dresidual) {
  const bool reads_x = sums || dweight || dbias || activation == Activation::silu;
  const Tensor& map = check_backward(reads_x, dy, x, weight, bias, residual, y, mean, rstd, activation);
  const Shape channels{map.dim(-1)};
  expect_tensor(map, "batch_norm: sums", sums, {2, map.dim(-1)}, DType::f64);
  expect_wide(map, "batch_norm: dweight", dweight, channels);
  expect_wide(map, "batch_norm: dbias", dbias, channels);
  expect_like(map, "batch_norm: dresidual", dresidual, map.shape());
  DETR_DISPATCH(map.device(), batch_norm_backward_sums, stream, dy, x, weight, bias, residual, y, mean, rstd, activation, sums, dweight, dbias,
                dresidual);
}

void batch_norm_backward_apply(const Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& bias,
                               const Tensor* residual, const Tensor& y, const Tensor& mean, const Tensor& rstd, Activation activation,
                               const Exchanged& sums, Tensor& dx) {
  check_backward(true, dy, x, weight, bias, residual, y, mean, rstd, activation);
  check_exchanged(x, "batch_norm: sums", sums, x.dim(-1));
  expect_like(x, "batch_norm: dx", dx, x.shape());
  DETR_DISPATCH(x.device(), batch_norm_backward_apply, stream, dy, x, weight, bias, residual, y, mean, rstd, activation, sums, dx);
}

}  // namespace detr::kernels
