// Batch norm over the rows of several ranks, on CUDA: kernels/batch_norm.h, from batch_norm_moments on.
#include <cmath>
#include <limits>

#include "kernels/batch_norm.h"
#include "tests/gpu.h"
#include "tests/kernels/values.h"

using namespace detr;
using namespace detr::test;
using kernels::Activation;

namespace {

constexpr double kEps = 1e-5, kMomentum = 0.1;
constexpr std::int64_t kRank = 1;   // whose part of the backward is looked at

/// Inputs as the GPU sees them, in f64, for W ranks of R rows: maps (W, R, C) rounded to `dtype`, channels to f32. Means are near 1, and
/// other ones on each rank. The moments are the oracle's; its statistics and kRank's y (R, C) are rounded: each step gets equal inputs on both.
struct Case {
  std::int64_t W, R, C;
  DType dtype;
  Activation activation;
  bool has_residual;
  Tensor x, residual, dy, weight, bias, running_mean, running_var, moments, mean, rstd, y;

  Case(std::int64_t ranks, std::int64_t rows, std::int64_t channels, DType dtype_, Activation activation_, bool has_residual_, double center = 1)
      : W(ranks), R(rows), C(channels), dtype(dtype_), activation(activation_), has_residual(has_residual_) {
    const Shape map{W, R, C}, channel{C};
    x = random(map, DType::f64, 1);
    for (std::int64_t i = 0; i < x.numel(); ++i) x.data<double>()[i] += center + 0.5 * static_cast<double>(i / (R * C));
    x = rounded(x, dtype);
    residual = rounded(random(map, DType::f64, 2), dtype);
    dy = rounded(random(map, DType::f64, 3), dtype);
    weight = rounded(random(channel, DType::f64, 4), DType::f32);
    bias = rounded(random(channel, DType::f64, 5), DType::f32);
    running_mean = random(channel, DType::f64, 6);
    running_var = random(channel, DType::f64, 7);
    for (double& v : running_mean.span<double>()) v += 1;
    for (double& v : running_var.span<double>()) v = 1 + v * v;
    running_mean = rounded(running_mean, DType::f32);
    running_var = rounded(running_var, DType::f32);
    moments = host_zeros({W, 2, C}, DType::f64);
    for (std::int64_t w = 0; w < W; ++w) {
      Tensor mine = moments.view(w * 2 * C, {2, C});
      kernels::batch_norm_moments(Stream::cpu(1), rank_of(x, w), mine);
    }
    const Statistics statistics = oracle_statistics();
    mean = rounded(statistics.mean, DType::f32);
    rstd = rounded(statistics.rstd, DType::f32);
    y = rounded(oracle_apply(), dtype);
  }
  Tensor rank_of(const Tensor& map, std::int64_t rank) const { return map.slice(rank, rank + 1).reshape({R, C}); }
  const Tensor* if_added(const Tensor& tensor) const { return has_residual ? &tensor : nullptr; }

  struct Statistics {
    Tensor mean, rstd, running_mean, running_var;
  };
  Statistics oracle_statistics() const {
    Statistics s{host_zeros({C}, DType::f64), host_zeros({C}, DType::f64), rounded(running_mean, DType::f32), rounded(running_var, DType::f32)};
    kernels::batch_norm_combine(Stream::cpu(1), moments, R, kEps, kMomentum, s.running_mean, s.running_var, s.mean, s.rstd);
    return s;
  }
  /// (R, C) of kRank.
  Tensor oracle_apply() const {
    Tensor result = host_zeros({R, C}, DType::f64);
    const Tensor added = rank_of(residual, kRank);
    kernels::batch_norm_apply(Stream::cpu(1), rank_of(x, kRank), weight, bias, if_added(added), activation, mean, rstd, result);
    return result;
  }
};

/// Calls check on each combination. Widths with and without vectors, in part beyond a tile, of several tiles; rows fewer and more than a
/// block's.
void for_each_case(const std::function<void(const Case&)>& check) {
  struct Size {
    std::int64_t W, R, C;
  };
  for (const Size& size : {Size{5, 1, 5}, Size{3, 31, 33}, Size{2, 33, 31}, Size{4, 33, 24}, Size{2, 900, 72}}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      for (const Activation activation : {Activation::none, Activation::relu, Activation::silu}) {
        for (const bool residual : {false, true}) {
          INFO(size.W << " ranks of (" << size.R << ", " << size.C << ") " << dtype << " activation " << static_cast<int>(activation)
                      << " residual " << residual);
          check(Case(size.W, size.R, size.C, dtype, activation, residual));
        }
      }
    }
  }
}

