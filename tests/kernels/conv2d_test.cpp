#include "kernels/conv2d.h"

#include <limits>

#include "tests/kernels/values.h"

using namespace detr;
using namespace detr::test;
using kernels::Conv2dOptions;

namespace {

struct Results {
  Tensor y, dx, dweight;
};

Results run(int threads, const Tensor& x, const Tensor& weight, const Conv2dOptions& options, const Tensor& dy) {
  const Stream stream = Stream::cpu(threads);
  Results r{poisoned(dy.shape(), x.dtype()), poisoned(x.shape(), x.dtype()), poisoned(weight.shape(), x.dtype())};
  kernels::conv2d_forward(stream, x, weight, options, r.y);
  kernels::conv2d_backward(stream, dy, x, weight, options, &r.dx, &r.dweight);
  return r;
}

/// Forward and both gradients by the definition, in double.
Results plain(const Tensor& x, const Tensor& weight, const Conv2dOptions& options, const Tensor& dy) {
  const std::vector<double> X = values_of(x), W = values_of(weight), G = values_of(dy);
  Results r{host_zeros(dy.shape(), DType::f64), host_zeros(x.shape(), DType::f64), host_zeros(weight.shape(), DType::f64)};
  const auto ys = r.y.span<double>(), dxs = r.dx.span<double>(), dws = r.dweight.span<double>();
  const std::int64_t O = weight.dim(0), kh = weight.dim(1), kw = weight.dim(2), I = weight.dim(3);
  for (std::int64_t pixel = 0; pixel < dy.rows(); ++pixel) {
    const std::int64_t n = pixel / (dy.dim(1) * dy.dim(2)), a = pixel / dy.dim(2) % dy.dim(1), b = pixel % dy.dim(2);
    for (std::int64_t ky = 0; ky < kh; ++ky)
      for (std::int64_t kx = 0; kx < kw; ++kx) {
        const std::int64_t row = a * options.stride - options.padding + ky, col = b * options.stride - options.padding + kx;
        if (row < 0 || row >= x.dim(1) || col < 0 || col >= x.dim(2)) continue;
        for (std::int64_t o = 0; o < O; ++o)
          for (std::int64_t i = 0; i < I; ++i) {
            const auto in = static_cast<std::size_t>(((n * x.dim(1) + row) * x.dim(2) + col) * I + i);
            const auto w = static_cast<std::size_t>(((o * kh + ky) * kw + kx) * I + i), out = static_cast<std::size_t>(pixel * O + o);
            ys[out] += X[in] * W[w];
            dxs[in] += G[out] * W[w];
            dws[w] += G[out] * X[in];
          }
      }
  }
  return r;
}

void expect_plain(const Shape& map, const Shape& kernel, const Conv2dOptions& options, DType dtype) {
  INFO("map " << map << ", kernel " << kernel << ", stride " << options.stride << ", padding " << options.padding << ", " << dtype);
  const Tensor x = random(map, dtype, 1), weight = random(kernel, dtype, 2);
  const Tensor dy = random(kernels::conv2d_shape(map, kernel, options), dtype, 3);
  const Results got = run(2, x, weight, options, dy), wanted = plain(x, weight, options, dy);
  // Terms of either sign, at most 1: a partial sum of n of them is about sqrt(n), n roundings of it walk about sqrt(n) times its
  // rounding error: n times the unit roundoff in all, here four times that for the tails.
  const double roundoff = dtype == DType::f32 ? 6e-8 : 1.2e-16;
  const auto compare = [&](const Tensor& a, const Tensor& b, std::int64_t terms) {
    expect_close(host_tensor<double>(a.shape(), values_of(a)), b, 0, 4 * roundoff * static_cast<double>(terms + 1));
  };
  const std::int64_t taps = kernel[1] * kernel[2];
  compare(got.y, wanted.y, taps * kernel[3]);
  compare(got.dx, wanted.dx, taps * kernel[0]);
  compare(got.dweight, wanted.dweight, dy.rows());
}

}  // namespace

TEST_CASE("conv2d: by hand", "[cpu]") {
  const Tensor x = host_tensor<double>({1, 3, 3, 1}, {1, 2, 3, 4, 5, 6, 7, 8, 9}), weight = host_tensor<double>({1, 2, 2, 1}, {1, 2, 3, 4});
  const Results r = run(1, x, weight, {1, 0}, host_tensor<double>({1, 2, 2, 1}, {1, 0, 0, 2}));
  CHECK(values_of(r.y) == std::vector<double>{37, 47, 67, 77});
  CHECK(values_of(r.dx) == std::vector<double>{1, 2, 0, 3, 6, 4, 0, 6, 8});
  CHECK(values_of(r.dweight) == std::vector<double>{11, 14, 20, 23});

  const Results padded = run(1, x, weight, {2, 1}, host_tensor<double>({1, 2, 2, 1}, {1, 1, 1, 1}));
  CHECK(values_of(padded.y) == std::vector<double>{4, 18, 36, 77});
  CHECK(values_of(padded.dx) == std::vector<double>{4, 3, 4, 2, 1, 2, 4, 3, 4});
  CHECK(values_of(padded.dweight) == std::vector<double>{5, 10, 10, 20});

  // Two channels in, two out: weights (out, kh, kw, in).
  const Tensor map = host_tensor<double>({1, 1, 2, 2}, {1, 2, 3, 4}), mix = host_tensor<double>({2, 1, 2, 2}, {1, 0, 0, 1, 1, 1, 2, -1});
  Tensor y = poisoned({1, 1, 1, 2}, DType::f64);
  kernels::conv2d_forward(Stream::cpu(1), map, mix, {1, 0}, y);
  CHECK(values_of(y) == std::vector<double>{5, 5});
}

