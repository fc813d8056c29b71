#include "autograd/norm.h"

#include "kernels/batch_norm.h"
#include "kernels/layer_norm.h"
#include "kernels/pointwise.h"

namespace detr {

using kernels::Activation;

Variable batch_norm(Context& ctx, const Variable& x, const Variable& weight, const Variable& bias, const Variable& residual,
                    Activation activation, double eps, double momentum, bool batch_statistics, RunningStats running) {
  Tensor y = ctx.empty_like(x.value()), mean = ctx.empty_like(weight.value()), rstd = ctx.empty_like(weight.value());
  const Tensor* added = residual.defined() ? &residual.value() : nullptr;
  if (batch_statistics) {
    kernels::batch_norm_forward(ctx.stream(), x.value(), weight.value(), bias.value(), added, activation, eps, momentum, running.mean,
                                running.var, y, mean, rstd);
  } else {
    kernels::batch_norm_inference(ctx.stream(), x.value(), weight.value(), bias.value(), added, activation, eps, running.mean, running.var, y,
                                  mean, rstd);
  }
  // Only what the backward reads is kept.
  const bool reads_x = batch_statistics || activation == Activation::silu || weight.wants_grad() || bias.wants_grad();
  const Tensor kept_x = reads_x ? x.value() : Tensor();
  const Tensor kept_residual = activation == Activation::silu ? residual.value() : Tensor();
  const Tensor kept_y = activation == Activation::relu ? y : Tensor();
  return ctx.record("batch_norm", {x, weight, bias, residual}, y,
                    [x = kept_x, weight = weight.value(), bias = bias.value(), residual = kept_residual, y = kept_y, mean, rstd, activation,
                     batch_statistics](Context& c, const Tensor& dy, Wanted want) {
                      kernels::batch_norm_backward(c.stream(), dy, x, weight, bias, residual.defined() ? &residual : nullptr, y, mean, rstd,
                                                   activation, batch_statistics, want[0], want[1], want[2], want[3]);
                    });
}

Variable layer_norm(Context& ctx, const Variable& x, const Variable& residual, const Variable& weight, const Variable& bias, double eps) {
  Tensor y = ctx.empty_like(x.value()), mean = ctx.empty({x.value().rows()}, weight.value().dtype()), rstd = ctx.empty_like(mean);
  Tensor sum = residual.defined() ? ctx.empty_like(x.value()) : x.value();
  kernels::layer_norm_forward(ctx.stream(), x.value(), residual.defined() ? &residual.value() : nullptr, weight.value(), bias.value(), eps,
                              residual.defined() ? &sum : nullptr, y, mean, rstd);
  return ctx.record("layer_norm", {x, residual, weight, bias}, y,
                    [sum, weight = weight.value(), mean, rstd](Context& c, const Tensor& dy, Wanted want) {
                      Tensor* ds = want[0] ? want[0] : want[1];   // x and residual have the same gradient
                      kernels::layer_norm_backward(c.stream(), dy, sum, weight, mean, rstd, ds, want[2], want[3]);
                      if (want[0] && want[1]) kernels::cast(c.stream(), *want[0], *want[1]);
                    });
}

}  // namespace detr