/// Moments of one rank, whose x may start `shift` elements into its memory.
Tensor gpu_moments(const Case& c, std::int64_t rank, std::int64_t shift = 0) {
  const Tensor x = c.rank_of(c.x, rank);
  Tensor memory = host_zeros({shift + x.numel()}, DType::f64);
  std::copy(x.span<double>().begin(), x.span<double>().end(), memory.span<double>().begin() + shift);
  const Guarded moments({2, c.C}, DType::f64);
  Tensor out = moments.tensor;
  kernels::batch_norm_moments(gpu(), on_gpu(memory, c.dtype).view(shift, x.shape()), out);
  return moments.values();
}

/// Means within `tolerance` of the deviation, and squared deviations relative to themselves.
void expect_moments(const Case& c, const Tensor& got, std::int64_t rank, double tolerance) {
  const double* wanted = c.moments.data<double>() + rank * 2 * c.C;
  for (std::int64_t i = 0; i < c.C; ++i) {
    const double deviation = std::sqrt(wanted[c.C + i] / static_cast<double>(c.R));
    expect_close(got.data<double>()[i], wanted[i], 1e-12, tolerance * deviation);
    expect_close(got.data<double>()[c.C + i], wanted[c.C + i], tolerance, 1e-12);
  }
}

constexpr int kAll = 15;   // sums, dweight, dbias, dresidual: bits 0 to 3

/// Undefined where not wanted. dx is made of the sums of all ranks by the oracle, so that the two get equal inputs.
struct Gradients {
  Tensor sums, dweight, dbias, dresidual, dx;
};

/// The oracle's sums of all ranks, (W, 2, C).
Tensor oracle_sums(const Case& c) {
  Tensor all = host_zeros({c.W, 2, c.C}, DType::f64);
  for (std::int64_t w = 0; w < c.W; ++w) {
    Tensor mine = all.view(w * 2 * c.C, {2, c.C}), y = host_zeros({c.R, c.C}, DType::f64);
    const Tensor added = c.rank_of(c.residual, w);
    kernels::batch_norm_apply(Stream::cpu(1), c.rank_of(c.x, w), c.weight, c.bias, c.if_added(added), c.activation, c.mean, c.rstd, y);
    kernels::batch_norm_backward_sums(Stream::cpu(1), c.rank_of(c.dy, w), c.rank_of(c.x, w), c.weight, c.bias, c.if_added(added),
                                      w == kRank ? c.y : y, c.mean, c.rstd, c.activation, &mine, nullptr, nullptr, nullptr);
  }
  return all;
}

Gradients oracle_backward(const Case& c, const Tensor& all) {
  Gradients g{host_zeros({2, c.C}, DType::f64), host_zeros({c.C}, DType::f64), host_zeros({c.C}, DType::f64), host_zeros({c.R, c.C}, DType::f64),
              host_zeros({c.R, c.C}, DType::f64)};
  const Tensor x = c.rank_of(c.x, kRank), dy = c.rank_of(c.dy, kRank), added = c.rank_of(c.residual, kRank);
  kernels::batch_norm_backward_sums(Stream::cpu(1), dy, x, c.weight, c.bias, c.if_added(added), c.y, c.mean, c.rstd, c.activation, &g.sums,
                                    &g.dweight, &g.dbias, &g.dresidual);
  kernels::batch_norm_backward_apply(Stream::cpu(1), dy, x, c.weight, c.bias, c.if_added(added), c.y, c.mean, c.rstd, c.activation, all, g.dx);
  return g;
}

