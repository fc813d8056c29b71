#include "kernels/batch_norm.h"

#include <cmath>
#include <limits>

#include "tests/gpu.h"
#include "tests/kernels/values.h"

using namespace detr;
using namespace detr::test;
using kernels::Activation;

namespace {

constexpr Activation kActivations[] = {Activation::none, Activation::relu, Activation::silu};

/// Inputs as the GPU sees them, in f64: maps rounded to `dtype`, channels to f32. Means are near 1, so that errors can be measured
/// by them. `mean`, `rstd` and `y`, which the backward reads, are the oracle's, rounded: the two backwards get equal inputs.
struct Case {
  DType dtype;
  Activation activation;
  bool has_residual, batch;
  double eps = 1e-5, momentum = 0.1;
  Tensor x, residual, dy, weight, bias, running_mean, running_var, y, mean, rstd;

  Case(const Shape& shape, DType dtype_, Activation activation_, bool has_residual_, bool batch_, double center = 1)
      : dtype(dtype_), activation(activation_), has_residual(has_residual_), batch(batch_) {
    const Shape channels{shape[-1]};
    x = random(shape, DType::f64, 1);
    for (double& v : x.span<double>()) v += center;
    x = rounded(x, dtype);
    residual = rounded(random(shape, DType::f64, 2), dtype);
    dy = rounded(random(shape, DType::f64, 3), dtype);
    weight = rounded(random(channels, DType::f64, 4), DType::f32);
    bias = rounded(random(channels, DType::f64, 5), DType::f32);
    running_mean = random(channels, DType::f64, 6);
    running_var = random(channels, DType::f64, 7);
    for (double& v : running_mean.span<double>()) v += 1;
    for (double& v : running_var.span<double>()) v = 1 + v * v;
    running_mean = rounded(running_mean, DType::f32);
    running_var = rounded(running_var, DType::f32);
  }
  double sum_tolerance() const {
    // Float sums of short runs: an error of some 2^-24 sum |term|, where the result is about sqrt(R) terms large. The gradient
    // before SiLU is rounded to bf16, which shifts a sum of R of them by about sqrt(R) roundoffs of a term.
    const double rows = static_cast<double>(x.rows());
    return 1e-6 + 2e-7 * std::sqrt(rows) + (activation == Activation::silu && dtype == DType::bf16 ? 4 * roundoff(dtype) : 0);
  }
  double map_floor() const { return dtype == DType::bf16 ? 0.01 : 1; }
};

struct Forward {
  Tensor y, mean, rstd, running_mean, running_var;
};

/// The CPU's forward in f64.
Forward oracle_forward(const Case& c) {
  const Shape channels{c.x.dim(-1)};
  Forward f{host_zeros(c.x.shape(), DType::f64), host_zeros(channels, DType::f64), host_zeros(channels, DType::f64),
            rounded(c.running_mean, DType::f32), rounded(c.running_var, DType::f32)};
  const Tensor* residual = c.has_residual ? &c.residual : nullptr;
  if (c.batch) {
    kernels::batch_norm_forward(Stream::cpu(1), c.x, c.weight, c.bias, residual, c.activation, c.eps, c.momentum, f.running_mean, f.running_var, f.y,
                                f.mean, f.rstd);
  } else {
    kernels::batch_norm_inference(Stream::cpu(1), c.x, c.weight, c.bias, residual, c.activation, c.eps, f.running_mean, f.running_var, f.y, f.mean,
                                  f.rstd);
  }
  return f;
}

/// The GPU's; x may start `shift` elements into its memory.
Forward gpu_forward(const Case& c, std::int64_t shift = 0) {
  const Shape channels{c.x.dim(-1)};
  Tensor memory = host_zeros({shift + c.x.numel()}, DType::f64);
  std::copy(c.x.span<double>().begin(), c.x.span<double>().end(), memory.span<double>().begin() + shift);
  const Tensor x = on_gpu(memory, c.dtype).view(shift, c.x.shape()), residual = on_gpu(c.residual, c.dtype);
  const Tensor weight = on_gpu(c.weight, DType::f32), bias = on_gpu(c.bias, DType::f32);
  Tensor running_mean = on_gpu(c.running_mean, DType::f32), running_var = on_gpu(c.running_var, DType::f32);
  Guarded y(c.x.shape(), c.dtype), mean(channels, DType::f32), rstd(channels, DType::f32);
  const Tensor* added = c.has_residual ? &residual : nullptr;
  if (c.batch) {
    kernels::batch_norm_forward(gpu(), x, weight, bias, added, c.activation, c.eps, c.momentum, running_mean, running_var, y.tensor, mean.tensor,
                                rstd.tensor);
  } else {
    kernels::batch_norm_inference(gpu(), x, weight, bias, added, c.activation, c.eps, running_mean, running_var, y.tensor, mean.tensor, rstd.tensor);
  }
  return {y.values(), mean.values(), rstd.values(), from_gpu(running_mean), from_gpu(running_var)};
}

void expect_statistics(const Forward& got, const Forward& wanted) {
  // Sums of thousands of floats, by parts, are good to a few 2^-24 of the deviation.
  expect_near(got.mean, wanted.mean, 1e-6);
  expect_near(got.rstd, wanted.rstd, 1e-6, 0);
  expect_near(got.running_mean, wanted.running_mean, 1e-6);
  expect_near(got.running_var, wanted.running_var, 1e-6, 0);
}

void expect_forward(const Case& c, const Forward& got) {
  const Forward wanted = oracle_forward(c);
  expect_statistics(got, wanted);
  // One rounding to the dtype, after some operations in float on terms up to a few times the largest result.
  expect_near(got.y, wanted.y, 1.5 * roundoff(c.dtype) + 4e-6, c.map_floor());
}

constexpr int kAll = 15;   // dx, dweight, dbias, dresidual: bits 0 to 3

/// The wanted gradients; undefined where not.
struct Gradients {
  Tensor dx, dweight, dbias, dresidual;
};

Gradients oracle_backward(const Case& c) {
  const Shape channels{c.x.dim(-1)};
  Gradients g{host_zeros(c.x.shape(), DType::f64), host_zeros(channels, DType::f64), host_zeros(channels, DType::f64),
              host_zeros(c.x.shape(), DType::f64)};
  kernels::batch_norm_backward(Stream::cpu(1), c.dy, c.x, c.weight, c.bias, c.has_residual ? &c.residual : nullptr, c.y, c.mean, c.rstd, c.activation,
                               c.batch, &g.dx, &g.dweight, &g.dbias, &g.dresidual);
  return g;
}

Gradients gpu_backward(const Case& c, int wanted = kAll, bool give_x = true) {
  const Shape channels{c.x.dim(-1)};
  const Tensor dy = on_gpu(c.dy, c.dtype), x = give_x ? on_gpu(c.x, c.dtype) : Tensor(), residual = on_gpu(c.residual, c.dtype);
  const Tensor y = c.activation == Activation::relu ? on_gpu(c.y, c.dtype) : Tensor();
  Guarded dx(c.x.shape(), c.dtype), dresidual(c.x.shape(), c.dtype), dweight(channels, DType::f32), dbias(channels, DType::f32);
  const auto if_wanted = [wanted](int bit, Guarded& g) { return wanted >> bit & 1 ? &g.tensor : nullptr; };
  const auto values = [wanted](int bit, const Guarded& g) { return wanted >> bit & 1 ? g.values() : Tensor(); };
  kernels::batch_norm_backward(gpu(), dy, x, on_gpu(c.weight, DType::f32), on_gpu(c.bias, DType::f32), c.has_residual ? &residual : nullptr, y,
                               on_gpu(c.mean, DType::f32), on_gpu(c.rstd, DType::f32), c.activation, c.batch, if_wanted(0, dx), if_wanted(1, dweight),
                               if_wanted(2, dbias), if_wanted(3, dresidual));
  gpu().wait();
  return {values(0, dx), values(1, dweight), values(2, dbias), values(3, dresidual)};
}

/// Puts in what the backward reads of the forward.
Case with_forward(Case c) {
  const Forward f = oracle_forward(c);
  c.y = rounded(f.y, c.dtype);
  c.mean = rounded(f.mean, DType::f32);
  c.rstd = rounded(f.rstd, DType::f32);
  return c;
}

void expect_backward(const Case& c, const Gradients& got) {
  const Gradients wanted = oracle_backward(c);
  // Rounded before the activation and at the end; in f32 some operations on terms as large as the result.
  const double tolerance = 3 * roundoff(c.dtype) + 4e-6;
  expect_near(got.dx, wanted.dx, tolerance);
  expect_near(got.dresidual, wanted.dresidual, tolerance);
  expect_near(got.dweight, wanted.dweight, c.sum_tolerance());
  expect_near(got.dbias, wanted.dbias, c.sum_tolerance());
}

/// Every subset of the wanted gradients gives the bits of `full`.
void expect_subset(const Gradients& got, const Gradients& full) {
  if (got.dx.defined()) expect_same_bits(got.dx, full.dx);
  if (got.dweight.defined()) expect_same_bits(got.dweight, full.dweight);
  if (got.dbias.defined()) expect_same_bits(got.dbias, full.dbias);
  if (got.dresidual.defined()) expect_same_bits(got.dresidual, full.dresidual);
}

/// Calls check on each combination of shape, dtype, activation, residual and kind of statistics. Widths with and without vectors,
/// with a tile in part beyond the last column, with several tiles; rows fewer and more than a block's.
void for_each_case(const std::function<void(const Case&)>& check) {
  for (const Shape& shape : {Shape{1, 1, 1, 5}, Shape{1, 1, 1, 8}, Shape{31, 3}, Shape{33, 33}, Shape{1, 31, 33, 24}, Shape{1, 40, 40, 256}}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      for (const Activation activation : kActivations) {
        for (const int bits : {0, 1, 2, 3}) {
          INFO(shape << " " << dtype << " activation " << static_cast<int>(activation) << " residual " << (bits & 1) << " batch " << (bits >> 1));
          check(Case(shape, dtype, activation, bits & 1, bits >> 1));
        }
      }
    }
  }
}

}  // namespace

