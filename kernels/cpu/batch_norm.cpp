#include "kernels/batch_norm.h"

#include <cmath>
#include <vector>

#include "kernels/cpu/activation_math.h"
#include "kernels/cpu/column_sums.h"
#include "kernels/dispatch.h"

namespace detr::kernels::cpu {
namespace {

/// scale[c] = rstd weight
template <class T>
std::vector<T> channel_scale(const Tensor& weight, const Tensor& rstd) {
  std::vector<T> scale(weight.span<T>().begin(), weight.span<T>().end());
  for (std::size_t c = 0; c < scale.size(); ++c) scale[c] *= rstd.data<T>()[c];
  return scale;
}

/// y = act((x - mean) scale + bias + residual) for given statistics.
template <class T>
void normalise(const Stream& stream, const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor* residual,
               Activation activation, const Tensor& mean, const Tensor& rstd, Tensor& y) {
  const std::int64_t C = x.dim(-1);
  const std::vector<T> scales = channel_scale<T>(weight, rstd);
  const T *px = x.data<T>(), *pm = mean.data<T>(), *ps = scales.data(), *pb = bias.data<T>();
  const T* pr = residual ? residual->data<T>() : nullptr;
  T* py = y.data<T>();
  dispatch_activation(activation, [&](auto kind) {
    constexpr Activation kKind = decltype(kind)::value;
    stream.parallel_blocks(x.rows(), rows_per_block(C), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t base = begin * C; base < end * C; base += C) {
        if (pr) {
#pragma GCC ivdep
          for (std::int64_t c = 0; c < C; ++c) py[base + c] = activate<kKind>((px[base + c] - pm[c]) * ps[c] + pb[c] + pr[base + c]);
        } else {
#pragma GCC ivdep
          for (std::int64_t c = 0; c < C; ++c) py[base + c] = activate<kKind>((px[base + c] - pm[c]) * ps[c] + pb[c]);
        }
      }
    });
  });
}

/// What turns dy into g, the gradient of the sum that the activation is applied to.
template <class T>
struct BeforeActivation {
  Activation activation;
  std::int64_t C;
  std::vector<T> scales;   // weight rstd
  const T *dy, *x, *mean, *bias, *residual, *y;

  BeforeActivation(const Tensor& dy_, const Tensor& x_, const Tensor& weight, const Tensor& bias_, const Tensor* residual_, const Tensor& y_,
                   const Tensor& mean_, const Tensor& rstd, Activation kind)
      : activation(kind),
        C(dy_.dim(-1)),
        scales(channel_scale<T>(weight, rstd)),
        dy(dy_.data<T>()),
        x(x_.defined() ? x_.data<T>() : nullptr),
        mean(mean_.data<T>()),
        bias(bias_.data<T>()),
        residual(kind == Activation::silu && residual_ ? residual_->data<T>() : nullptr),
        y(kind == Activation::relu ? y_.data<T>() : nullptr) {}

  /// g[i] for `count` elements of whole rows from element `base` on; g points at the first of them.
  template <Activation kind>
  void gradient(std::int64_t base, std::int64_t count, T* g) const {
    if constexpr (kind == Activation::none) {
      std::copy_n(dy + base, count, g);
    } else if constexpr (kind == Activation::relu) {
#pragma GCC ivdep
      for (std::int64_t i = 0; i < count; ++i) g[i] = activate_backward<kind>(dy[base + i], y[base + i]);
    } else {
      const T* scale = scales.data();
      for (std::int64_t row = 0; row < count; row += C) {
        const std::int64_t from = base + row;
        if (residual) {
#pragma GCC ivdep
          for (std::int64_t c = 0; c < C; ++c)
            g[row + c] = activate_backward<kind>(dy[from + c], (x[from + c] - mean[c]) * scale[c] + bias[c] + residual[from + c]);
        } else {
#pragma GCC ivdep
          for (std::int64_t c = 0; c < C; ++c)
            g[row + c] = activate_backward<kind>(dy[from + c], (x[from + c] - mean[c]) * scale[c] + bias[c]);
        }
      }
    }
  }
};

/// Rows whose values stay in the first-level cache.
std::int64_t rows_per_chunk(std::int64_t C) { return 4 * std::max<std::int64_t>(1, 512 / std::max<std::int64_t>(1, C)); }

