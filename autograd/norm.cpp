#include "autograd/norm.h"

#include "autograd/statistics.h"
#include "kernels/batch_norm.h"
#include "kernels/layer_norm.h"
#include "kernels/pointwise.h"
#include "runtime/error.h"

namespace detr {

using kernels::Activation;

namespace {

/// Batch norm over the rows of all ranks; `all` is by rank.
Variable shared_batch_norm(Context& ctx, const Variable& x, const Variable& weight, const Variable& bias, const Variable& residual,
                           Activation activation, double eps, double momentum, RunningStats running) {
  SharedStatistics& shared = *ctx.statistics;
  const std::int64_t ranks = shared.ranks(), C = x.dim(-1);
  const Tensor* added = residual.defined() ? &residual.value() : nullptr;
  Tensor y = ctx.empty_like(x.value()), mean = ctx.empty_like(weight.value()), rstd = ctx.empty_like(weight.value());
  Tensor moments = ctx.stream().empty({2, C}, DType::f64), all = ctx.stream().empty({ranks, 2, C}, DType::f64);
  kernels::batch_norm_moments(ctx.stream(), x.value(), moments);
  const int call = shared.gather_forward(ctx.stream(), moments, all);
  kernels::batch_norm_combine(ctx.stream(), all, x.value().rows(), eps, momentum, running.mean, running.var, mean, rstd);
  kernels::batch_norm_apply(ctx.stream(), x.value(), weight.value(), bias.value(), added, activation, mean, rstd, y);

  const Tensor kept_residual = activation == Activation::silu ? residual.value() : Tensor();
  const Tensor kept_y = activation == Activation::relu ? y : Tensor();
  return ctx.record("batch_norm", {x, weight, bias, residual}, y,
                    [x = x.value(), weight = weight.value(), bias = bias.value(), residual = kept_residual, y = kept_y, mean, rstd, activation,
                     &shared, call](Context& c, const Tensor& dy, Wanted want) {
                      Tensor *dx = want[0], *dresidual = want[3];
                      const Tensor* added_before = residual.defined() ? &residual : nullptr;
                      Tensor sums = dx ? c.stream().empty({2, x.dim(-1)}, DType::f64) : Tensor();
                      kernels::batch_norm_backward_sums(c.stream(), dy, x, weight, bias, added_before, y, mean, rstd, activation,
                                                        dx ? &sums : nullptr, want[1], want[2], dresidual);
                      if (!dx) return;   // the same on all ranks
                      Tensor all_sums = c.stream().empty({shared.ranks(), 2, x.dim(-1)}, DType::f64);
                      shared.gather_backward(c.stream(), call, sums, all_sums);
                      // The residual's gradient is that before the activation.
                      kernels::batch_norm_backward_apply(c.stream(), dresidual ? *dresidual : dy, x, weight, bias, added_before, y, mean, rstd,
                                                         dresidual ? Activation::none : activation, all_sums, *dx);
                    });
}

/// The same of two norms whose results are added. b's is the residual of a.
Variable shared_batch_norm_sum(Context& ctx, const NormBranch& a, const NormBranch& b, Activation activation) {
  SharedStatistics& shared = *ctx.statistics;
  const std::int64_t C = a.x.dim(-1);
  const Stream& stream = ctx.stream();
  Tensor moments = stream.empty({2, 2, C}, DType::f64), all = stream.empty({shared.ranks(), 2, 2, C}, DType::f64);
  const auto half = [C](const Tensor& both, std::int64_t norm) { return both.view(norm * 2 * C, {2, C}); };
  Tensor of_a = half(moments, 0), of_b = half(moments, 1);
  kernels::batch_norm_moments(stream, a.x.value(), of_a);
  kernels::batch_norm_moments(stream, b.x.value(), of_b);
  const int call = shared.gather_forward(stream, moments, all);
  struct Kept {
    Tensor x, weight, bias, mean, rstd;
  };
  const auto combine = [&](const NormBranch& n, std::int64_t norm) {
    Kept kept{n.x.value(), n.weight.value(), n.bias.value(), ctx.empty_like(n.weight.value()), ctx.empty_like(n.weight.value())};
    RunningStats running = n.running;
    kernels::batch_norm_combine(stream, {all, norm}, kept.x.rows(), n.eps, n.momentum, running.mean, running.var, kept.mean, kept.rstd);
    return kept;
  };
  const Kept first = combine(a, 0), second = combine(b, 1);
  Tensor y = ctx.empty_like(first.x), residual = ctx.empty_like(first.x);
  kernels::batch_norm_apply(stream, second.x, second.weight, second.bias, nullptr, Activation::none, second.mean, second.rstd, residual);
  kernels::batch_norm_apply(stream, first.x, first.weight, first.bias, &residual, activation, first.mean, first.rstd, y);

  const Tensor kept_residual = activation == Activation::silu ? residual : Tensor(), kept_y = activation == Activation::relu ? y : Tensor();
  return ctx.record("batch_norm_sum", {a.x, a.weight, a.bias, b.x, b.weight, b.bias}, y,
                    [first, second, residual = kept_residual, y = kept_y, activation, half, &shared, call](Context& c, const Tensor& dy, Wanted want) {
                      const bool exchanges = want[0] || want[3];   // the same on all ranks
                      const std::int64_t channels = first.x.dim(-1);
                      Tensor g = c.empty_like(dy), sums = exchanges ? c.stream().empty({2, 2, channels}, DType::f64) : Tensor();
                      Tensor sums_a = exchanges ? half(sums, 0) : Tensor(), sums_b = exchanges ? half(sums, 1) : Tensor();
                      kernels::batch_norm_backward_sums(c.stream(), dy, first.x, first.weight, first.bias, residual.defined() ? &residual : nullptr, y,
                                                        first.mean, first.rstd, activation, exchanges ? &sums_a : nullptr, want[1], want[2], &g);
                      kernels::batch_norm_backward_sums(c.stream(), g, second.x, second.weight, second.bias, nullptr, Tensor(), second.mean,
                                                        second.rstd, Activation::none, exchanges ? &sums_b : nullptr, want[4], want[5], nullptr);
                      if (!exchanges) return;
                      Tensor all_sums = c.stream().empty({shared.ranks(), 2, 2, channels}, DType::f64);
                      shared.gather_backward(c.stream(), call, sums, all_sums);
                      const auto apply = [&](const Kept& n, std::int64_t norm, Tensor* dx) {
                        if (!dx) return;
                        kernels::batch_norm_backward_apply(c.stream(), g, n.x, n.weight, n.bias, nullptr, Tensor(), n.mean, n.rstd, Activation::none,
                                                           {all_sums, norm}, *dx);
                      };
                      apply(first, 0, want[0]);
                      apply(second, 1, want[3]);
                    });
}

}  // namespace

Variable batch_norm(Context& ctx, const Variable& x, const Variable& weight, const Variable& bias, const Variable& residual,
                    Activation activation, double eps, double momentum, bool batch_statistics, RunningStats running) {
  if (batch_statistics && ctx.statistics) return shared_batch_norm(ctx, x, weight, bias, residual, activation, eps, momentum, running);
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

Variable batch_norm_sum(Context& ctx, const NormBranch& a, const NormBranch& b, Activation activation, bool batch_statistics) {
  DETR_CHECK(a.x.shape() == b.x.shape(), "batch_norm_sum: maps of one shape, got ", a.x.shape(), " and ", b.x.shape());
  if (batch_statistics && ctx.statistics) return shared_batch_norm_sum(ctx, a, b, activation);
  const Variable residual = batch_norm(ctx, b.x, b.weight, b.bias, Variable(), Activation::none, b.eps, b.momentum, batch_statistics, b.running);
  return batch_norm(ctx, a.x, a.weight, a.bias, residual, activation, a.eps, a.momentum, batch_statistics, a.running);
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