TEST_CASE("batch_norm: CUDA's forward agrees with the CPU's", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  for_each_case([](const Case& c) {
    const Forward got = gpu_forward(c), again = gpu_forward(c);
    expect_forward(c, got);
    expect_same_bits(again.y, got.y);
    expect_same_bits(again.mean, got.mean);
    expect_same_bits(again.rstd, got.rstd);
    if (!c.batch) expect_same_bits(got.running_var, c.running_var);
  });
}

TEST_CASE("batch_norm: CUDA's backward agrees with the CPU's", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  for_each_case([](const Case& plain) {
    const Case c = with_forward(plain);
    const Gradients got = gpu_backward(c);
    expect_backward(c, got);
    expect_subset(gpu_backward(c), got);
  });
}

TEST_CASE("batch_norm: any subset of gradients has the same bits on CUDA", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const Activation activation : kActivations) {
      for (const int bits : {0, 1, 2, 3}) {
        const Case c = with_forward(Case({7, 31, 24}, dtype, activation, bits & 1, bits >> 1));
        const Gradients full = gpu_backward(c);
        for (int wanted = 0; wanted < kAll; ++wanted) expect_subset(gpu_backward(c, wanted), full);
        // dx and dresidual alone, for given statistics, without x.
        if (!c.batch && activation != Activation::silu) expect_subset(gpu_backward(c, 0b1001, false), full);
      }
    }
  }
}

