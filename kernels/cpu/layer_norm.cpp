#include "kernels/layer_norm.h"

#include <array>
#include <cmath>

#include "kernels/cpu/column_sums.h"
#include "kernels/dispatch.h"

namespace detr::kernels::cpu {
namespace {

/// Sum of term(i) for i in [0, count), in 16 interleaved lanes that are then added in order: a fixed order that vectorises.
template <class Term>
double sum_row(std::int64_t count, Term term) {
  constexpr int kLanes = 16;
  std::array<double, kLanes> lanes{};
  double* lane = lanes.data();
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int k = 0; k < kLanes; ++k) lane[k] += term(i + k);
  }
  for (int k = 0; i < count; ++i, ++k) lane[k] += term(i);
  double sum = 0;
  for (const double part : lanes) sum += part;
  return sum;
}

}  // namespace

void layer_norm_forward(const Stream& stream, const Tensor& x, const Tensor* residual, const Tensor& weight, const Tensor& bias,
                        double eps, Tensor* sum, Tensor& y, Tensor& mean, Tensor& rstd) {
  dispatch_float("layer_norm", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const std::int64_t D = x.dim(-1);
    const T *px = x.data<T>(), *pr = residual ? residual->data<T>() : nullptr, *pw = weight.data<T>(), *pb = bias.data<T>();
    T *psum = sum ? sum->data<T>() : nullptr, *py = y.data<T>(), *pmean = mean.data<T>(), *prstd = rstd.data<T>();
    stream.parallel_blocks(x.rows(), rows_per_block(D), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t r = begin; r < end; ++r) {
        const T* s = px + r * D;
        if (pr) {
          T* added = psum + r * D;
#pragma GCC ivdep
          for (std::int64_t i = 0; i < D; ++i) added[i] = s[i] + pr[r * D + i];
          s = added;
        }
        const double m = sum_row(D, [s](std::int64_t i) { return static_cast<double>(s[i]); }) / static_cast<double>(D);
        const double var = sum_row(D, [s, m](std::int64_t i) { return (s[i] - m) * (s[i] - m); }) / static_cast<double>(D);
        const T mean_r = pmean[r] = static_cast<T>(m), rstd_r = prstd[r] = static_cast<T>(1 / std::sqrt(var + eps));
        T* out = py + r * D;
#pragma GCC ivdep
        for (std::int64_t i = 0; i < D; ++i) out[i] = (s[i] - mean_r) * rstd_r * pw[i] + pb[i];
      }
    });
  });
}

void layer_norm_backward(const Stream& stream, const Tensor& dy, const Tensor& sum, const Tensor& weight, const Tensor& mean,
                         const Tensor& rstd, Tensor* ds, Tensor* dweight, Tensor* dbias) {
  dispatch_float("layer_norm", sum.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const std::int64_t D = sum.dim(-1), R = sum.rows();
    const T *pdy = dy.data<T>(), *psum = sum.data<T>(), *pw = weight.data<T>(), *pmean = mean.data<T>(), *prstd = rstd.data<T>();
    if (ds) {
      // With g = dy weight and n = (s - mean) rstd: ds = rstd (g - mean(g) - n mean(g n)), means over the row.
      T* pds = ds->data<T>();
      stream.parallel_blocks(R, rows_per_block(D), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t r = begin; r < end; ++r) {
          const T *g = pdy + r * D, *s = psum + r * D, mean_r = pmean[r], rstd_r = prstd[r];
          const double sum_g = sum_row(D, [=](std::int64_t i) { return static_cast<double>(g[i]) * pw[i]; });
          const double sum_gn =
              rstd_r * sum_row(D, [=](std::int64_t i) { return static_cast<double>(g[i]) * pw[i] * (static_cast<double>(s[i]) - mean_r); });
          const T mean_g = static_cast<T>(sum_g / static_cast<double>(D)), mean_gn = static_cast<T>(sum_gn / static_cast<double>(D));
          T* out = pds + r * D;
#pragma GCC ivdep
          for (std::int64_t i = 0; i < D; ++i) out[i] = rstd_r * (g[i] * pw[i] - mean_g - (s[i] - mean_r) * rstd_r * mean_gn);
        }
      });
    }
    if (!dweight && !dbias) return;
    const ColumnSums sums = sum_columns(stream, R, D, [&](std::int64_t begin, std::int64_t end, double* first, double* second) {
      for (std::int64_t r = begin; r < end; ++r) {
        const T *g = pdy + r * D, *s = psum + r * D;
        const double mean_r = pmean[r], rstd_r = prstd[r];
#pragma GCC ivdep
        for (std::int64_t i = 0; i < D; ++i) {
          const double gi = g[i];
          first[i] += gi;
          second[i] += gi * ((s[i] - mean_r) * rstd_r);
        }
      }
    });
    if (dbias) std::transform(sums.first.begin(), sums.first.end(), dbias->data<T>(), [](double v) { return static_cast<T>(v); });
    if (dweight) std::transform(sums.second.begin(), sums.second.end(), dweight->data<T>(), [](double v) { return static_cast<T>(v); });
  });
}

}  // namespace detr::kernels::cpu
