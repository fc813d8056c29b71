#include "kernels/gather.h"

#include <array>

#include "kernels/pointwise.h"
#include "tests/support.h"

using namespace detr;
using namespace detr::test;

namespace {

Tensor f64(const Shape& shape, const std::vector<double>& values) { return host_tensor<double>(shape, values); }
Tensor i64(const Shape& shape, const std::vector<std::int64_t>& values) { return host_tensor<std::int64_t>(shape, values); }
Tensor u8(const Shape& shape, const std::vector<std::uint8_t>& values) { return host_tensor<std::uint8_t>(shape, values); }

const Stream& stream() {
  static const Stream two = Stream::cpu(2);
  return two;
}

}  // namespace

TEST_CASE("concat: along each dimension, back and forth", "[cpu]") {
  const std::array<Tensor, 2> columns = {f64({2, 1}, {1, 4}), f64({2, 2}, {2, 3, 5, 6})};
  Tensor y = host_zeros({2, 3}, DType::f64);
  kernels::concat_forward(stream(), columns, 1, y);
  expect_close(y, f64({2, 3}, {1, 2, 3, 4, 5, 6}), 0);

  Tensor first = host_zeros({2, 1}, DType::f64), second = host_zeros({2, 2}, DType::f64);
  const std::array<std::int64_t, 2> sizes = {1, 2};
  const std::array<Tensor*, 2> both = {&first, &second}, one = {nullptr, &second};
  kernels::concat_backward(stream(), y, 1, sizes, both);
  expect_same_bits(first, columns[0]);
  expect_same_bits(second, columns[1]);
  kernels::fill(stream(), 0, second);
  kernels::concat_backward(stream(), y, 1, sizes, one);
  expect_same_bits(second, columns[1]);

  const std::array<Tensor, 3> rows = {i64({1, 2}, {1, 2}), i64({0, 2}, {}), i64({2, 2}, {3, 4, 5, 6})};
  Tensor stacked = host_zeros({3, 2}, DType::i64);
  kernels::concat_forward(stream(), rows, 0, stacked);
  CHECK(values_of(stacked) == std::vector<double>{1, 2, 3, 4, 5, 6});

  const std::array<Tensor, 2> bytes = {u8({1, 2, 1}, {1, 2}), u8({1, 1, 1}, {3})};
  Tensor middle = host_zeros({1, 3, 1}, DType::u8);
  kernels::concat_forward(stream(), bytes, 1, middle);
  CHECK(values_of(middle) == std::vector<double>{1, 2, 3});
}

TEST_CASE("gather_rows: rows of each image, zeros where invalid", "[cpu]") {
  const Tensor x = f64({2, 3, 2}, {1, 2, 3, 4, 5, 6, 10, 20, 30, 40, 50, 60});
  const Tensor index = i64({2, 3}, {2, 0, 2, 1, 1, 0}), valid = u8({3}, {0, 1, 1});
  Tensor y = host_zeros({2, 3, 2}, DType::f64), dx = x, none = host_zeros({2, 0, 2}, DType::f64);
  kernels::gather_rows_forward(stream(), x, index, nullptr, y);
  expect_close(y, f64({2, 3, 2}, {5, 6, 1, 2, 5, 6, 30, 40, 30, 40, 10, 20}), 0);
  kernels::gather_rows_forward(stream(), x, index, &valid, y);
  expect_close(y, f64({2, 3, 2}, {5, 6, 0, 0, 5, 6, 30, 40, 30, 40, 0, 0}), 0);

  const Tensor dy = f64({2, 3, 2}, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12});
  dx = host_zeros({2, 3, 2}, DType::f64);
  kernels::gather_rows_backward(stream(), dy, index, nullptr, &dx);
  expect_close(dx, f64({2, 3, 2}, {3, 4, 0, 0, 6, 8, 11, 12, 16, 18, 0, 0}), 0);
  kernels::gather_rows_backward(stream(), dy, index, &valid, &dx);
  expect_close(dx, f64({2, 3, 2}, {0, 0, 0, 0, 6, 8, 0, 0, 16, 18, 0, 0}), 0);

  kernels::gather_rows_forward(stream(), x, i64({2, 0}, {}), nullptr, none);
  kernels::gather_rows_backward(stream(), none, i64({2, 0}, {}), nullptr, &dx);
  expect_close(dx, host_zeros({2, 3, 2}, DType::f64), 0);
}