TEST_CASE("batch_norm: many rows and a far mean on CUDA", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  const Case tall = with_forward(Case({2300000, 1}, DType::bf16, Activation::relu, false, true));   // several runs in each thread
  expect_forward(tall, gpu_forward(tall));
  expect_backward(tall, gpu_backward(tall));
  const Case far({57, 33, 20}, DType::f32, Activation::none, false, true, 1000);   // a thousand times the deviation
  expect_statistics(gpu_forward(far), oracle_forward(far));
}

TEST_CASE("batch_norm: no rows, odd places, NaN on CUDA", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  const Case none = with_forward(Case({0, 2, 2, 3}, DType::bf16, Activation::relu, true, false));
  expect_forward(none, gpu_forward(none));
  expect_backward(none, gpu_backward(none));   // sums of nothing: zeros
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Case odd({3, 31, 24}, dtype, Activation::silu, true, true);
    expect_forward(odd, gpu_forward(odd, 1));
  }
  Case spoilt({1, 31, 8}, DType::bf16, Activation::relu, false, true);
  spoilt.x.data<double>()[8 * 13 + 2] = std::numeric_limits<double>::quiet_NaN();
  const Forward got = gpu_forward(spoilt), wanted = oracle_forward(spoilt);
  expect_near(got.mean, wanted.mean, 1e-6);
  expect_near(got.rstd, wanted.rstd, 1e-6);
  expect_near(got.y, wanted.y, 2 * roundoff(DType::bf16));
}
