#include "kernels/topk.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "runtime/random.h"
#include "tests/support.h"

using namespace detr;
using namespace detr::test;
using kernels::max_last;
using kernels::topk;

namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

struct Top {
  Tensor values, indices;
};

Top top(const Tensor& x, std::int64_t k, int threads = 1) {
  Top result{host_zeros({x.dim(0), k}, x.dtype()), host_zeros({x.dim(0), k}, DType::i64)};
  topk(Stream::cpu(threads), x, result.values, result.indices);
  return result;
}

double max_of(const std::vector<double>& row) {
  Tensor y = host_zeros({1}, DType::f64);
  max_last(Stream::cpu(1), host_tensor<double>({1, static_cast<std::int64_t>(row.size())}, row), y);
  return y.data<double>()[0];
}

/// Scores on a coarse grid, so that most values occur many times; some are NaN.
template <class T>
Tensor scores_with_ties(std::int64_t rows, std::int64_t count) {
  Tensor x = host_zeros({rows, count}, dtype_of<T>);
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    const double u = uniform(RandomKey(3), static_cast<std::uint64_t>(i));
    x.data<T>()[i] = u < 0.002 ? static_cast<T>(kNaN) : static_cast<T>(std::floor(u * 500) - 250);
  }
  return x;
}

template <class T>
void expect_stable_order(std::int64_t count, std::int64_t k) {
  const Tensor x = scores_with_ties<T>(2, count);
  const Top result = top(x, k);
  for (std::int64_t row = 0; row < 2; ++row) {
    const T* values = x.data<T>() + row * count;
    std::vector<std::int64_t> order(static_cast<std::size_t>(count));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
      if (std::isnan(values[a]) || std::isnan(values[b])) return std::isnan(values[a]) && !std::isnan(values[b]);
      return values[a] > values[b];
    });
    const std::int64_t* indices = result.indices.data<std::int64_t>() + row * k;
    CHECK(std::equal(indices, indices + k, order.begin()));
    for (std::int64_t i = 0; i < k; ++i) {
      const T value = result.values.data<T>()[row * k + i];
      if (value != values[indices[i]] && !std::isnan(values[indices[i]])) FAIL_CHECK("value " << i << " is not the one at its index");
    }
  }
}

}  // namespace

TEST_CASE("topk: NaN first, then descending, ties by the lower index", "[cpu]") {
  const Tensor x = host_tensor<double>({2, 6}, {1, kNaN, 3, 3, -kInf, kNaN, 0.0, -0.0, kInf, -1, 0.0, 2});
  const Top result = top(x, 4);
  CHECK(values_of(result.indices) == std::vector<double>{1, 5, 2, 3, 2, 5, 0, 1});
  const std::vector<double> values = values_of(result.values);
  CHECK((std::isnan(values[0]) && std::isnan(values[1])));
  CHECK(std::vector<double>(values.begin() + 2, values.end()) == std::vector<double>{3, 3, kInf, 2, 0, 0});
  CHECK(values_of(top(x, 6).indices) == std::vector<double>{1, 5, 2, 3, 0, 4, 2, 5, 0, 1, 4, 3});   // k = M
}

TEST_CASE("topk: as a stable sort", "[cpu]") {
  for (const std::int64_t count : {1, 7, 300, 8400}) {
    expect_stable_order<float>(count, std::min<std::int64_t>(count, 300));
    expect_stable_order<double>(count, std::min<std::int64_t>(count, 300));
    expect_stable_order<float>(count, count);
  }
  expect_stable_order<float>(24000, 300);
}

TEST_CASE("topk: nothing asked or nothing there", "[cpu]") {
  CHECK(top(host_zeros({3, 5}, DType::f32), 0).indices.numel() == 0);
  CHECK(top(host_zeros({0, 5}, DType::f32), 2).indices.numel() == 0);
  CHECK(top(host_zeros({2, 0}, DType::f32), 0).indices.numel() == 0);
}

TEST_CASE("topk: same bits for any number of threads", "[cpu]") {
  const Tensor x = scores_with_ties<float>(5, 1000);
  const Top one = top(x, 100);
  for (const int threads : {2, 3}) {
    const Top many = top(x, 100, threads);
    expect_same_bits(many.values, one.values);
    expect_same_bits(many.indices, one.indices);
  }
}