/// Goes over the rows in fixed blocks, makes g, writes it to `stored` unless that is null, and calls each(g, base, count) with chunks of
/// it that start at element `base`. Returns sum(g) and sum(g (x - mean)), or zeros where no sums are needed.
template <class T, class Each>
ColumnSums gradient_sums(const Stream& stream, std::int64_t R, const BeforeActivation<T>& before, T* stored, bool needs_sums, const Each& each) {
  const std::int64_t C = before.C, chunk = rows_per_chunk(C);
  ColumnSums sums;
  dispatch_activation(before.activation, [&](auto kind) {
    constexpr bool kChanges = decltype(kind)::value != Activation::none;
    sums = sum_columns(stream, R, C, [&](std::int64_t block_begin, std::int64_t block_end, double* first, double* second) {
      std::vector<T> scratch(stored || !kChanges ? 0 : static_cast<std::size_t>(chunk * C));
      for (std::int64_t begin = block_begin; begin < block_end; begin += chunk) {
        const std::int64_t end = std::min(begin + chunk, block_end), base = begin * C, count = (end - begin) * C;
        const T* g = before.dy + base;
        if (stored || kChanges) {
          T* target = stored ? stored + base : scratch.data();
          before.template gradient<decltype(kind)::value>(base, count, target);
          g = target;
        }
        if (needs_sums) {
          const T *x = before.x + base, *mean = before.mean;
          add_rows(0, end - begin, C, first, second, [&](std::int64_t i, std::int64_t c, double& a, double& b) {
            const double gi = g[i];
            a += gi;
            b += gi * (static_cast<double>(x[i]) - static_cast<double>(mean[c]));
          });
        }
        each(g, base, count);
      }
    });
  });
  return sums;
}

/// dx = weight rstd (g - sum(g) / n - (x - mean) rstd^2 sum(g (x - mean)) / n) for sums over n rows. gradient(base, count) tells which
/// map holds g in these elements of whole rows, and may have put it there; it may be dx.
template <class T, class Gradient>
void input_gradient(const Stream& stream, std::int64_t R, const BeforeActivation<T>& before, const Tensor& rstd, const ColumnSums& sums, double n,
                    T* dx, const Gradient& gradient) {
  const std::int64_t C = before.C, chunk = rows_per_chunk(C);
  std::vector<T> offset(static_cast<std::size_t>(C)), slope(static_cast<std::size_t>(C));
  for (std::size_t c = 0; c < offset.size(); ++c) {
    const auto r = static_cast<double>(rstd.data<T>()[c]);
    offset[c] = static_cast<T>(sums.first[c] / n);
    slope[c] = static_cast<T>(r * r * sums.second[c] / n);
  }
  const T *ps = before.scales.data(), *po = offset.data(), *pk = slope.data(), *pm = before.mean, *px = before.x;
  stream.parallel_blocks(R, rows_per_block(C), [&](std::int64_t block_begin, std::int64_t block_end) {
    for (std::int64_t begin = block_begin; begin < block_end; begin += chunk) {
      const std::int64_t base = begin * C, count = (std::min(begin + chunk, block_end) - begin) * C;
      const T* g = gradient(base, count);
      for (std::int64_t row = base; row < base + count; row += C) {
#pragma GCC ivdep
        for (std::int64_t c = 0; c < C; ++c) dx[row + c] = ps[c] * (g[row + c] - po[c] - (px[row + c] - pm[c]) * pk[c]);
      }
    }
  });
}

/// dbias = sum(g) and dweight = rstd sum(g (x - mean)), each unless null.
template <class T>
void parameter_gradients(const ColumnSums& sums, const Tensor& rstd, Tensor* dweight, Tensor* dbias) {
  for (std::size_t c = 0; c < sums.first.size(); ++c) {
    if (dbias) dbias->data<T>()[c] = static_cast<T>(sums.first[c]);
    if (dweight) dweight->data<T>()[c] = static_cast<T>(static_cast<double>(rstd.data<T>()[c]) * sums.second[c]);
  }
}

/// Sums of the deviations from the first row, not from 0, and of their squares: the variance survives a mean that is far larger.
template <class T>
ColumnSums deviation_sums(const Stream& stream, const Tensor& x) {
  const std::int64_t C = x.dim(-1);
  const T* px = x.data<T>();
  return sum_columns(stream, x.rows(), C, [&](std::int64_t begin, std::int64_t end, double* first, double* second) {
    add_rows(begin, end, C, first, second, [&](std::int64_t i, std::int64_t c, double& a, double& b) {
      const double d = static_cast<double>(px[i]) - static_cast<double>(px[c]);
      a += d;
      b += d * d;
    });
  });
}