TEST_CASE("conv2d: the definition", "[cpu]") {
  for (const DType dtype : {DType::f32, DType::f64}) {
    expect_plain({2, 7, 9, 3}, {5, 3, 3, 3}, {1, 1}, dtype);
    expect_plain({2, 8, 7, 3}, {5, 3, 3, 3}, {2, 1}, dtype);        // even and odd sizes under stride 2
    expect_plain({1, 9, 10, 2}, {3, 3, 3, 2}, {3, 0}, dtype);       // the last column is in no window
    expect_plain({1, 6, 5, 2}, {3, 2, 4, 2}, {1, 2}, dtype);        // kernel not square; wider padding than the gradient's window
    expect_plain({1, 5, 6, 2}, {3, 1, 2, 2}, {3, 0}, dtype);        // stride beyond the kernel: pixels without gradient
    expect_plain({1, 4, 4, 2}, {2, 1, 1, 2}, {1, 2}, dtype);        // 1 x 1 with padding: outputs that see nothing
    expect_plain({2, 5, 5, 3}, {4, 1, 1, 3}, {2, 0}, dtype);
    expect_plain({2, 5, 4, 3}, {4, 1, 1, 3}, {1, 0}, dtype);        // pointwise
    expect_plain({1, 2, 1, 3}, {2, 5, 5, 3}, {1, 2}, dtype);        // kernel larger than the map
    expect_plain({1, 1, 1, 1}, {1, 1, 1, 1}, {1, 0}, dtype);
    expect_plain({0, 5, 5, 2}, {3, 3, 3, 2}, {1, 1}, dtype);        // no images: the gradient of the weight is zero
  }
  expect_plain({1, 21, 20, 66}, {3, 3, 3, 66}, {1, 1}, DType::f32);    // the gradient of the weight by kernel rows
  expect_plain({2, 45, 33, 2}, {131, 3, 3, 2}, {1, 1}, DType::f32);    // and by chunks of pixels and panels of outputs
}

TEST_CASE("conv2d: same bits for any number of threads and any set of gradients", "[cpu]") {
  for (const std::int64_t stride : {1, 2}) {
    const Conv2dOptions options{stride, 1};
    const Tensor x = random({2, 40, 41, 8}, DType::f32, 1), weight = random({140, 3, 3, 8}, DType::f32, 2);
    const Tensor dy = random(kernels::conv2d_shape(x.shape(), weight.shape(), options), DType::f32, 3);
    const Results one = run(1, x, weight, options, dy);
    for (const int threads : {2, 3}) {
      const Results more = run(threads, x, weight, options, dy);
      expect_same_bits(more.y, one.y);
      expect_same_bits(more.dx, one.dx);
      expect_same_bits(more.dweight, one.dweight);
    }
    Tensor dx = poisoned(x.shape(), DType::f32), dweight = poisoned(weight.shape(), DType::f32);
    kernels::conv2d_backward(Stream::cpu(2), dy, x, weight, options, &dx, nullptr);
    kernels::conv2d_backward(Stream::cpu(2), dy, x, weight, options, nullptr, &dweight);
    expect_same_bits(dx, one.dx);
    expect_same_bits(dweight, one.dweight);
  }
}

TEST_CASE("conv2d: dx is added to what is there", "[cpu]") {
  for (const std::int64_t kernel : {1, 3}) {
    const Tensor x = random({2, 6, 5, 4}, DType::f64, 1), weight = random({3, kernel, kernel, 4}, DType::f64, 2), before = random(x.shape(), DType::f64, 4);
    const Conv2dOptions options{1, (kernel - 1) / 2};
    const Tensor dy = random(kernels::conv2d_shape(x.shape(), weight.shape(), options), DType::f64, 3);
    const Results alone = run(2, x, weight, options, dy);
    Tensor dx = host_tensor<double>(x.shape(), values_of(before)), dweight = poisoned(weight.shape(), DType::f64);
    kernels::conv2d_backward(Stream::cpu(2), dy, x, weight, options, &dx, &dweight, true);
    for (std::int64_t i = 0; i < dx.numel(); ++i) REQUIRE(dx.data<double>()[i] == before.data<double>()[i] + alone.dx.data<double>()[i]);
    expect_same_bits(dweight, alone.dweight);   // overwritten all the same
  }
}