TEST_CASE("embedding: rows of a table", "[cpu]") {
  const Tensor table = f64({3, 2}, {1, 2, 3, 4, 5, 6}), index = i64({2, 2}, {2, 0, 2, 1});
  Tensor y = host_zeros({2, 2, 2}, DType::f64), dtable = f64({3, 2}, {9, 9, 9, 9, 9, 9}), row = host_zeros({2}, DType::f64);
  kernels::embedding_forward(stream(), table, index, y);
  expect_close(y, f64({2, 2, 2}, {5, 6, 1, 2, 5, 6, 3, 4}), 0);
  kernels::embedding_forward(stream(), table, i64({}, {1}), row);
  expect_close(row, f64({2}, {3, 4}), 0);

  const Tensor dy = f64({2, 2, 2}, {1, 2, 3, 4, 5, 6, 7, 8});
  kernels::embedding_backward(stream(), dy, index, -1, &dtable);
  expect_close(dtable, f64({3, 2}, {3, 4, 7, 8, 6, 8}), 0);
  kernels::embedding_backward(stream(), dy, index, 2, &dtable);
  expect_close(dtable, f64({3, 2}, {3, 4, 7, 8, 0, 0}), 0);
  kernels::embedding_backward(stream(), host_zeros({0, 2}, DType::f64), i64({0}, {}), -1, &dtable);
  expect_close(dtable, host_zeros({3, 2}, DType::f64), 0);
}

TEST_CASE("embedding: a gradient wider than one task, on any number of threads", "[cpu]") {
  Tensor dy = host_zeros({301, 130}, DType::f32), index = host_zeros({301}, DType::i64);
  for (std::int64_t i = 0; i < dy.numel(); ++i) dy.data<float>()[i] = 0.1F * static_cast<float>(i % 97);
  for (std::int64_t i = 0; i < 301; ++i) index.data<std::int64_t>()[i] = i * i % 7;
  Tensor one = host_zeros({7, 130}, DType::f32), three = host_zeros({7, 130}, DType::f32);
  kernels::embedding_backward(Stream::cpu(1), dy, index, 4, &one);
  kernels::embedding_backward(Stream::cpu(3), dy, index, 4, &three);
  expect_same_bits(three, one);
  float sum = 0;
  for (std::int64_t i = 0; i < 301; ++i)
    if (i * i % 7 == 2) sum += dy.data<float>()[i * 130 + 129];
  CHECK(one.data<float>()[2 * 130 + 129] == sum);
}

TEST_CASE("gather: nothing wanted", "[cpu]") {
  const Tensor undefined;
  CHECK_NOTHROW(kernels::gather_rows_backward(stream(), undefined, undefined, nullptr, nullptr));
  CHECK_NOTHROW(kernels::embedding_backward(stream(), undefined, undefined, -1, nullptr));
}