/// Where the statistics of a batch go.
template <class T>
struct Statistics {
  double eps, momentum;
  T *running_mean, *running_var, *mean, *rstd;

  /// Of channel c: mean and biased variance over n rows.
  void set(std::int64_t c, double m, double var, double n) const {
    const double unbiased = n > 1 ? n / (n - 1) : 1;
    mean[c] = static_cast<T>(m);
    rstd[c] = static_cast<T>(1 / std::sqrt(var + eps));
    running_mean[c] = static_cast<T>((1 - momentum) * running_mean[c] + momentum * m);
    running_var[c] = static_cast<T>((1 - momentum) * running_var[c] + momentum * var * unbiased);
  }
};

}  // namespace

void batch_norm_forward(const Stream& stream, const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor* residual,
                        Activation activation, double eps, double momentum, Tensor& running_mean, Tensor& running_var, Tensor& y,
                        Tensor& mean, Tensor& rstd) {
  dispatch_float("batch_norm", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const ColumnSums sums = deviation_sums<T>(stream, x);
    const Statistics<T> statistics{eps, momentum, running_mean.data<T>(), running_var.data<T>(), mean.data<T>(), rstd.data<T>()};
    const auto rows = static_cast<double>(x.rows());
    for (std::int64_t c = 0; c < x.dim(-1); ++c) {
      const double deviation = sums.first[static_cast<std::size_t>(c)] / rows;
      const double var = std::max(sums.second[static_cast<std::size_t>(c)] / rows - deviation * deviation, 0.0);   // NaN stays NaN
      statistics.set(c, static_cast<double>(x.data<T>()[c]) + deviation, var, rows);
    }
    normalise<T>(stream, x, weight, bias, residual, activation, mean, rstd, y);
  });
}

void batch_norm_inference(const Stream& stream, const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor* residual,
                          Activation activation, double eps, const Tensor& running_mean, const Tensor& running_var, Tensor& y,
                          Tensor& mean, Tensor& rstd) {
  dispatch_float("batch_norm", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (std::int64_t c = 0; c < x.dim(-1); ++c) {
      mean.data<T>()[c] = running_mean.data<T>()[c];
      rstd.data<T>()[c] = static_cast<T>(1 / std::sqrt(static_cast<double>(running_var.data<T>()[c]) + eps));
    }
    normalise<T>(stream, x, weight, bias, residual, activation, mean, rstd, y);
  });
}

void batch_norm_backward(const Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& bias,
                         const Tensor* residual, const Tensor& y, const Tensor& mean, const Tensor& rstd, Activation activation,
                         bool batch_statistics, Tensor* dx, Tensor* dweight, Tensor* dbias, Tensor* dresidual) {
  dispatch_float("batch_norm", dy.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const BeforeActivation<T> before(dy, x, weight, bias, residual, y, mean, rstd, activation);
    const std::int64_t C = before.C, R = dy.rows();
    const T* ps = before.scales.data();
    // g is the residual's gradient; where nobody wants that, dx holds it until the second pass.
    T* pdx = dx ? dx->data<T>() : nullptr;
    T* stored = dresidual ? dresidual->data<T>() : activation == Activation::none ? nullptr : pdx;
    const bool needs_sums = dweight || dbias || (dx && batch_statistics);
    const ColumnSums sums = gradient_sums(stream, R, before, stored, needs_sums, [&](const T* g, std::int64_t base, std::int64_t count) {
      if (!pdx || batch_statistics) return;
      for (std::int64_t row = 0; row < count; row += C) {
#pragma GCC ivdep
        for (std::int64_t c = 0; c < C; ++c) pdx[base + row + c] = g[row + c] * ps[c];
      }
    });
    parameter_gradients<T>(sums, rstd, dweight, dbias);
    if (!pdx || !batch_statistics) return;
    const T* g = stored ? stored : before.dy;
    input_gradient(stream, R, before, rstd, sums, static_cast<double>(R), pdx, [g](std::int64_t, std::int64_t) { return g; });
  });
}