TEST_CASE("conv2d: dx is taken back through the ReLU that made x", "[cpu]") {
  const Tensor weight = random({3, 3, 3, 4}, DType::f64, 2), before = random({2, 6, 5, 4}, DType::f64, 4), dy = random({2, 6, 5, 3}, DType::f64, 3);
  Tensor x = random(before.shape(), DType::f64, 1);
  x.data<double>()[7] = 0;
  x.data<double>()[8] = std::numeric_limits<double>::quiet_NaN();
  const auto gradient = [&](bool adds, bool relu_x) {
    Tensor dx = host_tensor<double>(x.shape(), values_of(before));
    kernels::conv2d_backward(Stream::cpu(2), dy, x, weight, {1, 1}, &dx, nullptr, adds, relu_x);
    return dx;
  };
  for (const bool adds : {false, true}) {
    const Tensor masked = gradient(adds, true), all = gradient(adds, false);
    for (std::int64_t i = 0; i < x.numel(); ++i) REQUIRE(masked.data<double>()[i] == (x.data<double>()[i] <= 0 ? 0 : all.data<double>()[i]));
  }
}

TEST_CASE("conv2d: errors", "[cpu]") {
  const Stream stream = Stream::cpu(1);
  expect_throws<InvalidArgument>([] { kernels::conv2d_shape({4, 4, 2}, {3, 3, 3, 2}, {1, 1}); }, "conv2d: x must be (N, H, W, I), got (4, 4, 2)");
  expect_throws<InvalidArgument>([] { kernels::conv2d_shape({1, 4, 4, 2}, {3, 3, 2}, {1, 1}); },
                                 "conv2d: weight must be (O, kh, kw, 2), got (3, 3, 2)");
  expect_throws<InvalidArgument>([] { kernels::conv2d_shape({1, 4, 4, 2}, {3, 3, 3, 1}, {1, 1}); },
                                 "conv2d: weight must be (O, kh, kw, 2), got (3, 3, 3, 1)");
  expect_throws<InvalidArgument>([] { kernels::conv2d_shape({1, 4, 4, 2}, {3, 0, 3, 2}, {1, 1}); },
                                 "conv2d: weight must be (O, kh, kw, 2), got (3, 0, 3, 2)");
  expect_throws<InvalidArgument>([] { kernels::conv2d_shape({1, 4, 4, 2}, {3, 3, 3, 2}, {0, 1}); }, "stride must be >= 1");
  expect_throws<InvalidArgument>([] { kernels::conv2d_shape({1, 4, 4, 2}, {3, 3, 3, 2}, {1, -1}); }, "padding >= 0, got 1 and -1");
  expect_throws<InvalidArgument>([] { kernels::conv2d_shape({1, 4, 4, 2}, {3, 7, 3, 2}, {1, 1}); },
                                 "conv2d: weight (3, 7, 3, 2) is larger than the map (1, 4, 4, 2) padded by 1");
  expect_throws<InvalidArgument>([] { kernels::conv2d_shape({1, 4, 4, 2}, {3, 3, 7, 2}, {1, 1}); }, "is larger than the map");

  const Tensor x = host_zeros({1, 4, 4, 2}, DType::f32), weight = host_zeros({3, 3, 3, 2}, DType::f32);
  const Tensor f64 = host_zeros({3, 3, 3, 2}, DType::f64);
  const Tensor ids = host_zeros({1, 4, 4, 2}, DType::i64), id_weight = host_zeros({3, 3, 3, 2}, DType::i64);
  Tensor y = host_zeros({1, 4, 4, 3}, DType::f32), bad = host_zeros({1, 4, 4, 1}, DType::f32), id_y = host_zeros({1, 4, 4, 3}, DType::i64);
  const auto forward = [&](const Tensor& a, const Tensor& w, Tensor& out) { return [&] { kernels::conv2d_forward(stream, a, w, {1, 1}, out); }; };
  expect_throws<InvalidArgument>(forward(Tensor(), weight, y), "conv2d: x and weight must be defined");
  expect_throws<InvalidArgument>(forward(x, f64, y), "conv2d: weight must be f32(3, 3, 3, 2), got f64(3, 3, 3, 2)");
  expect_throws<InvalidArgument>(forward(x, weight, bad), "conv2d: y must be f32(1, 4, 4, 3), got f32(1, 4, 4, 1)");
  expect_throws<InvalidArgument>(forward(ids, id_weight, id_y), "conv2d: the CPU computes in f32 and f64, got i64");
  const auto backward = [&](const Tensor& dy, Tensor* dx, Tensor* dweight) {
    return [&, dx, dweight] { kernels::conv2d_backward(stream, dy, x, weight, {1, 1}, dx, dweight); };
  };
  expect_throws<InvalidArgument>(backward(bad, nullptr, nullptr), "conv2d: dy must be f32(1, 4, 4, 3)");
  expect_throws<InvalidArgument>(backward(y, &bad, nullptr), "conv2d: dx must be f32(1, 4, 4, 2)");
  expect_throws<InvalidArgument>(backward(y, nullptr, &bad), "conv2d: dweight must be f32(3, 3, 3, 2)");
}