TEST_CASE("gather: broken contracts", "[cpu]") {
  const Tensor x = host_zeros({2, 3, 2}, DType::f64), index = i64({2, 1}, {0, 2}), flat = host_zeros({4}, DType::f64), undefined;
  const Tensor table = host_zeros({3, 2}, DType::f64), deep = host_zeros({1, 1, 1, 1, 1, 1}, DType::i64);
  Tensor y = host_zeros({2, 1, 2}, DType::f64), wrong = host_zeros({2, 2, 2}, DType::f64), dx = host_zeros({2, 3, 2}, DType::f64);
  const std::array<Tensor, 2> pair = {x, x}, ranks = {x, flat}, dtypes = {x, host_zeros({2, 3, 2}, DType::f32)};
  Tensor joined = host_zeros({2, 6, 2}, DType::f64);
  const auto throws = [](const std::function<void()>& call, const std::string& text) { expect_throws<InvalidArgument>(call, text); };
  throws([&] { kernels::concat_forward(stream(), {}, 0, joined); }, "concat: there must be at least one input");
  throws([&] { kernels::concat_forward(stream(), pair, 3, joined); }, "concat: axis 3 of f64(2, 6, 2)");
  throws([&] { kernels::concat_forward(stream(), pair, -1, joined); }, "concat: axis -1");
  throws([&] { kernels::concat_forward(stream(), ranks, 1, joined); }, "concat: input must have 3 dimensions, got f64(4)");
  throws([&] { kernels::concat_forward(stream(), dtypes, 1, joined); }, "concat: input must be f64(2, 3, 2), got f32(2, 3, 2)");
  throws([&] { kernels::concat_forward(stream(), pair, 1, wrong); }, "concat: the inputs have 6 along dimension 1 of y, which is f64(2, 2, 2)");
  throws([&] { kernels::concat_forward(stream(), pair, 0, joined); }, "concat: input must be f64(2, 6, 2)");

  const std::array<std::int64_t, 2> sizes = {3, 3}, few = {1, 2}, negative = {-1, 7};
  const std::array<Tensor*, 2> wanted = {&dx, nullptr}, misshapen = {&wrong, nullptr};
  const std::array<Tensor*, 1> one = {&dx};
  throws([&] { kernels::concat_backward(stream(), joined, 3, sizes, wanted); }, "concat: axis 3");
  throws([&] { kernels::concat_backward(stream(), joined, 1, sizes, one); }, "concat: 2 sizes for 1 gradients");
  throws([&] { kernels::concat_backward(stream(), joined, 1, negative, wanted); }, "concat: size must be >= 0, got -1");
  throws([&] { kernels::concat_backward(stream(), joined, 1, sizes, misshapen); }, "concat: dinput must be f64(2, 3, 2)");
  throws([&] { kernels::concat_backward(stream(), joined, 1, few, std::array<Tensor*, 2>{}); }, "concat: the sizes add up to 3");

  throws([&] { kernels::gather_rows_forward(stream(), table, index, nullptr, y); }, "gather_rows: x must be (N, T, D), got f64(3, 2)");
  throws([&] { kernels::gather_rows_forward(stream(), x, flat, nullptr, y); }, "gather_rows: index must be (N, Q), got f64(4)");
  throws([&] { kernels::gather_rows_forward(stream(), x, i64({1, 1}, {0}), nullptr, y); }, "gather_rows: index must be i64(2, 1)");
  throws([&] { kernels::gather_rows_forward(stream(), x, index, &flat, y); }, "gather_rows: valid must be u8(3)");
  throws([&] { kernels::gather_rows_forward(stream(), x, index, nullptr, wrong); }, "gather_rows: y must be f64(2, 1, 2)");
  throws([&] { kernels::gather_rows_forward(stream(), x, i64({2, 1}, {0, 3}), nullptr, y); }, "gather_rows: index 3 of 3 rows");
  throws([&] { kernels::gather_rows_backward(stream(), y, i64({2, 1}, {-1, 0}), nullptr, &dx); }, "gather_rows: index -1 of 3 rows");
  throws([&] { kernels::gather_rows_backward(stream(), wrong, index, nullptr, &dx); }, "gather_rows: dy must be");

  Tensor rows = host_zeros({2, 1, 2}, DType::f64), dtable = host_zeros({3, 2}, DType::f64);
  throws([&] { kernels::embedding_forward(stream(), flat, index, rows); }, "embedding: table must be (K, D), got f64(4)");
  throws([&] { kernels::embedding_forward(stream(), table, flat, rows); }, "embedding: index must be i64(4)");
  throws([&] { kernels::embedding_forward(stream(), table, deep, rows); }, "embedding: index has too many dimensions");
  throws([&] { kernels::embedding_forward(stream(), table, index, wrong); }, "embedding: y must be f64(2, 1, 2)");
  throws([&] { kernels::embedding_forward(stream(), table, i64({2, 1}, {0, 3}), rows); }, "embedding: index 3 of 3 rows");
  throws([&] { kernels::embedding_backward(stream(), rows, i64({2, 1}, {0, -2}), -1, &dtable); }, "embedding: index -2 of 3 rows");
  throws([&] { kernels::embedding_backward(stream(), rows, index, 3, &dtable); }, "embedding: padding_row 3");
  throws([&] { kernels::embedding_backward(stream(), wrong, index, -1, &dtable); }, "embedding: dy must be");
}
