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

/// What turns dy into the gradient of the sum that the activation is applied to.
template <class T>
struct BeforeActivation {
  std::int64_t C;
  const T *x, *mean, *scale, *bias, *residual, *y;

  /// g[i] for `count` whole rows from element `base` on; g points at the first of them.
  template <Activation kind>
  void gradient(const T* dy, std::int64_t base, std::int64_t count, T* g) const {
    if constexpr (kind == Activation::relu) {
#pragma GCC ivdep
      for (std::int64_t i = 0; i < count; ++i) g[i] = activate_backward<kind>(dy[base + i], y[base + i]);
    } else {
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

}  // namespace

void batch_norm_forward(const Stream& stream, const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor* residual,
                        Activation activation, double eps, double momentum, Tensor& running_mean, Tensor& running_var, Tensor& y,
                        Tensor& mean, Tensor& rstd) {
  dispatch_float("batch_norm", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const std::int64_t C = x.dim(-1), R = x.rows();
    const T* px = x.data<T>();
    // Deviations from the first row, not from 0: the variance survives a mean that is far larger.
    const ColumnSums sums = sum_columns(stream, R, C, [&](std::int64_t begin, std::int64_t end, double* first, double* second) {
      add_rows(begin, end, C, first, second, [&](std::int64_t i, std::int64_t c, double& a, double& b) {
        const double d = static_cast<double>(px[i]) - static_cast<double>(px[c]);
        a += d;
        b += d * d;
      });
    });
    const auto rows = static_cast<double>(R);
    const double unbiased = R > 1 ? rows / (rows - 1) : 1;
    for (std::int64_t c = 0; c < C; ++c) {
      const double deviation = sums.first[static_cast<std::size_t>(c)] / rows;
      const double m = static_cast<double>(px[c]) + deviation;
      const double var = std::max(sums.second[static_cast<std::size_t>(c)] / rows - deviation * deviation, 0.0);   // NaN stays NaN
      mean.data<T>()[c] = static_cast<T>(m);
      rstd.data<T>()[c] = static_cast<T>(1 / std::sqrt(var + eps));
      T &running_m = running_mean.data<T>()[c], &running_v = running_var.data<T>()[c];
      running_m = static_cast<T>((1 - momentum) * running_m + momentum * m);
      running_v = static_cast<T>((1 - momentum) * running_v + momentum * var * unbiased);
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
    const std::int64_t C = dy.dim(-1), R = dy.rows();
    const std::vector<T> scales = channel_scale<T>(weight, rstd);
    const T *px = x.defined() ? x.data<T>() : nullptr, *pdy = dy.data<T>(), *pm = mean.data<T>(), *ps = scales.data();
    const bool reads_y = activation == Activation::relu, reads_residual = activation == Activation::silu && residual;
    const BeforeActivation<T> before{C, px, pm, ps, bias.data<T>(), reads_residual ? residual->data<T>() : nullptr,
                                     reads_y ? y.data<T>() : nullptr};

    // First pass: g, the gradient before the activation, and its sums. It is the residual's gradient; where nobody wants that,
    // dx holds it until the second pass.
    T* pdx = dx ? dx->data<T>() : nullptr;
    T* stored = dresidual ? dresidual->data<T>() : activation == Activation::none ? nullptr : pdx;
    const bool needs_sums = dweight || dbias || (dx && batch_statistics);
    const std::int64_t chunk = 4 * std::max<std::int64_t>(1, 512 / std::max<std::int64_t>(1, C));   // rows that stay in L1
    ColumnSums sums;
    dispatch_activation(activation, [&](auto kind) {
      sums = sum_columns(stream, R, C, [&](std::int64_t block_begin, std::int64_t block_end, double* first, double* second) {
        std::vector<T> scratch(stored || activation == Activation::none ? 0 : static_cast<std::size_t>(chunk * C));
        for (std::int64_t begin = block_begin; begin < block_end; begin += chunk) {
          const std::int64_t end = std::min(begin + chunk, block_end), base = begin * C, count = (end - begin) * C;
          const T* g = pdy + base;
          if constexpr (decltype(kind)::value == Activation::none) {
            if (stored) std::copy_n(g, count, stored + base);
          } else {
            T* target = stored ? stored + base : scratch.data();
            before.template gradient<decltype(kind)::value>(pdy, base, count, target);
            g = target;
          }
          if (needs_sums) {
            const T* x_chunk = px + base;
            add_rows(0, end - begin, C, first, second, [&](std::int64_t i, std::int64_t c, double& a, double& b) {
              const double gi = g[i];
              a += gi;
              b += gi * (static_cast<double>(x_chunk[i]) - static_cast<double>(pm[c]));
            });
          }
          if (pdx && !batch_statistics) {
            for (std::int64_t row = 0; row < count; row += C) {
#pragma GCC ivdep
              for (std::int64_t c = 0; c < C; ++c) pdx[base + row + c] = g[row + c] * ps[c];
            }
          }
        }
      });
    });

    // sum(g) is dbias, rstd sum(g (x - mean)) is dweight, and
    //   dx = weight rstd (g - dbias / R - (x - mean) rstd dweight / R)
    std::vector<T> offset(static_cast<std::size_t>(C)), slope(static_cast<std::size_t>(C));
    for (std::size_t c = 0; c < offset.size(); ++c) {
      const auto r = static_cast<double>(rstd.data<T>()[c]);
      if (dbias) dbias->data<T>()[c] = static_cast<T>(sums.first[c]);
      if (dweight) dweight->data<T>()[c] = static_cast<T>(r * sums.second[c]);
      offset[c] = static_cast<T>(sums.first[c] / static_cast<double>(R));
      slope[c] = static_cast<T>(r * r * sums.second[c] / static_cast<double>(R));
    }
    if (!pdx || !batch_statistics) return;
    const T *g = stored ? stored : pdy, *po = offset.data(), *pk = slope.data();
    stream.parallel_blocks(R, rows_per_block(C), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t base = begin * C; base < end * C; base += C) {
#pragma GCC ivdep
        for (std::int64_t c = 0; c < C; ++c) pdx[base + c] = ps[c] * (g[base + c] - po[c] - (px[base + c] - pm[c]) * pk[c]);
      }
    });
  });
}

}  // namespace detr::kernels::cpu
