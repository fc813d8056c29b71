#include "kernels/batch_norm.h"

#include <cmath>

#include "runtime/random.h"
#include "tests/support.h"

using namespace detr;
using namespace detr::test;
using kernels::Activation;

namespace {

Tensor f64(const Shape& shape, const std::vector<double>& values) { return host_tensor<double>(shape, values); }

Tensor random(const Shape& shape, DType dtype, std::uint64_t seed, double mean = 0) {
  Tensor x = host_zeros(shape, dtype);
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    const double value = mean + normal(RandomKey(seed), static_cast<std::uint64_t>(i));
    if (dtype == DType::f32) x.data<float>()[i] = static_cast<float>(value);
    else x.data<double>()[i] = value;
  }
  return x;
}

/// One batch norm with all that it reads and writes.
struct Case {
  Tensor x, weight, bias, residual, dy;
  Tensor running_mean, running_var, y, mean, rstd, dx, dweight, dbias, dresidual;
  Activation activation = Activation::none;
  double eps = 1e-5, momentum = 0.1;

  Case(const Shape& shape, DType dtype, double x_mean = 0) {
    const Shape channels{shape[-1]};
    x = random(shape, dtype, 1, x_mean);
    weight = random(channels, dtype, 2);
    bias = random(channels, dtype, 3);
    residual = random(shape, dtype, 4);
    dy = random(shape, dtype, 5);
    running_mean = random(channels, dtype, 6);
    running_var = host_zeros(channels, dtype);
    make_outputs();
  }
  Case(Tensor x_, Tensor weight_, Tensor bias_) : x(x_), weight(weight_), bias(bias_) {
    running_mean = host_zeros(weight.shape(), DType::f64);
    running_var = host_zeros(weight.shape(), DType::f64);
    for (double& v : running_var.span<double>()) v = 1;
    make_outputs();
  }

  void make_outputs() {
    y = host_zeros(x.shape(), x.dtype());
    dx = host_zeros(x.shape(), x.dtype());
    dresidual = host_zeros(x.shape(), x.dtype());
    for (Tensor* t : {&mean, &rstd, &dweight, &dbias}) *t = host_zeros(weight.shape(), x.dtype());
  }
  const Tensor* added() const { return residual.defined() ? &residual : nullptr; }

  void forward(const Stream& stream = Stream::cpu(1)) {
    kernels::batch_norm_forward(stream, x, weight, bias, added(), activation, eps, momentum, running_mean, running_var, y, mean, rstd);
  }
  void inference(const Stream& stream = Stream::cpu(1)) {
    kernels::batch_norm_inference(stream, x, weight, bias, added(), activation, eps, running_mean, running_var, y, mean, rstd);
  }
  void backward(bool batch_statistics, const Stream& stream = Stream::cpu(1)) {
    kernels::batch_norm_backward(stream, dy, x, weight, bias, added(), y, mean, rstd, activation, batch_statistics, &dx, &dweight, &dbias,
                                 &dresidual);
  }
};

}  // namespace

TEST_CASE("batch_norm: training worked by hand", "[cpu]") {
  // Channel 0 holds -1 and 1: mean 0, variance 1; channel 1 holds 2 and 6: mean 4, variance 4. With eps = 3: rstd 1/2, 1/sqrt(7).
  Case c(f64({2, 1, 1, 2}, {-1, 2, 1, 6}), f64({2}, {4, 1}), f64({2}, {1, 0}));
  c.eps = 3;
  c.forward();
  const double rstd = 1 / std::sqrt(7.0);
  expect_close(c.mean, f64({2}, {0, 4}), 0);
  expect_close(c.rstd, f64({2}, {0.5, rstd}), 1e-15);
  expect_close(c.y, f64({2, 1, 1, 2}, {-1, -2 * rstd, 3, 2 * rstd}), 1e-15);
  expect_close(c.running_mean, f64({2}, {0, 0.4}), 1e-15);
  expect_close(c.running_var, f64({2}, {0.9 + 0.1 * 2, 0.9 + 0.1 * 8}), 1e-15);   // unbiased: 2 / (2 - 1) of the variance

  c.dy = f64({2, 1, 1, 2}, {1, 1, 3, 0});
  c.backward(true);
  expect_close(c.dbias, f64({2}, {4, 1}), 1e-15);
  expect_close(c.dweight, f64({2}, {0.5 * (-1 + 3), rstd * -2}), 1e-15);
  // dx = weight rstd (dy - dbias / 2 - (x - mean) rstd dweight / 2)
  expect_close(c.dx, f64({2, 1, 1, 2}, {2 * (1 - 2 + 0.25), rstd * (1 - 0.5 - 2 / 7.0), 2 * (3 - 2 - 0.25), rstd * (0 - 0.5 + 2 / 7.0)}), 1e-14);
  expect_same_bits(c.dresidual, c.dy);
}

