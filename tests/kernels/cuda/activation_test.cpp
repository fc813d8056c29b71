#include "kernels/activation.h"

#include <cmath>
#include <limits>

#include "tests/gpu.h"
#include "tests/kernels/values.h"

using namespace detr;
using namespace detr::test;
using kernels::Activation;

namespace {

constexpr Activation kAll[] = {Activation::none, Activation::relu, Activation::silu, Activation::gelu, Activation::sigmoid};

/// One rounding to the dtype, and some units in the last place of f32 of the largest value: the products of 1 + erf(x) and 1 - s
/// cancel, so that errors count against the largest.
double tolerance(DType dtype) { return 2.1 * roundoff(dtype) + 32 * roundoff(DType::f32); }

Tensor forward(const Tensor& x, Activation kind) {
  Guarded y(x.shape(), x.dtype());
  kernels::activation_forward(gpu(), x, kind, y.tensor);
  return y.values();
}

/// With the tensor that the kind does not read left undefined.
Tensor backward(const Tensor& dy, const Tensor& x, const Tensor& y, Activation kind) {
  const bool reads_x = kind == Activation::silu || kind == Activation::gelu;
  Guarded dx(dy.shape(), dy.dtype());
  kernels::activation_backward(gpu(), dy, reads_x ? x : Tensor(), reads_x || kind == Activation::none ? Tensor() : y, kind, &dx.tensor);
  return dx.values();
}

/// Values in [-8, 8), rounded to the dtype.
Tensor wide_values(const Shape& shape, DType dtype, std::uint64_t seed) {
  Tensor x = random(shape, DType::f64, seed);
  for (double& value : x.span<double>()) value *= 8;
  return rounded(x, dtype);
}

}  // namespace

TEST_CASE("activation on CUDA: agrees with the CPU, twice the same bits", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  const Stream cpu = Stream::cpu(2);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const Shape& shape : {Shape{0}, Shape{1}, Shape{31}, Shape{33}, Shape{5, 1031}, Shape{2, 20, 20, 256}}) {
      const Tensor x = wide_values(shape, dtype, 1), dy = rounded(random(shape, DType::f64, 2), dtype);
      const Tensor gx = on_gpu(x, dtype), gdy = on_gpu(dy, dtype);
      for (const Activation kind : kAll) {
        INFO(dtype << shape << ", kind " << static_cast<int>(kind));
        Tensor y = host_zeros(shape, DType::f64), dx = host_zeros(shape, DType::f64);
        kernels::activation_forward(cpu, x, kind, y);
        const Tensor got = forward(gx, kind);
        expect_near(got, y, tolerance(dtype));
        expect_same_bits(forward(gx, kind), got);

        const Tensor y_seen = rounded(y, dtype), gy = on_gpu(y, dtype);
        kernels::activation_backward(cpu, dy, x, y_seen, kind, &dx);
        const Tensor got_dx = backward(gdy, gx, gy, kind);
        expect_near(got_dx, dx, tolerance(dtype));
        expect_same_bits(backward(gdy, gx, gy, kind), got_dx);
      }
    }
  }
}

TEST_CASE("activation on CUDA: tensors that start at any element", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  const std::int64_t n = 1000;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Tensor whole = on_gpu(random({n + 1}, DType::f64, 3), dtype), odd = whole.view(1, {n}), even = gpu().empty({n}, dtype);
    Tensor copy = even;
    gpu().copy(odd, copy);
    for (const Activation kind : kAll) {
      const Tensor wanted = forward(even, kind);
      expect_same_bits(forward(odd, kind), wanted);
      Guarded y({n + 1}, dtype);
      Tensor tail = y.tensor.view(1, {n});
      kernels::activation_forward(gpu(), even, kind, tail);
      CHECK(std::isnan(y.values().data<double>()[0]));
      expect_same_bits(from_gpu(tail), wanted);
      expect_same_bits(backward(odd, even, even, kind), backward(even, even, even, kind));
    }
  }
}

TEST_CASE("activation on CUDA: zero, infinities and NaN", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  const double inf = std::numeric_limits<double>::infinity();
  const Tensor x = host_tensor<double>({5}, std::vector<double>{-inf, inf, std::nan(""), 0, -100});
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Tensor gx = on_gpu(x, dtype), one = on_gpu(host_tensor<double>({5}, std::vector<double>(5, 1.0)), dtype);
    const std::vector<double> sigmoid = values_of(forward(gx, Activation::sigmoid)), relu = values_of(forward(gx, Activation::relu));
    CHECK((sigmoid[0] == 0 && sigmoid[1] == 1 && sigmoid[3] == 0.5));
    CHECK((relu[0] == 0 && relu[1] == inf && relu[3] == 0 && relu[4] == 0));
    for (const Activation kind : kAll) CHECK(std::isnan(values_of(forward(gx, kind))[2]));
    CHECK(values_of(backward(one, gx, on_gpu(host_tensor<double>({5}, relu), dtype), Activation::relu))[3] == 0);
    CHECK(values_of(backward(one, gx, gx, Activation::silu))[4] == 0);
  }
}

TEST_CASE("activation on CUDA: dtypes", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  Tensor wide = gpu().empty({2}, DType::f64);
  expect_throws<InvalidArgument>([&] { kernels::activation_forward(gpu(), wide, Activation::relu, wide); }, "CUDA computes in f32 and bf16");
}
