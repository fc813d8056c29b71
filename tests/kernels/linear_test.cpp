#include "kernels/linear.h"

#include "tests/kernels/values.h"

using namespace detr;
using namespace detr::test;

namespace {

struct Results {
  Tensor y, dx, dweight, dbias;
};

Results run(int threads, const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& dy) {
  const Stream stream = Stream::cpu(threads);
  Results r{poisoned(dy.shape(), x.dtype()), poisoned(x.shape(), x.dtype()), poisoned(weight.shape(), x.dtype()),
            poisoned(bias.shape(), x.dtype())};
  kernels::linear_forward(stream, x, weight, &bias, r.y);
  kernels::linear_backward(stream, dy, x, weight, &r.dx, &r.dweight, &r.dbias);
  return r;
}

/// The formulas in plain loops.
void expect_plain(std::int64_t rows, std::int64_t in, std::int64_t out, DType dtype) {
  INFO("rows " << rows << ", in " << in << ", out " << out << ", " << dtype);
  const Tensor x = random({rows, in}, dtype, 1), weight = random({out, in}, dtype, 2), bias = random({out}, dtype, 3);
  const Tensor dy = random({rows, out}, dtype, 4);
  const Results r = run(2, x, weight, bias, dy);
  const std::vector<double> X = values_of(x), W = values_of(weight), B = values_of(bias), G = values_of(dy);
  const auto R = static_cast<std::size_t>(rows), I = static_cast<std::size_t>(in), O = static_cast<std::size_t>(out);
  Tensor y = host_zeros({rows, out}, DType::f64), dx = host_zeros(x.shape(), DType::f64);
  Tensor dweight = host_zeros(weight.shape(), DType::f64), dbias = host_zeros(bias.shape(), DType::f64);
  const auto ys = y.span<double>(), dxs = dx.span<double>(), dws = dweight.span<double>(), dbs = dbias.span<double>();
  for (std::size_t i = 0; i < R; ++i)
    for (std::size_t o = 0; o < O; ++o) {
      ys[i * O + o] = B[o];
      dbs[o] += G[i * O + o];
      for (std::size_t j = 0; j < I; ++j) {
        ys[i * O + o] += X[i * I + j] * W[o * I + j];
        dxs[i * I + j] += G[i * O + o] * W[o * I + j];
        dws[o * I + j] += G[i * O + o] * X[i * I + j];
      }
    }
  // Terms of either sign, at most 1: a partial sum of n of them is about sqrt(n), n roundings of it walk about sqrt(n) times its
  // rounding error: n times the unit roundoff in all, here four times that for the tails.
  const double roundoff = dtype == DType::f32 ? 6e-8 : 1.2e-16;
  const auto compare = [&](const Tensor& got, const Tensor& wanted, std::int64_t terms) {
    const std::vector<double> values = values_of(got);
    expect_close(host_tensor<double>(got.shape(), values), wanted, 0, 4 * roundoff * static_cast<double>(terms + 1));
  };
  compare(r.y, y, in);
  compare(r.dx, dx, out);
  compare(r.dweight, dweight, rows);
  compare(r.dbias, dbias, rows);
}

}  // namespace

TEST_CASE("linear: by hand", "[cpu]") {
  const Stream stream = Stream::cpu(1);
  const Tensor x = host_tensor<double>({2, 3}, {1, 2, 3, -1, 0, 2}), weight = host_tensor<double>({2, 3}, {1, 0, -1, 2, 1, 0});
  const Tensor bias = host_tensor<double>({2}, {10, 20}), dy = host_tensor<double>({2, 2}, {1, 2, 3, -1});
  const Results r = run(1, x, weight, bias, dy);
  CHECK(values_of(r.y) == std::vector<double>{8, 24, 7, 18});
  CHECK(values_of(r.dx) == std::vector<double>{5, 2, -1, 1, -1, -3});
  CHECK(values_of(r.dweight) == std::vector<double>{-2, 2, 9, 3, 4, 4});
  CHECK(values_of(r.dbias) == std::vector<double>{4, 1});

  Tensor y = poisoned({2, 2}, DType::f64);
  kernels::linear_forward(stream, x, weight, nullptr, y);
  CHECK(values_of(y) == std::vector<double>{-2, 4, -3, -2});
  const Tensor x3 = x.reshape({1, 2, 1, 3});   // leading dimensions are rows
  Tensor y3 = poisoned({1, 2, 1, 2}, DType::f64);
  kernels::linear_forward(stream, x3, weight, nullptr, y3);
  CHECK(values_of(y3) == values_of(y));
  CHECK(kernels::linear_shape(x3.shape(), weight.shape()) == y3.shape());
}