Gradients gpu_backward(const Case& c, const Tensor& all, int wanted = kAll) {
  const Tensor x = on_gpu(c.rank_of(c.x, kRank), c.dtype), dy = on_gpu(c.rank_of(c.dy, kRank), c.dtype);
  const Tensor added = on_gpu(c.rank_of(c.residual, kRank), c.dtype), weight = on_gpu(c.weight, DType::f32), bias = on_gpu(c.bias, DType::f32);
  const Tensor mean = on_gpu(c.mean, DType::f32), rstd = on_gpu(c.rstd, DType::f32);
  const Tensor y = c.activation == Activation::relu ? on_gpu(c.y, c.dtype) : Tensor();
  Guarded sums({2, c.C}, DType::f64), dweight({c.C}, DType::f32), dbias({c.C}, DType::f32), dresidual({c.R, c.C}, c.dtype), dx({c.R, c.C}, c.dtype);
  const auto if_wanted = [wanted](int bit, Guarded& g) { return wanted >> bit & 1 ? &g.tensor : nullptr; };
  const auto values = [wanted](int bit, const Guarded& g) { return wanted >> bit & 1 ? g.values() : Tensor(); };
  kernels::batch_norm_backward_sums(gpu(), dy, x, weight, bias, c.if_added(added), y, mean, rstd, c.activation, if_wanted(0, sums),
                                    if_wanted(1, dweight), if_wanted(2, dbias), if_wanted(3, dresidual));
  // As autograd does: from the residual's gradient where there is one.
  const bool has_g = wanted >> 3 & 1;
  kernels::batch_norm_backward_apply(gpu(), has_g ? dresidual.tensor : dy, x, weight, bias, c.if_added(added), y, mean, rstd,
                                     has_g ? Activation::none : c.activation, gpu().to_device(all), dx.tensor);
  gpu().wait();
  return {values(0, sums), values(1, dweight), values(2, dbias), values(3, dresidual), dx.values()};
}

void expect_subset(const Gradients& got, const Gradients& full) {
  if (got.sums.defined()) expect_same_bits(got.sums, full.sums);
  if (got.dweight.defined()) expect_same_bits(got.dweight, full.dweight);
  if (got.dbias.defined()) expect_same_bits(got.dbias, full.dbias);
  if (got.dresidual.defined()) expect_same_bits(got.dresidual, full.dresidual);
  expect_same_bits(got.dx, full.dx);
}

}  // namespace

TEST_CASE("shared batch_norm: CUDA's forward agrees with the CPU's", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  for_each_case([](const Case& c) {
    for (std::int64_t w = 0; w < c.W; ++w) {
      const Tensor moments = gpu_moments(c, w);
      expect_moments(c, moments, w, 1e-6);   // float sums of short runs are good to a few 2^-24
      expect_same_bits(gpu_moments(c, w), moments);
    }
    Guarded mean({c.C}, DType::f32), rstd({c.C}, DType::f32), y({c.R, c.C}, c.dtype);
    Tensor running_mean = on_gpu(c.running_mean, DType::f32), running_var = on_gpu(c.running_var, DType::f32);
    kernels::batch_norm_combine(gpu(), gpu().to_device(c.moments), c.R, kEps, kMomentum, running_mean, running_var, mean.tensor, rstd.tensor);
    // In double on both, then rounded to float.
    const Case::Statistics wanted = c.oracle_statistics();
    expect_near(mean.values(), wanted.mean, 1e-7, 0);
    expect_near(rstd.values(), wanted.rstd, 1e-7, 0);
    expect_near(from_gpu(running_mean), wanted.running_mean, 1e-7, 0);
    expect_near(from_gpu(running_var), wanted.running_var, 1e-7, 0);

    const Tensor added = on_gpu(c.rank_of(c.residual, kRank), c.dtype);
    kernels::batch_norm_apply(gpu(), on_gpu(c.rank_of(c.x, kRank), c.dtype), on_gpu(c.weight, DType::f32), on_gpu(c.bias, DType::f32),
                              c.if_added(added), c.activation, on_gpu(c.mean, DType::f32), on_gpu(c.rstd, DType::f32), y.tensor);
    // One rounding to the dtype, after some operations in float on terms up to a few times the largest result.
    expect_near(y.values(), c.oracle_apply(), 1.5 * roundoff(c.dtype) + 4e-6, c.dtype == DType::bf16 ? 0.01 : 1);
  });
}

