#include "kernels/layer_norm.h"

#include <cmath>

#include "tests/gpu.h"
#include "tests/kernels/values.h"

using namespace detr;
using namespace detr::test;

namespace {

/// Inputs as the GPU sees them, in f64: rows rounded to `dtype`, weights to f32. `sum`, `mean` and `rstd` are what the backward
/// reads: the oracle's, rounded, so that the two backwards get equal inputs.
struct Case {
  DType dtype;
  bool has_residual;
  double eps = 1e-5;
  Tensor x, residual, dy, weight, bias, sum, mean, rstd;

  Case(const Shape& shape, DType dtype_, bool has_residual_) : dtype(dtype_), has_residual(has_residual_) {
    x = rounded(random(shape, DType::f64, 1), dtype);
    residual = rounded(random(shape, DType::f64, 2), dtype);
    dy = rounded(random(shape, DType::f64, 3), dtype);
    weight = rounded(random({shape[-1]}, DType::f64, 4), DType::f32);
    bias = rounded(random({shape[-1]}, DType::f64, 5), DType::f32);
    sum = host_zeros(shape, DType::f64);
    for (std::int64_t i = 0; i < x.numel(); ++i) sum.data<double>()[i] = x.data<double>()[i] + (has_residual ? residual.data<double>()[i] : 0);
    sum = rounded(sum, dtype);
  }
};

struct Forward {
  Tensor sum, y, mean, rstd;
};

/// The CPU's forward in f64 of the sum as it is stored.
Forward oracle_forward(const Case& c) {
  Forward f{c.sum, host_zeros(c.x.shape(), DType::f64), host_zeros({c.x.rows()}, DType::f64), host_zeros({c.x.rows()}, DType::f64)};
  kernels::layer_norm_forward(Stream::cpu(1), c.sum, nullptr, c.weight, c.bias, c.eps, nullptr, f.y, f.mean, f.rstd);
  return f;
}

/// The GPU's; weight and bias may start `shift` elements into their memory.
Forward gpu_forward(const Case& c, std::int64_t shift = 0) {
  const std::int64_t D = c.x.dim(-1);
  Tensor parameters = host_zeros({shift + 2 * D}, DType::f64);
  std::copy_n(c.weight.data<double>(), D, parameters.data<double>() + shift);
  std::copy_n(c.bias.data<double>(), D, parameters.data<double>() + shift + D);
  parameters = on_gpu(parameters, DType::f32);
  const Tensor x = on_gpu(c.x, c.dtype), residual = on_gpu(c.residual, c.dtype);
  Guarded sum(c.x.shape(), c.dtype), y(c.x.shape(), c.dtype), mean({c.x.rows()}, DType::f32), rstd({c.x.rows()}, DType::f32);
  kernels::layer_norm_forward(gpu(), x, c.has_residual ? &residual : nullptr, parameters.view(shift, {D}), parameters.view(shift + D, {D}), c.eps,
                              c.has_residual ? &sum.tensor : nullptr, y.tensor, mean.tensor, rstd.tensor);
  return {c.has_residual ? sum.values() : c.sum, y.values(), mean.values(), rstd.values()};
}

void expect_forward(const Case& c, const Forward& got) {
  const Forward wanted = oracle_forward(c);
  expect_same_bits(got.sum, wanted.sum);
  // Sums of D floats in lanes of a warp: an error of a few 2^-24 of terms up to 2, where means may be small.
  for (std::int64_t i = 0; i < c.x.rows(); ++i) expect_close(got.mean.data<double>()[i], wanted.mean.data<double>()[i], 1e-6, 1e-6);
  // The variance is a sum of positive terms, each with the error of its deviation: large, relatively, where few values lie close.
  expect_near(got.rstd, wanted.rstd, c.x.dim(-1) <= 8 ? 1e-4 : 2e-6, 0);
  expect_near(got.y, wanted.y, 1.5 * roundoff(c.dtype) + 4e-6);
}

struct Gradients {
  Tensor ds, dweight, dbias;
};

/// Puts in what the backward reads of the forward.
Case with_forward(Case c) {
  const Forward f = oracle_forward(c);
  c.mean = rounded(f.mean, DType::f32);
  c.rstd = rounded(f.rstd, DType::f32);
  return c;
}

Gradients oracle_backward(const Case& c) {
  Gradients g{host_zeros(c.x.shape(), DType::f64), host_zeros(c.weight.shape(), DType::f64), host_zeros(c.weight.shape(), DType::f64)};
  kernels::layer_norm_backward(Stream::cpu(1), c.dy, c.sum, c.weight, c.mean, c.rstd, &g.ds, &g.dweight, &g.dbias);
  return g;
}

constexpr int kAll = 7;   // ds, dweight, dbias: bits 0 to 2

/// The wanted gradients, undefined where not; dy may start `shift` elements into its memory.
Gradients gpu_backward(const Case& c, int wanted = kAll, std::int64_t shift = 0) {
  Tensor memory = host_zeros({shift + c.dy.numel()}, DType::f64);
  std::copy_n(c.dy.data<double>(), c.dy.numel(), memory.data<double>() + shift);
  const Tensor dy = on_gpu(memory, c.dtype).view(shift, c.dy.shape()), sum = on_gpu(c.sum, c.dtype);
  const Tensor weight = on_gpu(c.weight, DType::f32), mean = on_gpu(c.mean, DType::f32), rstd = on_gpu(c.rstd, DType::f32);
  Guarded ds(c.x.shape(), c.dtype), dweight(c.weight.shape(), DType::f32), dbias(c.weight.shape(), DType::f32);
  const auto if_wanted = [wanted](int bit, Guarded& g) { return wanted >> bit & 1 ? &g.tensor : nullptr; };
  const auto values = [wanted](int bit, const Guarded& g) { return wanted >> bit & 1 ? g.values() : Tensor(); };
  kernels::layer_norm_backward(gpu(), dy, sum, weight, mean, rstd, if_wanted(0, ds), if_wanted(1, dweight), if_wanted(2, dbias));
  gpu().wait();
  return {values(0, ds), values(1, dweight), values(2, dbias)};
}

void expect_backward(const Case& c, const Gradients& got) {
  const Gradients wanted = oracle_backward(c);
  // ds is the rest of a subtraction of terms up to rstd |dy weight|, which few columns may nearly cancel.
  double largest_rstd = 0, largest_ds = 1e-30;
  for (const double v : values_of(c.rstd)) largest_rstd = std::max(largest_rstd, v);
  for (const double v : values_of(wanted.ds)) largest_ds = std::max(largest_ds, std::abs(v));
  expect_near(got.ds, wanted.ds, 1.5 * roundoff(c.dtype) + 4e-6 * std::max(1.0, largest_rstd / largest_ds));
  // Float sums over a few hundred rows, then in double: 2^-24 of the sum of all terms, where the result is about sqrt(R) terms.
  const double tolerance = 2e-6 + 2e-7 * std::sqrt(static_cast<double>(c.x.rows()));
  expect_near(got.dweight, wanted.dweight, tolerance);
  expect_near(got.dbias, wanted.dbias, tolerance);
}

void expect_subset(const Gradients& got, const Gradients& full) {
  if (got.ds.defined()) expect_same_bits(got.ds, full.ds);
  if (got.dweight.defined()) expect_same_bits(got.dweight, full.dweight);
  if (got.dbias.defined()) expect_same_bits(got.dbias, full.dbias);
}

/// Calls check for each shape, dtype, with and without residual. Widths that need each of the kernels: without vectors, one to eight
/// vectors a lane, some lanes without one, wider than registers hold; rows fewer and more than warps.
void for_each_case(const std::function<void(const Case&)>& check) {
  for (const Shape& shape : {Shape{0, 8}, Shape{1, 5}, Shape{31, 33}, Shape{33, 31}, Shape{3, 8}, Shape{2, 31, 256}, Shape{33, 384}, Shape{9, 1000},
                             Shape{5, 2048}, Shape{4, 900, 256}, Shape{40, 1700, 8}}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      for (const bool has_residual : {false, true}) {
        INFO(shape << " " << dtype << " residual " << has_residual);
        check(Case(shape, dtype, has_residual));
      }
    }
  }
}

}  // namespace

TEST_CASE("layer_norm: CUDA's forward agrees with the CPU's", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  for_each_case([](const Case& c) {
    const Forward got = gpu_forward(c), again = gpu_forward(c);
    expect_forward(c, got);
    expect_same_bits(again.y, got.y);
    expect_same_bits(again.mean, got.mean);
    expect_same_bits(again.rstd, got.rstd);
  });
}

TEST_CASE("layer_norm: CUDA's backward agrees with the CPU's", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  for_each_case([](const Case& plain) {
    const Case c = with_forward(plain);
    const Gradients got = gpu_backward(c);
    expect_backward(c, got);
    for (int wanted = 0; wanted <= kAll; ++wanted) expect_subset(gpu_backward(c, wanted), got);   // the last is the full run again
  });
}

TEST_CASE("layer_norm: odd places on CUDA", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Case c = with_forward(Case({33, 256}, dtype, true));
    expect_forward(c, gpu_forward(c, 1));
    expect_backward(c, gpu_backward(c, kAll, 1));
  }
}
