#include "kernels/layer_norm.h"

#include <cmath>

#include "runtime/random.h"
#include "tests/support.h"

using namespace detr;
using namespace detr::test;

namespace {

Tensor f64(const Shape& shape, const std::vector<double>& values) { return host_tensor<double>(shape, values); }

Tensor random(const Shape& shape, DType dtype, std::uint64_t seed) {
  Tensor x = host_zeros(shape, dtype);
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    const double value = normal(RandomKey(seed), static_cast<std::uint64_t>(i));
    if (dtype == DType::f32) x.data<float>()[i] = static_cast<float>(value);
    else x.data<double>()[i] = value;
  }
  return x;
}

/// One layer norm with all that it reads and writes.
struct Case {
  Tensor x, residual, weight, bias, dy, sum, y, mean, rstd, ds, dweight, dbias;
  double eps = 1e-5;

  Case(const Shape& shape, DType dtype)
      : x(random(shape, dtype, 1)),
        residual(random(shape, dtype, 2)),
        weight(random({shape[-1]}, dtype, 3)),
        bias(random({shape[-1]}, dtype, 4)),
        dy(random(shape, dtype, 5)) {
    for (Tensor* t : {&sum, &y, &ds}) *t = host_zeros(shape, dtype);
    for (Tensor* t : {&mean, &rstd}) *t = host_zeros({x.rows()}, dtype);
    for (Tensor* t : {&dweight, &dbias}) *t = host_zeros({shape[-1]}, dtype);
  }
  void forward(const Stream& stream = Stream::cpu(1)) {
    kernels::layer_norm_forward(stream, x, residual.defined() ? &residual : nullptr, weight, bias, eps, sum.defined() ? &sum : nullptr, y,
                                mean, rstd);
  }
  void backward(const Stream& stream = Stream::cpu(1)) {
    kernels::layer_norm_backward(stream, dy, sum.defined() ? sum : x, weight, mean, rstd, &ds, &dweight, &dbias);
  }
};

}  // namespace

TEST_CASE("layer_norm: worked by hand", "[cpu]") {
  Case c({2, 2}, DType::f64);
  c.x = f64({2, 2}, {-2, 1, 3, 3});
  c.residual = f64({2, 2}, {1, 0, 1, 1});   // sums (-1, 1): mean 0, variance 1; (4, 4): mean 4, variance 0
  c.weight = f64({2}, {2, 4});
  c.bias = f64({2}, {10, 20});
  c.eps = 3;
  c.forward();
  expect_close(c.sum, f64({2, 2}, {-1, 1, 4, 4}), 0);
  expect_close(c.mean, f64({2}, {0, 4}), 0);
  expect_close(c.rstd, f64({2}, {0.5, 1 / std::sqrt(3.0)}), 1e-15);
  expect_close(c.y, f64({2, 2}, {9, 22, 10, 20}), 1e-15);

  c.dy = f64({2, 2}, {1, 2, 5, 1});
  c.backward();
  expect_close(c.dbias, f64({2}, {6, 3}), 1e-15);
  expect_close(c.dweight, f64({2}, {-0.5, 1}), 1e-15);
  // Row 0: g = (2, 8), normalised (-1/2, 1/2), means 5 and 3/2. Row 1: g = (10, 4), normalised 0, mean 7.
  const double r = 1 / std::sqrt(3.0);
  expect_close(c.ds, f64({2, 2}, {0.5 * (2 - 5 + 0.75), 0.5 * (8 - 5 - 0.75), 3 * r, -3 * r}), 1e-14);
}

TEST_CASE("layer_norm: a null residual is one of zeros", "[cpu]") {
  Case with({3, 5}, DType::f64), without({3, 5}, DType::f64);
  with.residual = host_zeros({3, 5}, DType::f64);
  without.residual = without.sum = Tensor();
  with.forward();
  without.forward();
  expect_same_bits(with.y, without.y);
  with.backward();
  without.backward();
  expect_same_bits(with.ds, without.ds);
  expect_same_bits(with.dweight, without.dweight);
}

TEST_CASE("layer_norm: no rows, one column", "[cpu]") {
  Case none({0, 4}, DType::f32);
  none.dweight = random({4}, DType::f32, 9);
  none.forward();
  none.backward();
  expect_close(none.dweight, host_zeros({4}, DType::f32), 0);   // overwritten
  Case narrow({5, 1}, DType::f64);
  narrow.forward();
  for (const double y : values_of(narrow.y)) expect_close(y, narrow.bias.data<double>()[0], 1e-15);
  narrow.backward();
  expect_close(narrow.ds, host_zeros({5, 1}, DType::f64), 0, 1e-12);
}

