#include "kernels/conv2d_norm.h"

#include <cmath>

#include "kernels/batch_norm.h"
#include "tests/kernels/values.h"

using namespace detr;
using namespace detr::test;
using kernels::Activation;

namespace {

Tensor positive(const Shape& shape, DType dtype, std::uint64_t seed) {
  Tensor x = random(shape, dtype, seed);
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    if (dtype == DType::f32) x.data<float>()[i] = 1.5F + x.data<float>()[i];
    else x.data<double>()[i] = 1.5 + x.data<double>()[i];
  }
  return x;
}

}  // namespace

TEST_CASE("conv2d_norm: by hand", "[cpu]") {
  const Stream stream = Stream::cpu(1);
  const auto f64 = [](const Shape& shape, const std::vector<double>& values) { return host_tensor<double>(shape, values); };
  const Tensor weight = f64({2, 1, 1, 1}, {3, -1}), gamma = f64({2}, {2, 1}), beta = f64({2}, {1, 0.5}), mean = f64({2}, {0.5, -1}), var = f64({2}, {0.24, 3.99});
  Tensor folded = poisoned(weight.shape(), DType::f64), scale = poisoned({2}, DType::f64), shift = poisoned({2}, DType::f64);
  kernels::fold_norm(stream, weight, gamma, beta, mean, var, 0.01, folded, scale, shift);
  const auto expect = [](const Tensor& got, const std::vector<double>& wanted) {
    for (std::size_t i = 0; i < wanted.size(); ++i) expect_close(got.data<double>()[i], wanted[i], 1e-14);
  };
  expect(scale, {4, 0.5});
  expect(folded, {12, -0.5});
  expect(shift, {-1, 1});
  const Tensor x = f64({1, 1, 2, 1}, {1, -1}), residual = f64({1, 1, 2, 2}, {0, 0, 14, -3});
  Tensor y = poisoned({1, 1, 2, 2}, DType::f64);
  kernels::conv2d_shift_forward(stream, x, folded, shift, nullptr, Activation::none, {1, 0}, y);
  expect(y, {11, 0.5, -13, 1.5});
  kernels::conv2d_shift_forward(stream, x, folded, shift, &residual, Activation::relu, {1, 0}, y);
  expect(y, {11, 0.5, 1, 0});
  kernels::scale_rows(stream, scale, folded);
  expect(folded, {48, -0.25});
}

TEST_CASE("conv2d_norm: a convolution and a norm with given statistics", "[cpu]") {
  const Stream stream = Stream::cpu(2);
  for (const DType dtype : {DType::f32, DType::f64}) {
    const Tensor x = random({2, 9, 7, 5}, dtype, 1), weight = random({6, 3, 3, 5}, dtype, 2), gamma = random({6}, dtype, 3), beta = random({6}, dtype, 4), mean = random({6}, dtype, 5);
    const Tensor var = positive({6}, dtype, 6), residual = random({2, 5, 4, 6}, dtype, 7);
    const kernels::Conv2dOptions options{2, 1};
    Tensor z = poisoned(residual.shape(), dtype), wanted = poisoned(residual.shape(), dtype), kept_mean = poisoned({6}, dtype), rstd = poisoned({6}, dtype);
    Tensor folded = poisoned(weight.shape(), dtype), scale = poisoned({6}, dtype), shift = poisoned({6}, dtype), y = poisoned(residual.shape(), dtype);
    kernels::fold_norm(stream, weight, gamma, beta, mean, var, 1e-5, folded, scale, shift);
    kernels::conv2d_forward(stream, x, weight, options, z);
    for (const Activation activation : {Activation::none, Activation::relu}) {
      for (const Tensor* added : {static_cast<const Tensor*>(nullptr), &residual}) {
        kernels::batch_norm_inference(stream, z, gamma, beta, added, activation, 1e-5, mean, var, wanted, kept_mean, rstd);
        kernels::conv2d_shift_forward(stream, x, folded, shift, added, activation, options, y);
        // Sums of 45 products up to about 4.
        expect_close(y, wanted, 0, dtype == DType::f32 ? 2e-5 : 4e-14);
      }
    }
  }
}

TEST_CASE("conv2d_norm: errors", "[cpu]") {
  const Stream stream = Stream::cpu(1);
  const Tensor x = host_zeros({1, 4, 4, 2}, DType::f32), weight = host_zeros({3, 3, 3, 2}, DType::f32), channels = host_zeros({3}, DType::f32), wrong = host_zeros({2}, DType::f32);
  Tensor folded = host_zeros({3, 3, 3, 2}, DType::f32), wide = host_zeros({3, 3, 3, 2}, DType::f64), scale = host_zeros({3}, DType::f32), shift = host_zeros({3}, DType::f32),
         y = host_zeros({1, 4, 4, 3}, DType::f32);
  expect_throws<InvalidArgument>([&] { kernels::fold_norm(stream, wrong, channels, channels, channels, channels, 1e-5, folded, scale, shift); }, "fold_norm: weight must be (O, kh, kw, I)");
  expect_throws<InvalidArgument>([&] { kernels::fold_norm(stream, weight, wrong, channels, channels, channels, 1e-5, folded, scale, shift); }, "fold_norm: norm_weight must be f32(3), got f32(2)");
  expect_throws<InvalidArgument>([&] { kernels::fold_norm(stream, weight, channels, channels, channels, channels, 1e-5, wide, scale, shift); }, "fold_norm: folded must be f32 or its bf16, got f64");
  expect_throws<InvalidArgument>([&] { kernels::fold_norm(stream, weight, channels, channels, channels, channels, 0, folded, scale, shift); }, "fold_norm: eps must be > 0");
  expect_throws<InvalidArgument>([&] { kernels::conv2d_shift_forward(stream, x, weight, wrong, nullptr, Activation::none, {1, 1}, y); }, "conv2d_shift: shift must be f32(3), got f32(2)");
  expect_throws<InvalidArgument>([&] { kernels::conv2d_shift_forward(stream, x, weight, shift, &x, Activation::none, {1, 1}, y); }, "conv2d_shift: residual must be f32(1, 4, 4, 3)");
  expect_throws<InvalidArgument>([&] { kernels::conv2d_shift_forward(stream, x, weight, shift, nullptr, Activation::silu, {1, 1}, y); }, "conv2d_shift: the activation must be none or relu");
  expect_throws<InvalidArgument>([&] { kernels::scale_rows(stream, wrong, scale); }, "scale_rows: scale must be f32(3), got f32(2)");
}