TEST_CASE("topk: errors", "[cpu]") {
  const Stream stream = Stream::cpu(1);
  const Tensor x = host_zeros({2, 5}, DType::f32);
  Tensor values = host_zeros({2, 3}, DType::f32), indices = host_zeros({2, 3}, DType::i64);
  Tensor flat = host_zeros({6}, DType::f32), long_values = host_zeros({2, 6}, DType::f32), doubles = host_zeros({2, 3}, DType::f64);
  Tensor short_indices = host_zeros({2, 2}, DType::i64), integers = host_zeros({2, 5}, DType::i64);
  expect_throws<InvalidArgument>([&] { topk(stream, flat, values, indices); }, "topk: x must be (R, M), got f32(6)");
  expect_throws<InvalidArgument>([&] { topk(stream, x, flat, indices); }, "topk: values must be (R, k), got f32(6)");
  expect_throws<InvalidArgument>([&] { topk(stream, x, long_values, indices); }, "topk: k must be at most M = 5, got 6");
  expect_throws<InvalidArgument>([&] { topk(stream, x, doubles, indices); }, "topk: values must be f32(2, 3), got f64(2, 3)");
  expect_throws<InvalidArgument>([&] { topk(stream, x, values, short_indices); }, "topk: indices must be i64(2, 3), got i64(2, 2)");
  Tensor integer_values = host_zeros({2, 3}, DType::i64);
  expect_throws<InvalidArgument>([&] { topk(stream, integers, integer_values, indices); }, "topk: the CPU computes in f32 and f64, got i64");
}

TEST_CASE("max_last: rows of any width", "[cpu]") {
  CHECK(max_of({-3}) == -3);
  CHECK(max_of({-kInf, -kInf}) == -kInf);
  CHECK(max_of({1, kInf, 2}) == kInf);
  for (const std::size_t width : {1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 80}) {
    for (std::size_t at = 0; at < width; ++at) {
      std::vector<double> row(width);
      for (std::size_t i = 0; i < width; ++i) row[i] = -1 - static_cast<double>(i * 7 % width);
      row[at] = 5;
      if (max_of(row) != 5) FAIL_CHECK("width " << width << ", largest at " << at << ": got " << max_of(row));
      row[at] = kNaN;
      if (!std::isnan(max_of(row))) FAIL_CHECK("width " << width << ", NaN at " << at << ": got " << max_of(row));
    }
  }
}

TEST_CASE("max_last: shapes", "[cpu]") {
  const Stream stream = Stream::cpu(2);
  Tensor one = host_zeros({}, DType::f32);
  max_last(stream, host_tensor<float>({3}, {1, 4, 2}), one);
  CHECK(one.data<float>()[0] == 4);
  Tensor x = host_zeros({2, 700, 3}, DType::f32), y = host_zeros({2, 700}, DType::f32);
  for (std::int64_t i = 0; i < x.numel(); ++i) x.data<float>()[i] = static_cast<float>(i);
  max_last(stream, x, y);
  for (std::int64_t i = 0; i < y.numel(); ++i) REQUIRE(y.data<float>()[i] == static_cast<float>(3 * i + 2));
  Tensor none = host_zeros({0, 4}, DType::f32);
  max_last(stream, host_zeros({0, 4, 3}, DType::f32), none);
}

TEST_CASE("max_last: errors", "[cpu]") {
  const Stream stream = Stream::cpu(1);
  Tensor y = host_zeros({2}, DType::f32), long_y = host_zeros({3}, DType::f32), integers = host_zeros({2}, DType::i64);
  expect_throws<InvalidArgument>([&] { max_last(stream, host_zeros({}, DType::f32), y); }, "max_last: x must be (..., C) with C >= 1");
  expect_throws<InvalidArgument>([&] { max_last(stream, host_zeros({2, 0}, DType::f32), y); }, "with C >= 1, got f32(2, 0)");
  expect_throws<InvalidArgument>([&] { max_last(stream, host_zeros({2, 4}, DType::f32), long_y); }, "max_last: y must be f32(2), got f32(3)");
  expect_throws<InvalidArgument>([&] { max_last(stream, host_zeros({2, 4}, DType::i64), integers); }, "max_last: the CPU computes in f32");
}