TEST_CASE("layer_norm: only what is wanted is written", "[cpu]") {
  Case full({7, 33}, DType::f64);
  full.forward();
  full.backward();
  Tensor dbias = host_zeros({33}, DType::f64);
  kernels::layer_norm_backward(Stream::cpu(1), full.dy, full.sum, full.weight, full.mean, full.rstd, nullptr, nullptr, &dbias);
  expect_same_bits(dbias, full.dbias);
}

TEST_CASE("layer_norm: f32 agrees with f64", "[cpu]") {
  for (const Shape& shape : {Shape{1, 2}, Shape{3, 31}, Shape{2, 5, 33}, Shape{300, 256}}) {
    Case a(shape, DType::f32), b(shape, DType::f64);
    a.forward();
    b.forward();
    a.backward();
    b.backward();
    const double atol = shape[-1] == 2 ? 1e-3 : 1e-5;   // two columns: the gradient is the rest of a cancellation
    expect_close(a.y, b.y, 1e-5, 1e-5);
    expect_close(a.ds, b.ds, 1e-5, atol);
    expect_close(a.dweight, b.dweight, 1e-5, 1e-5);
    expect_close(a.dbias, b.dbias, 1e-5, 1e-5);
  }
}

TEST_CASE("layer_norm: same bits for any number of threads", "[cpu]") {
  Case one({300, 257}, DType::f32);
  one.forward();
  one.backward();
  for (const int threads : {2, 3}) {
    Case c({300, 257}, DType::f32);
    const Stream stream = Stream::cpu(threads);
    c.forward(stream);
    c.backward(stream);
    expect_same_bits(c.y, one.y);
    expect_same_bits(c.ds, one.ds);
    expect_same_bits(c.dweight, one.dweight);
    expect_same_bits(c.dbias, one.dbias);
  }
}

TEST_CASE("layer_norm: broken contracts", "[cpu]") {
  const Tensor wrong = host_zeros({4, 2}, DType::f64), undefined;
  const auto broken = [](const std::function<void(Case&)>& spoil, const std::string& text, bool backward) {
    Case c({2, 3}, DType::f64);
    spoil(c);
    expect_throws<InvalidArgument>([&] { backward ? c.backward() : c.forward(); }, text);
  };
  broken([&](Case& c) { c.x = host_zeros({2, 0}, DType::f64); }, "layer_norm: x must be (..., D) with D >= 1, got f64(2, 0)", false);
  broken([&](Case& c) { c.sum = undefined; }, "layer_norm: sum must be given exactly where residual is", false);
  broken([&](Case& c) { c.eps = 0; }, "layer_norm: eps must be > 0, got 0", false);
  broken([&](Case& c) { c.residual = wrong; }, "layer_norm: residual must be f64(2, 3), got f64(4, 2)", false);
  broken([&](Case& c) { c.weight = wrong; }, "layer_norm: weight must be f64(3)", false);
  broken([&](Case& c) { c.bias = undefined; }, "layer_norm: bias must be", false);
  broken([&](Case& c) { c.sum = wrong; }, "layer_norm: sum must be", false);
  broken([&](Case& c) { c.y = wrong; }, "layer_norm: y must be", false);
  broken([&](Case& c) { c.mean = wrong; }, "layer_norm: mean must be f64(2)", false);
  broken([&](Case& c) { c.rstd = wrong; }, "layer_norm: rstd must be f64(2)", false);
  broken([&](Case& c) { c.sum = host_zeros({2, 0}, DType::f64); }, "layer_norm: sum must be (..., D)", true);
  broken([&](Case& c) { c.dy = wrong; }, "layer_norm: dy must be", true);
  broken([&](Case& c) { c.weight = wrong; }, "layer_norm: weight must be", true);
  broken([&](Case& c) { c.mean = wrong; }, "layer_norm: mean must be", true);
  broken([&](Case& c) { c.rstd = wrong; }, "layer_norm: rstd must be", true);
  broken([&](Case& c) { c.ds = wrong; }, "layer_norm: ds must be", true);
  broken([&](Case& c) { c.dweight = wrong; }, "layer_norm: dweight must be", true);
  broken([&](Case& c) { c.dbias = wrong; }, "layer_norm: dbias must be", true);
}