TEST_CASE("linear: plain loops", "[cpu]") {
  for (const DType dtype : {DType::f32, DType::f64}) {
    expect_plain(1, 1, 1, dtype);
    expect_plain(0, 3, 2, dtype);       // no rows: the gradients of weight and bias are zero
    expect_plain(3, 0, 2, dtype);       // no inputs: y is the bias
    expect_plain(3, 2, 0, dtype);
    expect_plain(31, 33, 7, dtype);
    expect_plain(600, 16, 4, dtype);    // several tasks of rows
    expect_plain(3100, 5, 131, dtype);  // three chunks of rows and two panels of outputs in the gradient of the weight
  }
}

TEST_CASE("linear: same bits for any number of threads and any set of gradients", "[cpu]") {
  const Tensor x = random({3100, 20}, DType::f32, 1), weight = random({150, 20}, DType::f32, 2), bias = random({150}, DType::f32, 3);
  const Tensor dy = random({3100, 150}, DType::f32, 4);
  const Results one = run(1, x, weight, bias, dy);
  for (const int threads : {2, 3}) {
    const Results more = run(threads, x, weight, bias, dy);
    expect_same_bits(more.y, one.y);
    expect_same_bits(more.dx, one.dx);
    expect_same_bits(more.dweight, one.dweight);
    expect_same_bits(more.dbias, one.dbias);
  }
  Tensor dweight = poisoned(weight.shape(), DType::f32);
  kernels::linear_backward(Stream::cpu(2), dy, x, weight, nullptr, &dweight, nullptr);
  expect_same_bits(dweight, one.dweight);
}

TEST_CASE("linear: dx is added to what is there", "[cpu]") {
  const Tensor x = random({7, 5}, DType::f64, 1), weight = random({3, 5}, DType::f64, 2), bias = random({3}, DType::f64, 3), dy = random({7, 3}, DType::f64, 4),
               before = random(x.shape(), DType::f64, 5);
  const Results alone = run(2, x, weight, bias, dy);
  Tensor dx = host_tensor<double>(x.shape(), values_of(before)), dbias = poisoned({3}, DType::f64);
  kernels::linear_backward(Stream::cpu(2), dy, x, weight, &dx, nullptr, &dbias, true);
  for (std::int64_t i = 0; i < dx.numel(); ++i) REQUIRE(dx.data<double>()[i] == before.data<double>()[i] + alone.dx.data<double>()[i]);
  expect_same_bits(dbias, alone.dbias);
}

TEST_CASE("linear: errors", "[cpu]") {
  const Stream stream = Stream::cpu(1);
  const Tensor x = host_zeros({4, 3}, DType::f32), weight = host_zeros({2, 3}, DType::f32), bias = host_zeros({2}, DType::f32);
  const Tensor wrong = host_zeros({3}, DType::f32), f64 = host_zeros({2, 3}, DType::f64), ids = host_zeros({2, 3}, DType::i64);
  Tensor y = host_zeros({4, 2}, DType::f32), bad = host_zeros({4, 3}, DType::f32), id_y = host_zeros({2, 2}, DType::i64);
  const auto forward = [&](const Tensor& a, const Tensor& w, const Tensor* b, Tensor& out) {
    return [&, b] { kernels::linear_forward(stream, a, w, b, out); };
  };
  expect_throws<InvalidArgument>(forward(Tensor(), weight, nullptr, y), "linear: x and weight must be defined");
  expect_throws<InvalidArgument>(forward(host_zeros({}, DType::f32), weight, nullptr, y), "linear: x must be (..., I), got ()");
  expect_throws<InvalidArgument>(forward(x, wrong, nullptr, y), "linear: weight must be (O, 3), got (3)");
  expect_throws<InvalidArgument>(forward(x, host_zeros({2, 4}, DType::f32), nullptr, y), "linear: weight must be (O, 3), got (2, 4)");
  expect_throws<InvalidArgument>(forward(x, f64, nullptr, y), "linear: weight must be f32(2, 3), got f64(2, 3)");
  expect_throws<InvalidArgument>(forward(x, weight, &wrong, y), "linear: bias must be f32(2), got f32(3)");
  expect_throws<InvalidArgument>(forward(x, weight, &bias, bad), "linear: y must be f32(4, 2), got f32(4, 3)");
  expect_throws<InvalidArgument>(forward(ids, ids, nullptr, id_y), "linear: the CPU computes in f32 and f64, got i64");
  const auto backward = [&](const Tensor& dy, Tensor* dx, Tensor* dweight, Tensor* dbias) {
    return [&, dx, dweight, dbias] { kernels::linear_backward(stream, dy, x, weight, dx, dweight, dbias); };
  };
  expect_throws<InvalidArgument>(backward(bad, nullptr, nullptr, nullptr), "linear: dy must be f32(4, 2)");
  expect_throws<InvalidArgument>(backward(y, &y, nullptr, nullptr), "linear: dx must be f32(4, 3)");
  expect_throws<InvalidArgument>(backward(y, nullptr, &y, nullptr), "linear: dweight must be f32(2, 3)");
  expect_throws<InvalidArgument>(backward(y, nullptr, nullptr, &y), "linear: dbias must be f32(2)");
}
