#include "kernels/pointwise.h"

#include <array>
#include <limits>

#include "tests/support.h"

using namespace detr;
using namespace detr::test;

namespace {

Tensor f64(const Shape& shape, const std::vector<double>& values) { return host_tensor<double>(shape, values); }
Tensor u8(const Shape& shape, const std::vector<std::uint8_t>& values) { return host_tensor<std::uint8_t>(shape, values); }

/// 0.1, 0.2, ... in f32.
Tensor ramp(const Shape& shape) {
  Tensor x = host_zeros(shape, DType::f32);
  for (std::int64_t i = 0; i < x.numel(); ++i) x.data<float>()[i] = 0.1F * static_cast<float>(i + 1);
  return x;
}

const Stream& stream() {
  static const Stream one = Stream::cpu(1);
  return one;
}

}  // namespace

TEST_CASE("add: equal shapes and suffixes", "[cpu]") {
  const Tensor a = f64({2, 1, 2}, {1, 2, 3, 4});
  Tensor y = host_zeros({2, 1, 2}, DType::f64);
  kernels::add_forward(stream(), a, a, y);
  expect_close(y, f64({2, 1, 2}, {2, 4, 6, 8}), 0);
  kernels::add_forward(stream(), a, f64({2}, {10, 20}), y);
  expect_close(y, f64({2, 1, 2}, {11, 22, 13, 24}), 0);
  kernels::add_forward(stream(), a, f64({1, 2}, {10, 20}), y);
  expect_close(y, f64({2, 1, 2}, {11, 22, 13, 24}), 0);
  kernels::add_forward(stream(), a, f64({}, {5}), y);
  expect_close(y, f64({2, 1, 2}, {6, 7, 8, 9}), 0);
  Tensor none = host_zeros({3, 0}, DType::f64);
  kernels::add_forward(stream(), none, host_zeros({0}, DType::f64), none);
}

TEST_CASE("add: gradients", "[cpu]") {
  const Tensor dy = f64({3, 2}, {1, 2, 3, 4, 5, 6});
  Tensor da = host_zeros({3, 2}, DType::f64), db = f64({2}, {7, 7}), whole = host_zeros({3, 2}, DType::f64), all = host_zeros({}, DType::f64);
  kernels::add_backward(stream(), dy, &da, &db);
  expect_same_bits(da, dy);
  expect_close(db, f64({2}, {9, 12}), 0);
  kernels::add_backward(stream(), dy, nullptr, &whole);
  expect_same_bits(whole, dy);
  kernels::add_backward(stream(), dy, nullptr, &all);
  expect_close(all, f64({}, {21}), 0);
  kernels::add_backward(stream(), dy, nullptr, nullptr);
  kernels::add_backward(stream(), host_zeros({0, 2}, DType::f64), nullptr, &db);   // no rows: zeros, not what was there
  expect_close(db, f64({2}, {0, 0}), 0);
}

TEST_CASE("add: blocks that cut through the repeated part, on any number of threads", "[cpu]") {
  const Tensor a = ramp({131, 1001}), b = ramp({1001});
  Tensor y = host_zeros(a.shape(), DType::f32), db = host_zeros(b.shape(), DType::f32);
  kernels::add_forward(stream(), a, b, y);
  kernels::add_backward(stream(), a, nullptr, &db);
  for (const std::int64_t i : {0, 1000, 32767, 32768, 131130}) CHECK(y.data<float>()[i] == a.data<float>()[i] + b.data<float>()[i % 1001]);
  for (const int threads : {2, 3}) {
    Tensor y2 = host_zeros(a.shape(), DType::f32), db2 = host_zeros(b.shape(), DType::f32);
    kernels::add_forward(Stream::cpu(threads), a, b, y2);
    kernels::add_backward(Stream::cpu(threads), a, nullptr, &db2);
    expect_same_bits(y2, y);
    expect_same_bits(db2, db);
  }
}

TEST_CASE("accumulate, fill, scale", "[cpu]") {
  for (const std::int64_t n : {0, 1, 33, 70001}) {
    const Tensor x = ramp({n});
    Tensor into = host_zeros({n}, DType::f32), y = host_zeros({n}, DType::f32);
    kernels::fill(stream(), 2.5, into);
    kernels::accumulate(stream(), x, into);
    kernels::scale(stream(), x, -2, y);
    for (std::int64_t i = 0; i < n; i += 1 + n / 7) {
      CHECK(into.data<float>()[i] == 2.5F + x.data<float>()[i]);
      CHECK(y.data<float>()[i] == -2 * x.data<float>()[i]);
    }
  }
}