TEST_CASE("batch_norm: given statistics worked by hand", "[cpu]") {
  Case c(f64({1, 1, 2, 1}, {1, 5}), f64({1}, {3}), f64({1}, {-3}));
  c.running_mean = f64({1}, {1});
  c.running_var = f64({1}, {3});
  c.eps = 1;
  c.residual = f64({1, 1, 2, 1}, {1, 1});
  c.activation = Activation::relu;
  c.inference();
  expect_close(c.y, f64({1, 1, 2, 1}, {0, 4}), 1e-15);   // (0 - 3 + 1) and (4 / 2 * 3 - 3 + 1)
  expect_close(c.running_mean, f64({1}, {1}), 0);
  c.dy = f64({1, 1, 2, 1}, {7, 2});
  c.backward(false);
  expect_close(c.dx, f64({1, 1, 2, 1}, {0, 3}), 1e-15);
  expect_close(c.dresidual, f64({1, 1, 2, 1}, {0, 2}), 1e-15);
  expect_close(c.dbias, f64({1}, {2}), 1e-15);
  expect_close(c.dweight, f64({1}, {4}), 1e-15);
}

TEST_CASE("batch_norm: the activation follows the residual", "[cpu]") {
  for (const Activation activation : {Activation::relu, Activation::silu}) {
    Case plain({1, 3, 3, 5}, DType::f64), fused({1, 3, 3, 5}, DType::f64);
    fused.activation = activation;
    plain.forward();
    fused.forward();
    Tensor wanted = host_zeros(plain.y.shape(), DType::f64);
    kernels::activation_forward(Stream::cpu(1), plain.y, activation, wanted);
    expect_close(fused.y, wanted, 1e-14, 1e-15);
  }
}

TEST_CASE("batch_norm: one row, no rows, no channels", "[cpu]") {
  Case one(f64({1, 1, 1, 1}, {3}), f64({1}, {2}), f64({1}, {5}));
  one.forward();
  expect_close(one.y, f64({1, 1, 1, 1}, {5}), 0);
  expect_close(one.running_var, f64({1}, {0.9}), 1e-15);   // the variance of one value is 0, biased or not
  Case none({0, 2, 2, 3}, DType::f32);
  expect_throws<InvalidArgument>([&] { none.forward(); }, "batch_norm: no rows to take statistics of in f32(0, 2, 2, 3)");
  none.inference();
  none.backward(false);
  expect_close(none.dbias, host_zeros({3}, DType::f32), 0);
  Case narrow({2, 1, 1, 0}, DType::f64);
  narrow.forward();
  narrow.backward(true);
  CHECK(narrow.dx.numel() == 0);
}