void batch_norm_moments(const Stream& stream, const Tensor& x, Tensor& moments) {
  dispatch_float("batch_norm", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const ColumnSums sums = deviation_sums<T>(stream, x);
    const auto C = static_cast<std::size_t>(x.dim(-1));
    double* out = moments.data<double>();
    for (std::size_t c = 0; c < C; ++c) {
      const double deviation = sums.first[c] / static_cast<double>(x.rows());
      out[c] = static_cast<double>(x.data<T>()[c]) + deviation;
      out[C + c] = std::max(sums.second[c] - sums.first[c] * deviation, 0.0);   // NaN stays NaN
    }
  });
}

void batch_norm_combine(const Stream&, const Exchanged& moments, std::int64_t rows, double eps, double momentum, Tensor& running_mean,
                        Tensor& running_var, Tensor& mean, Tensor& rstd) {
  dispatch_float("batch_norm", mean.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Statistics<T> statistics{eps, momentum, running_mean.data<T>(), running_var.data<T>(), mean.data<T>(), rstd.data<T>()};
    const std::int64_t ranks = moments.ranks(), C = mean.dim(0);
    const auto R = static_cast<double>(rows);
    for (std::int64_t c = 0; c < C; ++c) {
      const double* rank = moments.first() + c;
      double m = rank[0], squares = rank[C];
      for (std::int64_t w = 1; w < ranks; ++w) {   // w R rows so far, and R more
        rank += moments.stride();
        const double distance = rank[0] - m, share = 1 / static_cast<double>(w + 1);
        m += distance * share;
        squares += rank[C] + distance * distance * (R * static_cast<double>(w) * share);
      }
      const double n = R * static_cast<double>(ranks);
      statistics.set(c, m, squares / n, n);
    }
  });
}

void batch_norm_apply(const Stream& stream, const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor* residual,
                      Activation activation, const Tensor& mean, const Tensor& rstd, Tensor& y) {
  dispatch_float("batch_norm", x.dtype(), [&](auto tag) {
    normalise<typename decltype(tag)::type>(stream, x, weight, bias, residual, activation, mean, rstd, y);
  });
}

void batch_norm_backward_sums(const Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& bias,
                              const Tensor* residual, const Tensor& y, const Tensor& mean, const Tensor& rstd, Activation activation,
                              Tensor* sums, Tensor* dweight, Tensor* dbias, Tensor* dresidual) {
  dispatch_float("batch_norm", dy.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const BeforeActivation<T> before(dy, x, weight, bias, residual, y, mean, rstd, activation);
    const ColumnSums local = gradient_sums(stream, dy.rows(), before, dresidual ? dresidual->data<T>() : nullptr, sums || dweight || dbias,
                                           [](const T*, std::int64_t, std::int64_t) {});
    parameter_gradients<T>(local, rstd, dweight, dbias);
    if (!sums) return;
    std::copy(local.first.begin(), local.first.end(), sums->data<double>());
    std::copy(local.second.begin(), local.second.end(), sums->data<double>() + before.C);
  });
}

void batch_norm_backward_apply(const Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& bias,
                               const Tensor* residual, const Tensor& y, const Tensor& mean, const Tensor& rstd, Activation activation,
                               const Exchanged& sums, Tensor& dx) {
  dispatch_float("batch_norm", dy.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const BeforeActivation<T> before(dy, x, weight, bias, residual, y, mean, rstd, activation);
    const std::int64_t ranks = sums.ranks(), C = before.C;
    ColumnSums total{std::vector<double>(static_cast<std::size_t>(C)), std::vector<double>(static_cast<std::size_t>(C))};
    for (std::int64_t w = 0; w < ranks; ++w) {
      const double* rank = sums.first() + w * sums.stride();
      for (std::size_t c = 0; c < total.first.size(); ++c) {
        total.first[c] += rank[c];
        total.second[c] += rank[static_cast<std::size_t>(C) + c];
      }
    }
    T* pdx = dx.data<T>();
    dispatch_activation(activation, [&](auto kind) {
      input_gradient(stream, dy.rows(), before, rstd, total, static_cast<double>(dy.rows()) * static_cast<double>(ranks), pdx,
                     [&](std::int64_t base, std::int64_t count) -> const T* {
                       if constexpr (decltype(kind)::value == Activation::none) return before.dy;
                       before.template gradient<decltype(kind)::value>(base, count, pdx + base);
                       return pdx;
                     });
    });
  });
}

}  // namespace detr::kernels::cpu