TEST_CASE("sum: all elements of all inputs, in double", "[cpu]") {
  const std::array<Tensor, 3> inputs = {f64({2, 2}, {1, 2, 3, 4}), f64({0}, {}), f64({}, {0.5})};
  Tensor total = host_zeros({1}, DType::f64);
  kernels::sum_forward(stream(), inputs, total);
  expect_close(total, f64({1}, {10.5}), 0);

  // In f32 the small numbers would be lost: 2^24 + 1 rounds to 2^24.
  const std::array<Tensor, 1> singles = {host_tensor<float>({4}, {16777216, 1, 1, -16777216})};
  Tensor single = host_zeros({1}, DType::f32);
  kernels::sum_forward(stream(), singles, single);
  CHECK(single.data<float>()[0] == 2);

  Tensor da = host_zeros({2, 2}, DType::f64), dc = host_zeros({}, DType::f64);
  const std::array<Tensor*, 3> wanted = {&da, nullptr, &dc};
  kernels::sum_backward(stream(), f64({1}, {3}), wanted);
  expect_close(da, f64({2, 2}, {3, 3, 3, 3}), 0);
  expect_close(dc, f64({}, {3}), 0);
}

TEST_CASE("cast: bf16, rounded to nearest, ties to even", "[cpu]") {
  const std::vector<float> values = {1, -2.5F, 1.00390625F, 1.01171875F, 3.4e38F, -0.0F, 1e-40F, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()};
  const std::vector<float> wanted = {1, -2.5F, 1.0F, 1.015625F, std::numeric_limits<float>::infinity(), -0.0F, 9.1835496e-41F, std::numeric_limits<float>::infinity(), 0};
  const Tensor x = host_tensor<float>({9}, values);
  Tensor half = host_zeros({9}, DType::bf16), back = host_zeros({9}, DType::f32), wide = host_zeros({9}, DType::f64);
  kernels::cast(stream(), x, half);
  kernels::cast(stream(), half, back);
  kernels::cast(stream(), half, wide);
  for (std::size_t i = 0; i + 1 < wanted.size(); ++i) {
    INFO("element " << i);
    expect_close(static_cast<double>(back.data<float>()[i]), static_cast<double>(wanted[i]), 1e-3);
    CHECK(wide.data<double>()[i] == static_cast<double>(back.data<float>()[i]));
  }
  CHECK(std::isnan(back.data<float>()[8]));
}

TEST_CASE("cast", "[cpu]") {
  const Tensor x = f64({3}, {0.1, -2, 1e300});
  Tensor single = host_zeros({3}, DType::f32), twice = host_zeros({3}, DType::f64), same = host_zeros({3}, DType::f64);
  kernels::cast(stream(), x, same);
  expect_same_bits(same, x);
  kernels::cast(stream(), f64({3}, {0.1, -2, 7}), single);
  CHECK(single.data<float>()[0] == 0.1F);
  kernels::cast(stream(), single, twice);
  CHECK(twice.data<double>()[0] == static_cast<double>(0.1F));
  kernels::cast(stream(), u8({3}, {0, 7, 255}), single);
  CHECK(values_of(single) == std::vector<double>{0, 7, 255});
  kernels::cast(stream(), host_tensor<std::int64_t>({3}, {-5, 0, 1234567}), twice);
  CHECK(values_of(twice) == std::vector<double>{-5, 0, 1234567});
}

TEST_CASE("mask_rows", "[cpu]") {
  const Tensor x = f64({2, 3, 2}, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12});
  Tensor y = host_zeros({2, 3, 2}, DType::f64);
  kernels::mask_rows(stream(), x, u8({3}, {1, 0, 2}), y);   // any value but 0 keeps
  expect_close(y, f64({2, 3, 2}, {1, 2, 0, 0, 5, 6, 7, 8, 0, 0, 11, 12}), 0);
  kernels::mask_rows(stream(), x, u8({2, 3}, {0, 0, 1, 1, 0, 0}), y);
  expect_close(y, f64({2, 3, 2}, {0, 0, 0, 0, 5, 6, 7, 8, 0, 0, 0, 0}), 0);
  const Tensor nan = f64({1, 1}, {std::numeric_limits<double>::quiet_NaN()});
  Tensor zero = f64({1, 1}, {1});
  kernels::mask_rows(stream(), nan, u8({1}, {0}), zero);   // not a product: NaN times 0 would stay
  CHECK(zero.data<double>()[0] == 0);
}

TEST_CASE("images_to_float: scaling and nearest resize", "[cpu]") {
  const Tensor images = u8({1, 2, 3, 1}, {0, 51, 102, 153, 204, 255});
  Tensor same = host_zeros({1, 2, 3, 1}, DType::f64);
  kernels::images_to_float(stream(), images, same);
  expect_close(same, f64({1, 2, 3, 1}, {0, 0.2, 0.4, 0.6, 0.8, 1}), 1e-15);
  Tensor smaller = host_zeros({1, 1, 2, 1}, DType::f64);   // columns 0 and floor(3 / 2) = 1
  kernels::images_to_float(stream(), images, smaller);
  expect_close(smaller, f64({1, 1, 2, 1}, {0, 0.2}), 1e-15);
  Tensor larger = host_zeros({1, 3, 4, 1}, DType::f32);    // rows 0, 0, 1; columns 0, 0, 1, 2
  kernels::images_to_float(stream(), images, larger);
  expect_close(larger, f64({1, 3, 4, 1}, {0, 0, 0.2, 0.4, 0, 0, 0.2, 0.4, 0.6, 0.6, 0.8, 1}), 1e-7);
  Tensor two = host_zeros({2, 1, 1, 2}, DType::f64);
  kernels::images_to_float(stream(), u8({2, 1, 1, 2}, {255, 0, 51, 102}), two);
  expect_close(two, f64({2, 1, 1, 2}, {1, 0, 0.2, 0.4}), 1e-15);
}