TEST_CASE("shared batch_norm: CUDA's backward agrees with the CPU's", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  for_each_case([](const Case& c) {
    const Tensor all = oracle_sums(c);
    const Gradients got = gpu_backward(c, all), wanted = oracle_backward(c, all);
    // Rounded before the activation and at the end; in f32 some operations on terms as large as the result. Sums: an error of some 2^-24
    // for each of the terms, and where the terms themselves are rounded to bf16, sqrt(R) roundoffs of one.
    const double tolerance = 3 * roundoff(c.dtype) + 4e-6;
    const bool rounds = c.activation == Activation::silu && c.dtype == DType::bf16;
    const double sum_tolerance = 1e-6 + 2e-7 * std::sqrt(static_cast<double>(c.R)) + (rounds ? 4 * roundoff(c.dtype) : 0);
    expect_near(got.sums, wanted.sums, sum_tolerance);
    expect_near(got.dweight, wanted.dweight, sum_tolerance);
    expect_near(got.dbias, wanted.dbias, sum_tolerance);
    expect_near(got.dresidual, wanted.dresidual, tolerance);
    expect_near(got.dx, wanted.dx, tolerance);
    expect_subset(gpu_backward(c, all), got);
  });
}

TEST_CASE("shared batch_norm: any subset of gradients has the same bits on CUDA", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const Activation activation : {Activation::none, Activation::relu, Activation::silu}) {
      for (const bool residual : {false, true}) {
        const Case c(2, 217, 24, dtype, activation, residual);
        const Tensor all = oracle_sums(c);
        const Gradients full = gpu_backward(c, all);
        for (int wanted = 0; wanted < kAll; ++wanted) expect_subset(gpu_backward(c, all, wanted), full);
      }
    }
  }
}

TEST_CASE("shared batch_norm: one rank has the fused op's numbers on CUDA", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  const Case c(2, 333, 40, DType::f32, Activation::silu, false);
  const Tensor x = on_gpu(c.rank_of(c.x, 0), DType::f32), weight = on_gpu(c.weight, DType::f32), bias = on_gpu(c.bias, DType::f32);
  const auto run = [&](bool fused) {
    std::vector<Tensor> out = {on_gpu(c.running_mean, DType::f32), on_gpu(c.running_var, DType::f32), gpu().empty_like(x), gpu().empty_like(weight),
                               gpu().empty_like(weight)};
    Tensor moments = gpu().empty({1, 2, c.C}, DType::f64), mine = moments.reshape({2, c.C});
    if (fused) {
      kernels::batch_norm_forward(gpu(), x, weight, bias, nullptr, c.activation, kEps, kMomentum, out[0], out[1], out[2], out[3], out[4]);
    } else {
      kernels::batch_norm_moments(gpu(), x, mine);
      kernels::batch_norm_combine(gpu(), moments, c.R, kEps, kMomentum, out[0], out[1], out[3], out[4]);
      kernels::batch_norm_apply(gpu(), x, weight, bias, nullptr, c.activation, out[3], out[4], out[2]);
    }
    for (Tensor& tensor : out) tensor = from_gpu(tensor);
    return out;
  };
  const std::vector<Tensor> got = run(false), wanted = run(true);
  // The same sums; what is made of them in double may round to another float, and y follows it.
  for (std::size_t i = 0; i < got.size(); ++i) expect_near(got[i], wanted[i], 1e-6);
}

TEST_CASE("shared batch_norm: a far mean, odd places, NaN on CUDA", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  const Case far(2, 1900, 20, DType::f32, Activation::none, false, 1000);   // a thousand times the deviation
  for (std::int64_t w = 0; w < 2; ++w) expect_moments(far, gpu_moments(far, w), w, 1e-6);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Case odd(2, 93, 24, dtype, Activation::none, false);
    expect_moments(odd, gpu_moments(odd, kRank, 1), kRank, 1e-6);
  }
  Case spoilt(2, 31, 8, DType::bf16, Activation::none, false);
  spoilt.x.data<double>()[8 * 13 + 2] = std::numeric_limits<double>::quiet_NaN();
  const Tensor moments = gpu_moments(spoilt, 0);
  for (std::int64_t i = 0; i < 16; ++i) CHECK(std::isnan(moments.data<double>()[i]) == (i % 8 == 2));
}