TEST_CASE("batch_norm: x may be dropped where nothing of it is read", "[cpu]") {
  for (const Activation activation : {Activation::none, Activation::relu}) {
    Case full({1, 3, 3, 5}, DType::f64), lean({1, 3, 3, 5}, DType::f64);
    for (Case* c : {&full, &lean}) {
      c->activation = activation;
      c->forward();
    }
    full.backward(false);
    const auto lean_backward = [&](bool batch_statistics, Activation kind, Tensor* dweight, Tensor* dbias) {
      kernels::batch_norm_backward(Stream::cpu(1), lean.dy, Tensor(), lean.weight, lean.bias, nullptr, lean.y, lean.mean, lean.rstd, kind,
                                   batch_statistics, &lean.dx, dweight, dbias, &lean.dresidual);
    };
    lean_backward(false, activation, nullptr, nullptr);
    expect_same_bits(lean.dx, full.dx);
    expect_same_bits(lean.dresidual, full.dresidual);
    const std::string text = "batch_norm: x must be (..., C), got undefined";
    expect_throws<InvalidArgument>([&] { lean_backward(true, activation, nullptr, nullptr); }, text);
    expect_throws<InvalidArgument>([&] { lean_backward(false, Activation::silu, nullptr, nullptr); }, text);
    expect_throws<InvalidArgument>([&] { lean_backward(false, activation, &lean.dweight, nullptr); }, text);
    expect_throws<InvalidArgument>([&] { lean_backward(false, activation, nullptr, &lean.dbias); }, text);
  }
  Case c({1, 2, 2, 3}, DType::f64);
  c.x = c.dy = Tensor();
  expect_throws<InvalidArgument>(
      [&] {
        kernels::batch_norm_backward(Stream::cpu(1), c.dy, c.x, c.weight, c.bias, nullptr, c.y, c.mean, c.rstd, c.activation, false, &c.dx, nullptr,
                                     nullptr, nullptr);
      },
      "batch_norm: dy must be (..., C), got undefined");
}

TEST_CASE("batch_norm: many blocks of rows against sums in long double", "[cpu]") {
  Case c({2, 97, 113, 3}, DType::f32, 1000);   // 3 blocks; the mean is a thousand times the deviation
  c.forward();
  const auto x = c.x.span<float>();
  for (std::size_t ch = 0; ch < 3; ++ch) {
    long double sum = 0, squares = 0;
    for (std::size_t i = ch; i < x.size(); i += 3) sum += x[i];
    const long double n = static_cast<long double>(x.size() / 3), mean = sum / n;
    for (std::size_t i = ch; i < x.size(); i += 3) squares += (x[i] - mean) * (x[i] - mean);
    expect_close(c.mean.data<float>()[ch], static_cast<double>(mean), 1e-7);
    expect_close(c.rstd.data<float>()[ch], static_cast<double>(1 / std::sqrt(squares / n + 1e-5L)), 2e-7);
  }
}

TEST_CASE("batch_norm: f32 agrees with f64", "[cpu]") {
  for (const Shape& shape : {Shape{1, 1, 1, 1}, Shape{3, 5, 7, 31}, Shape{1, 4, 4, 1025}}) {
    for (const Activation activation : {Activation::none, Activation::relu, Activation::silu}) {
      Case a(shape, DType::f32), b(shape, DType::f64);
      a.activation = b.activation = activation;
      a.forward();
      b.forward();
      a.backward(true);
      b.backward(true);
      expect_close(a.y, b.y, 1e-5, 1e-5);
      const double scale = shape[1] == 1 ? 1e-3 : 1e-4;   // one row: rstd is 316, and dx the rest of a cancellation
      expect_close(a.dx, b.dx, 1e-4, scale);
      expect_close(a.dweight, b.dweight, 1e-5, 1e-4);
      expect_close(a.dbias, b.dbias, 1e-5, 1e-5);
      expect_close(a.dresidual, b.dresidual, 1e-5, 1e-5);
    }
  }
}

TEST_CASE("batch_norm: NaN is not hidden", "[cpu]") {
  Case c({1, 2, 2, 2}, DType::f32);
  c.activation = Activation::relu;
  c.x.data<float>()[4] = std::nanf("");
  c.forward();
  CHECK(std::isnan(c.mean.data<float>()[0]));
  CHECK(std::isnan(c.rstd.data<float>()[0]));
  CHECK(std::isnan(c.y.data<float>()[0]));
  CHECK_FALSE(std::isnan(c.y.data<float>()[1]));
}