TEST_CASE("pointwise: broken contracts", "[cpu]") {
  const Tensor x = f64({2, 3}, {1, 2, 3, 4, 5, 6}), ids = host_zeros({2, 3}, DType::i64), mask = u8({2}, {1, 1}), images = u8({1, 1, 1, 1}, {1});
  Tensor y = host_zeros({2, 3}, DType::f64), wrong = host_zeros({2}, DType::f64), single = host_zeros({2, 3}, DType::f32), undefined;
  Tensor whole = host_zeros({2, 3}, DType::i64), map = host_zeros({1, 1, 1, 2}, DType::f64), half = host_zeros({2, 3}, DType::bf16);
  const std::array<Tensor, 1> inputs = {x};
  const std::array<Tensor*, 1> wanted = {&single};
  const auto throws = [](const std::function<void()>& call, const std::string& text) { expect_throws<InvalidArgument>(call, text); };
  throws([&] { kernels::add_forward(stream(), x, wrong, y); }, "add: the shape of b must be that of a or a suffix of it, got f64(2, 3) and f64(2)");
  throws([&] { kernels::add_forward(stream(), wrong, x, wrong); }, "add: the shape of b");
  throws([&] { kernels::add_forward(stream(), x, single, y); }, "add: b must be f64(2, 3), got f32(2, 3)");
  throws([&] { kernels::add_forward(stream(), x, x, wrong); }, "add: y must be");
  throws([&] { kernels::add_forward(stream(), ids, ids, whole); }, "add: the CPU computes in f32 and f64, got i64");
  throws([&] { kernels::add_backward(stream(), x, &wrong, nullptr); }, "add: da must be");
  throws([&] { kernels::add_backward(stream(), x, nullptr, &wrong); }, "add: the shape of db");
  throws([&] { kernels::add_backward(stream(), x, nullptr, &single); }, "add: db must be");
  throws([&] { kernels::accumulate(stream(), x, wrong); }, "accumulate: into must be f64(2, 3), got f64(2)");
  throws([&] { kernels::fill(stream(), 1, whole); }, "fill: the CPU computes in f32 and f64, got i64");
  throws([&] { kernels::scale(stream(), x, 2, single); }, "scale: y must be");
  throws([&] { kernels::sum_forward(stream(), {}, wrong); }, "sum: there must be at least one input");
  throws([&] { kernels::sum_forward(stream(), inputs, single); }, "sum: input must be f32(2, 3)");
  throws([&] { kernels::sum_forward(stream(), inputs, wrong); }, "sum: total must be f64(1)");
  throws([&] { kernels::sum_backward(stream(), x, {}); }, "sum: dtotal must be f64(1)");
  throws([&] { kernels::sum_backward(stream(), f64({1}, {1}), wanted); }, "sum: dinput must be f64(2, 3)");
  throws([&] { kernels::cast(stream(), x, half); }, "cast: to bf16 from f32 alone, got f64(2, 3)");
  throws([&] { kernels::cast(stream(), undefined, y); }, "cast: x must be");
  throws([&] { kernels::cast(stream(), x, wrong); }, "cast: y must be");
  throws([&] { kernels::cast(stream(), x, whole); }, "cast: the CPU computes in f32 and f64, got i64");
  throws([&] { kernels::mask_rows(stream(), x, u8({3}, {1, 1, 1}), y); }, "mask_rows: the shape of mask must be a suffix");
  throws([&] { kernels::mask_rows(stream(), x, wrong, y); }, "mask_rows: mask must be u8(2)");
  throws([&] { kernels::mask_rows(stream(), x, mask, single); }, "mask_rows: y must be");
  throws([&] { kernels::images_to_float(stream(), x, map); }, "images_to_float: images must be u8(N, H, W, C), got f64(2, 3)");
  throws([&] { kernels::images_to_float(stream(), images, y); }, "images_to_float: y must be (N, h, w, C)");
  throws([&] { kernels::images_to_float(stream(), images, map); }, "images_to_float: y must be f64(1, 1, 1, 1)");
  throws([&] { kernels::images_to_float(stream(), u8({1, 0, 1, 2}, {}), map); }, "images_to_float: no pixels");
}
