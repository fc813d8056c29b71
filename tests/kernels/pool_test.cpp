#include "kernels/pool.h"

#include <cmath>
#include <limits>

#include "runtime/random.h"
#include "tests/support.h"

using namespace detr;
using namespace detr::test;

namespace {

Tensor f64(const Shape& shape, const std::vector<double>& values) { return host_tensor<double>(shape, values); }

Tensor random(const Shape& shape, std::uint64_t seed = 0) {
  Tensor x = host_zeros(shape, DType::f32);
  for (std::int64_t i = 0; i < x.numel(); ++i) x.data<float>()[i] = static_cast<float>(normal(RandomKey(seed), static_cast<std::uint64_t>(i)));
  return x;
}

Shape half(const Tensor& x) { return {x.dim(0), (x.dim(1) + 1) / 2, (x.dim(2) + 1) / 2, x.dim(3)}; }

Tensor max_pool(const Tensor& x, const Stream& stream = Stream::cpu(1)) {
  Tensor y = stream.empty(half(x), x.dtype());
  kernels::max_pool_forward(stream, x, y);
  return y;
}
Tensor max_pool_backward(const Tensor& dy, const Tensor& x, const Stream& stream = Stream::cpu(1)) {
  Tensor dx = stream.empty_like(x);
  kernels::max_pool_backward(stream, dy, x, &dx);
  return dx;
}
Tensor avg_pool(const Tensor& x) {
  Tensor y = host_zeros(half(x), x.dtype());
  kernels::avg_pool_forward(Stream::cpu(1), x, y);
  return y;
}

}  // namespace

TEST_CASE("max_pool: worked by hand", "[cpu]") {
  // Windows of a 3 x 4 map: rows {0, 1}, {1, 2}; columns {0, 1}, {1, 2, 3}.
  const Tensor x = f64({1, 3, 4, 1}, {1, 2, 3, 9,    //
                                      4, 0, 5, 6,    //
                                      7, 8, -1, -2});
  expect_close(max_pool(x), f64({1, 2, 2, 1}, {4, 9, 8, 8}), 0);
  expect_close(max_pool_backward(f64({1, 2, 2, 1}, {10, 20, 30, 40}), x),
               f64({1, 3, 4, 1}, {0, 0, 0, 20,     //
                                  10, 0, 0, 0,     //
                                  0, 70, 0, 0}),
               0);
}

TEST_CASE("max_pool: ties, negative values, NaN", "[cpu]") {
  // All equal: each window's gradient goes to its first cell, which padding never is.
  const Tensor flat = f64({1, 4, 4, 1}, std::vector<double>(16, -3));
  expect_close(max_pool(flat), f64({1, 2, 2, 1}, {-3, -3, -3, -3}), 0);
  const Tensor flat_dx = max_pool_backward(f64({1, 2, 2, 1}, {1, 2, 3, 4}), flat);
  expect_close(flat_dx, f64({1, 4, 4, 1}, {1, 2, 0, 0, 3, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}), 0);

  const double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
  const Tensor odd = f64({1, 2, 2, 1}, {inf, nan, nan, 1});
  CHECK(std::isnan(max_pool(odd).data<double>()[0]));
  expect_close(max_pool_backward(f64({1, 1, 1, 1}, {5}), odd), f64({1, 2, 2, 1}, {0, 5, 0, 0}), 0);
  expect_close(max_pool(f64({1, 1, 1, 1}, {-inf})), f64({1, 1, 1, 1}, {-inf}), 0);
}

TEST_CASE("max_pool: against a search through each window", "[cpu]") {
  for (const Shape& shape : {Shape{1, 1, 1, 1}, Shape{2, 5, 4, 3}, Shape{1, 1, 7, 2}, Shape{2, 7, 9, 33}, Shape{0, 4, 4, 2}, Shape{1, 4, 4, 0}}) {
    const Tensor x = random(shape), y = max_pool(x), dy = random(y.shape(), 1);
    Tensor dx = host_zeros(shape, DType::f32);
    for (std::int64_t i = 0; i < y.numel(); ++i) {
      const std::int64_t C = shape[3], c = i % C, w = i / C % y.dim(2), h = i / C / y.dim(2) % y.dim(1), n = i / C / y.dim(2) / y.dim(1);
      std::int64_t best = -1;
      for (std::int64_t a = std::max<std::int64_t>(0, 2 * h - 1); a < std::min(shape[1], 2 * h + 2); ++a)
        for (std::int64_t b = std::max<std::int64_t>(0, 2 * w - 1); b < std::min(shape[2], 2 * w + 2); ++b) {
          const std::int64_t at = ((n * shape[1] + a) * shape[2] + b) * C + c;
          if (best < 0 || x.data<float>()[at] > x.data<float>()[best]) best = at;
        }
      REQUIRE(y.data<float>()[i] == x.data<float>()[best]);
      dx.data<float>()[best] += dy.data<float>()[i];
    }
    expect_close(max_pool_backward(dy, x), dx, 1e-6, 1e-6);
  }
}

