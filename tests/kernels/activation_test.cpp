#include "kernels/activation.h"

#include <cmath>
#include <limits>

#include "kernels/cpu/exp.h"
#include "tests/support.h"

using namespace detr;
using namespace detr::test;
using kernels::Activation;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr Activation kAll[] = {Activation::none, Activation::relu, Activation::silu, Activation::gelu, Activation::sigmoid};

Tensor f64(const std::vector<double>& values) { return host_tensor<double>({static_cast<std::int64_t>(values.size())}, values); }

Tensor forward(const Tensor& x, Activation kind, const Stream& stream = Stream::cpu(1)) {
  Tensor y = stream.empty_like(x);
  kernels::activation_forward(stream, x, kind, y);
  return y;
}

Tensor backward(const Tensor& dy, const Tensor& x, const Tensor& y, Activation kind, const Stream& stream = Stream::cpu(1)) {
  Tensor dx = stream.empty_like(dy);
  kernels::activation_backward(stream, dy, x, y, kind, &dx);
  return dx;
}

/// n values in [-8, 8], none of them 0.
Tensor ramp(std::int64_t n, DType dtype) {
  Tensor x = host_zeros({n}, dtype);
  for (std::int64_t i = 0; i < n; ++i) {
    const double value = 8 * std::sin(1.0 + 0.37 * static_cast<double>(i));
    if (dtype == DType::f32) x.data<float>()[i] = static_cast<float>(value);
    else x.data<double>()[i] = value;
  }
  return x;
}

}  // namespace

TEST_CASE("activation: values worked by hand", "[cpu]") {
  expect_close(forward(f64({-3, 0, 2}), Activation::none), f64({-3, 0, 2}), 0);
  expect_close(forward(f64({-3, 0, 2}), Activation::relu), f64({0, 0, 2}), 0);
  expect_close(forward(f64({0, std::log(3.0), -std::log(3.0)}), Activation::sigmoid), f64({0.5, 0.75, 0.25}), 1e-15);
  expect_close(forward(f64({0, 1, -1}), Activation::silu), f64({0, 0.7310585786300049, -0.2689414213699951}), 1e-15);
  // x times the normal distribution function: 0.8413447460685429 at 1, 0.0227501319481792 at -2
  expect_close(forward(f64({0, 1, -2}), Activation::gelu), f64({0, 0.8413447460685429, -0.0455002638963584}), 1e-13);
}

TEST_CASE("activation: derivatives worked by hand", "[cpu]") {
  const Tensor dy = f64({2, 2, 2}), none;
  expect_close(backward(dy, none, none, Activation::none), dy, 0);
  expect_close(backward(dy, none, f64({0, 0, 5}), Activation::relu), f64({0, 0, 2}), 0);   // 0 at 0
  expect_close(backward(dy, none, f64({0.5, 0.75, 1}), Activation::sigmoid), f64({0.5, 0.375, 0}), 1e-15);
  expect_close(backward(dy, f64({0, 1, -1}), none, Activation::silu), f64({1, 2 * 0.9276705118714867, 2 * 0.0723294881285133}), 1e-13);
  // Phi(x) + x phi(x): 0.5 at 0, 0.8413447460685429 + 0.2419707245191434 at 1, 1 minus that at -1
  expect_close(backward(dy, f64({0, 1, -1}), none, Activation::gelu), f64({1, 2 * 1.0833154705876863, -2 * 0.0833154705876863}), 1e-13);
}

TEST_CASE("activation: infinities and NaN", "[cpu]") {
  for (const DType dtype : {DType::f32, DType::f64}) {
    Tensor x = host_zeros({3}, dtype);
    for (int i = 0; i < 3; ++i) {
      const double value = i == 0 ? -kInf : i == 1 ? kInf : std::nan("");
      if (dtype == DType::f32) x.data<float>()[i] = static_cast<float>(value);
      else x.data<double>()[i] = value;
    }
    const std::vector<double> y = values_of(forward(x, Activation::sigmoid));
    CHECK(y[0] == 0);
    CHECK(y[1] == 1);
    for (const Activation kind : kAll) CHECK(std::isnan(values_of(forward(x, kind))[2]));
  }
}

TEST_CASE("activation: the exponential of f32 is good to two units in the last place", "[cpu]") {
  for (double x = -87; x < 88.7; x += 0.0137) {
    const auto xf = static_cast<float>(x);
    const double exact = std::exp(static_cast<double>(xf));
    if (std::abs(kernels::cpu::fast_exp(xf) - exact) > 2 * 6.0e-8 * exact) FAIL_CHECK("e^" << xf);
  }
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  CHECK(kernels::cpu::fast_exp(0.0F) == 1);
  CHECK(kernels::cpu::fast_exp(-kInfinity) == 0);
  CHECK(kernels::cpu::fast_exp(-1e30F) == 0);
  CHECK(kernels::cpu::fast_exp(89.0F) == kInfinity);
  CHECK(kernels::cpu::fast_exp(kInfinity) == kInfinity);
  CHECK(kernels::cpu::fast_exp(-100.0F) == static_cast<float>(std::exp(-100.0)));   // subnormal
  CHECK(std::isnan(kernels::cpu::fast_exp(std::nanf(""))));
}

TEST_CASE("activation: f32 agrees with f64 at odd sizes", "[cpu]") {
  for (const std::int64_t n : {0, 1, 31, 33, 70001}) {
    const Tensor x = ramp(n, DType::f64), xf = ramp(n, DType::f32);
    for (const Activation kind : kAll) {
      const Tensor y = forward(x, kind), yf = forward(xf, kind);
      expect_close(yf, y, 4e-6, 1e-6);
      expect_close(backward(xf, xf, yf, kind), backward(x, x, y, kind), 4e-6, 1e-5);
    }
  }
}

TEST_CASE("activation: same bits for any number of threads", "[cpu]") {
  const Tensor x = ramp(70001, DType::f32);
  for (const Activation kind : kAll) {
    const Tensor y = forward(x, kind), dx = backward(x, x, y, kind);
    for (const int threads : {2, 3}) {
      expect_same_bits(forward(x, kind, Stream::cpu(threads)), y);
      expect_same_bits(backward(x, x, y, kind, Stream::cpu(threads)), dx);
    }
  }
}

TEST_CASE("activation: broken contracts", "[cpu]") {
  const Stream stream = Stream::cpu(1);
  const Tensor x = f64({1, 2}), undefined;
  Tensor wrong = host_zeros({3}, DType::f64), single = host_zeros({2}, DType::f32), ids = host_zeros({2}, DType::i64);
  expect_throws<InvalidArgument>([&] { kernels::activation_forward(stream, x, Activation::relu, wrong); },
                                 "activation: y must be f64(2), got f64(3)");
  expect_throws<InvalidArgument>([&] { kernels::activation_forward(stream, x, Activation::relu, single); }, "got f32(2)");
  expect_throws<InvalidArgument>([&] { kernels::activation_forward(stream, ids, Activation::relu, ids); }, "f32 and f64, got i64");
  expect_throws<InvalidArgument>([&] { kernels::activation_backward(stream, x, x, undefined, Activation::relu, nullptr); },
                                 "activation: y must be");
  expect_throws<InvalidArgument>([&] { kernels::activation_backward(stream, x, undefined, x, Activation::gelu, nullptr); },
                                 "activation: x must be");
  expect_throws<InvalidArgument>([&] { kernels::activation_backward(stream, x, x, x, Activation::silu, &wrong); }, "activation: dx must be");
  expect_throws<InvalidArgument>([&] { forward(x, static_cast<Activation>(9)); }, "activation: unknown kind 9");
}