TEST_CASE("batch_norm: same bits for any number of threads", "[cpu]") {
  for (const Activation activation : {Activation::none, Activation::relu, Activation::silu}) {
    std::vector<Case> runs;
    for (const int threads : {1, 2, 3}) {
      Case c({2, 33, 57, 17}, DType::f32);
      c.activation = activation;
      const Stream stream = Stream::cpu(threads);
      c.forward(stream);
      c.backward(true, stream);
      runs.push_back(c);
    }
    for (const Case& c : runs) {
      expect_same_bits(c.y, runs[0].y);
      expect_same_bits(c.running_mean, runs[0].running_mean);
      expect_same_bits(c.running_var, runs[0].running_var);
      expect_same_bits(c.dx, runs[0].dx);
      expect_same_bits(c.dweight, runs[0].dweight);
      expect_same_bits(c.dbias, runs[0].dbias);
      expect_same_bits(c.dresidual, runs[0].dresidual);
    }
  }
}

TEST_CASE("batch_norm: broken contracts", "[cpu]") {
  const Tensor wrong = host_zeros({4}, DType::f64), undefined;
  const auto broken = [](const std::function<void(Case&)>& spoil, const std::string& text, bool backward = false) {
    Case c({1, 2, 2, 3}, DType::f64);
    spoil(c);
    expect_throws<InvalidArgument>([&] { backward ? c.backward(true) : c.forward(); }, text);
    if (!backward && text.find("momentum") == std::string::npos) expect_throws<InvalidArgument>([&] { c.inference(); }, text);
  };
  broken([&](Case& c) { c.x = host_zeros({}, DType::f64); }, "batch_norm: x must be (..., C)");
  broken([&](Case& c) { c.weight = wrong; }, "batch_norm: weight must be f64(3), got f64(4)");
  broken([&](Case& c) { c.bias = undefined; }, "batch_norm: bias must be f64(3), got undefined");
  broken([&](Case& c) { c.residual = wrong; }, "batch_norm: residual must be");
  broken([&](Case& c) { c.running_mean = wrong; }, "batch_norm: running_mean must be");
  broken([&](Case& c) { c.running_var = wrong; }, "batch_norm: running_var must be");
  broken([&](Case& c) { c.y = wrong; }, "batch_norm: y must be");
  broken([&](Case& c) { c.mean = wrong; }, "batch_norm: mean must be");
  broken([&](Case& c) { c.rstd = wrong; }, "batch_norm: rstd must be");
  broken([&](Case& c) { c.eps = 0; }, "batch_norm: eps must be > 0");
  broken([&](Case& c) { c.momentum = 1.5; }, "batch_norm: momentum must be in [0, 1], got 1.5");
  broken([&](Case& c) { c.activation = Activation::gelu; }, "batch_norm: the activation must be none, relu or silu");

  broken([&](Case& c) { c.x = host_zeros({}, DType::f64); }, "batch_norm: x must be (..., C)", true);
  broken([&](Case& c) { c.dy = wrong; }, "batch_norm: dy must be", true);
  broken([&](Case& c) { c.weight = wrong; }, "batch_norm: weight must be", true);
  broken([&](Case& c) { c.bias = wrong; }, "batch_norm: bias must be", true);
  broken([&](Case& c) { c.mean = wrong; }, "batch_norm: mean must be", true);
  broken([&](Case& c) { c.rstd = wrong; }, "batch_norm: rstd must be", true);
  broken([&](Case& c) { c.activation = Activation::silu, c.residual = wrong; }, "batch_norm: residual must be", true);
  broken([&](Case& c) { c.activation = Activation::relu, c.y = undefined; }, "batch_norm: y must be", true);
  broken([&](Case& c) { c.activation = Activation::sigmoid; }, "batch_norm: the activation must be none, relu or silu", true);
  broken([&](Case& c) { c.dx = wrong; }, "batch_norm: dx must be", true);
  broken([&](Case& c) { c.dweight = wrong; }, "batch_norm: dweight must be", true);
  broken([&](Case& c) { c.dbias = wrong; }, "batch_norm: dbias must be", true);
  broken([&](Case& c) { c.dresidual = wrong; }, "batch_norm: dresidual must be", true);
}