TEST_CASE("max_pool: same bits for any number of threads", "[cpu]") {
  const Tensor x = random({2, 61, 63, 17}), y = max_pool(x), dx = max_pool_backward(y, x);
  for (const int threads : {2, 3}) {
    expect_same_bits(max_pool(x, Stream::cpu(threads)), y);
    expect_same_bits(max_pool_backward(y, x, Stream::cpu(threads)), dx);
  }
}

TEST_CASE("avg_pool: partial windows are divided by their real elements", "[cpu]") {
  const Tensor x = f64({1, 3, 3, 1}, {1, 2, 10,   //
                                      3, 6, 20,   //
                                      5, 7, 30});
  expect_close(avg_pool(x), f64({1, 2, 2, 1}, {3, 15, 6, 30}), 0);
  Tensor dx = host_zeros({1, 3, 3, 1}, DType::f64);
  kernels::avg_pool_backward(Stream::cpu(1), f64({1, 2, 2, 1}, {4, 6, 8, 9}), &dx);
  expect_close(dx, f64({1, 3, 3, 1}, {1, 1, 3, 1, 1, 3, 4, 4, 9}), 0);
  // Two images, two channels, an even size.
  const Tensor two = f64({2, 2, 2, 2}, {1, 10, 2, 20, 3, 30, 6, 60, 0, 0, 0, 0, 0, 0, 4, -4});
  expect_close(avg_pool(two), f64({2, 1, 1, 2}, {3, 30, 1, -1}), 0);
  expect_close(avg_pool(f64({1, 1, 1, 1}, {7})), f64({1, 1, 1, 1}, {7}), 0);
  CHECK(avg_pool(host_zeros({1, 0, 3, 2}, DType::f32)).numel() == 0);
}

TEST_CASE("upsample: each cell becomes a square of four", "[cpu]") {
  const Tensor x = f64({2, 1, 2, 2}, {1, 2, 3, 4, 5, 6, 7, 8});
  Tensor y = host_zeros({2, 2, 4, 2}, DType::f64), dx = host_zeros({2, 1, 2, 2}, DType::f64);
  kernels::upsample_forward(Stream::cpu(2), x, y);
  const std::vector<double> first = {1, 2, 1, 2, 3, 4, 3, 4}, second = {5, 6, 5, 6, 7, 8, 7, 8};
  std::vector<double> wanted;
  for (const auto* row : {&first, &first, &second, &second}) wanted.insert(wanted.end(), row->begin(), row->end());
  expect_close(y, f64({2, 2, 4, 2}, wanted), 0);
  kernels::upsample_backward(Stream::cpu(2), y, &dx);
  expect_close(dx, f64({2, 1, 2, 2}, {4, 8, 12, 16, 20, 24, 28, 32}), 0);
}

TEST_CASE("pool: nothing wanted", "[cpu]") {
  const Tensor x = random({1, 2, 2, 1}), dy = random({1, 1, 1, 1});
  CHECK_NOTHROW(kernels::max_pool_backward(Stream::cpu(1), dy, x, nullptr));
  CHECK_NOTHROW(kernels::avg_pool_backward(Stream::cpu(1), dy, nullptr));
  CHECK_NOTHROW(kernels::upsample_backward(Stream::cpu(1), dy, nullptr));
}

TEST_CASE("pool: broken contracts", "[cpu]") {
  const Stream stream = Stream::cpu(1);
  const Tensor x = host_zeros({1, 5, 4, 2}, DType::f64), flat = host_zeros({5, 4}, DType::f64), dy = host_zeros({1, 3, 2, 2}, DType::f64);
  Tensor wrong = host_zeros({1, 2, 2, 2}, DType::f64), ids = host_zeros({1, 2, 2, 1}, DType::i64);
  const Tensor id_map = host_zeros({1, 4, 4, 1}, DType::i64);
  const auto throws = [](const std::function<void()>& call, const std::string& text) { expect_throws<InvalidArgument>(call, text); };
  throws([&] { kernels::max_pool_forward(stream, flat, wrong); }, "max_pool: x must be (N, H, W, C), got f64(5, 4)");
  throws([&] { kernels::max_pool_forward(stream, x, wrong); }, "max_pool: y must be f64(1, 3, 2, 2), got f64(1, 2, 2, 2)");
  throws([&] { kernels::max_pool_forward(stream, id_map, ids); }, "max_pool: the CPU computes in f32 and f64, got i64");
  throws([&] { kernels::max_pool_backward(stream, wrong, x, nullptr); }, "max_pool: dy must be");
  throws([&] { kernels::max_pool_backward(stream, dy, x, &wrong); }, "max_pool: dx must be");
  throws([&] { kernels::avg_pool_forward(stream, flat, wrong); }, "avg_pool: x must be (N, H, W, C)");
  throws([&] { kernels::avg_pool_forward(stream, x, wrong); }, "avg_pool: y must be");
  throws([&] { kernels::avg_pool_backward(stream, dy, &wrong); }, "avg_pool: dy must be f64(1, 1, 1, 2)");
  throws([&] { kernels::upsample_forward(stream, flat, wrong); }, "upsample: x must be (N, H, W, C)");
  throws([&] { kernels::upsample_forward(stream, x, wrong); }, "upsample: y must be f64(1, 10, 8, 2)");
  throws([&] { kernels::upsample_backward(stream, dy, &wrong); }, "upsample: dy must be f64(1, 4, 4, 2)");
}
