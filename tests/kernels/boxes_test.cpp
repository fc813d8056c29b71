#include "kernels/boxes.h"

#include <cmath>
#include <limits>

#include "runtime/random.h"
#include "tests/support.h"

using namespace detr;
using namespace detr::test;
using kernels::refine_boxes_backward;
using kernels::refine_boxes_forward;

namespace {

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

Tensor refine(const Tensor& delta, const Tensor& reference) {
  Tensor box = host_zeros(delta.shape(), delta.dtype());
  refine_boxes_forward(Stream::cpu(1), delta, reference, box);
  return box;
}

}  // namespace

TEST_CASE("refine_boxes: values worked by hand", "[cpu]") {
  // inverse sigmoid: of 1/2 it is 0, of 4/5 ln 4, of 0 and 1 it is cut at -+11.512925
  const Tensor delta = host_tensor<double>({2, 4}, {0, 1, 0, 0, 0, 0, 2, -1});
  const Tensor reference = host_tensor<double>({2, 4}, {0.5, 0.5, 0.8, 0.2, 0, 1, -3, 7});
  const Tensor box = refine(delta, reference);
  const double edge = 11.512925464970229;
  const double wanted[] = {0.5, sigmoid(1), 0.8, 0.2, sigmoid(-edge), sigmoid(edge), sigmoid(2 - edge), sigmoid(edge - 1)};
  for (int i = 0; i < 8; ++i) expect_close(box.data<double>()[i], wanted[i], 1e-9);
}

TEST_CASE("refine_boxes: backward at and beyond the clamps", "[cpu]") {
  const Tensor dbox = host_tensor<double>({2, 4}, {1, 2, 3, 4, 5, 6, 7, 8});
  const Tensor box = host_tensor<double>({2, 4}, {0.5, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25});
  const Tensor reference = host_tensor<double>({2, 4}, {0.5, 0.25, 0, 1, -0.5, 1.5, 1e-5, 5e-6});
  Tensor ddelta = host_zeros(box.shape(), DType::f64), dreference = host_zeros(box.shape(), DType::f64);
  refine_boxes_backward(Stream::cpu(1), dbox, box, reference, &ddelta, &dreference);
  const double slope = 0.25 * 0.75;
  const double wanted[] = {0.25, 0.5, 0.75, 1, 5 * slope, 6 * slope, 7 * slope, 8 * slope};
  const double wanted_reference[] = {0.25 * 4,  0.5 * (4 + 4 / 3.0), 0.75 * 1, 1 * 1, 0, 0, 7 * slope * (1e5 + 1 / (1 - 1e-5)),
                                     8 * slope / (1 - 5e-6)};
  for (int i = 0; i < 8; ++i) {
    expect_close(ddelta.data<double>()[i], wanted[i], 1e-12);
    expect_close(dreference.data<double>()[i], wanted_reference[i], 1e-12);
  }
}

TEST_CASE("refine_boxes: extreme deltas saturate without overflow", "[cpu]") {
  const float inf = std::numeric_limits<float>::infinity();
  const Tensor delta = host_tensor<float>({1, 4}, {-1e30F, 1e30F, -inf, inf});
  const Tensor reference = host_tensor<float>({1, 4}, {0.5F, 0.5F, 0.5F, 1});
  const Tensor box = refine(delta, reference);
  CHECK(values_of(box) == std::vector<double>{0, 1, 0, 1});
  Tensor ddelta = host_zeros(box.shape(), DType::f32), dreference = host_zeros(box.shape(), DType::f32);
  refine_boxes_backward(Stream::cpu(1), host_tensor<float>({1, 4}, {1, 1, 1, 1}), box, reference, &ddelta, &dreference);
  CHECK(values_of(ddelta) == std::vector<double>{0, 0, 0, 0});
  CHECK(values_of(dreference) == std::vector<double>{0, 0, 0, 0});
}

TEST_CASE("refine_boxes: f32 agrees with f64, and no thread count changes a bit", "[cpu]") {
  const Shape shape{3, 511, 4};
  Tensor delta = host_zeros(shape, DType::f32), reference = host_zeros(shape, DType::f32);
  Tensor delta64 = host_zeros(shape, DType::f64), reference64 = host_zeros(shape, DType::f64);
  for (std::int64_t i = 0; i < shape.numel(); ++i) {
    delta64.data<double>()[i] = delta.data<float>()[i] = static_cast<float>(normal(RandomKey(1), static_cast<std::uint64_t>(i)));
    reference64.data<double>()[i] = reference.data<float>()[i] = static_cast<float>(uniform(RandomKey(2), static_cast<std::uint64_t>(i)));
  }
  const Tensor box = refine(delta, reference);
  const Tensor box64 = refine(delta64, reference64);
  for (std::int64_t i = 0; i < shape.numel(); ++i) expect_close(box.data<float>()[i], box64.data<double>()[i], 1e-5);
  for (const int threads : {2, 3}) {
    Tensor again = host_zeros(shape, DType::f32);
    refine_boxes_forward(Stream::cpu(threads), delta, reference, again);
    expect_same_bits(again, box);
  }
}

TEST_CASE("refine_boxes: sizes 0 and 1", "[cpu]") {
  CHECK(refine(host_zeros({0, 4}, DType::f32), host_zeros({0, 4}, DType::f32)).numel() == 0);
  CHECK(refine(host_zeros({4}, DType::f64), host_tensor<double>({4}, {0.5, 0.5, 0.5, 0.5})).data<double>()[3] == 0.5);
}

TEST_CASE("refine_boxes: errors", "[cpu]") {
  const Stream stream = Stream::cpu(1);
  const Tensor ok = host_zeros({2, 4}, DType::f32), other = host_zeros({3, 4}, DType::f32), wide = host_zeros({2, 5}, DType::f32);
  const Tensor f64 = host_zeros({2, 4}, DType::f64), integers = host_zeros({2, 4}, DType::i64);
  Tensor out = host_zeros({2, 4}, DType::f32), bad = host_zeros({3, 4}, DType::f32), wide_out = host_zeros({2, 5}, DType::f32);
  Tensor integers_out = host_zeros({2, 4}, DType::i64);
  expect_throws<InvalidArgument>([&] { refine_boxes_forward(stream, wide, wide, wide_out); }, "refine_boxes: delta must be (..., 4)");
  expect_throws<InvalidArgument>([&] { refine_boxes_forward(stream, ok, other, out); }, "refine_boxes: reference");
  expect_throws<InvalidArgument>([&] { refine_boxes_forward(stream, ok, f64, out); }, "refine_boxes: reference");
  expect_throws<InvalidArgument>([&] { refine_boxes_forward(stream, ok, ok, bad); }, "refine_boxes: box");
  expect_throws<InvalidArgument>([&] { refine_boxes_forward(stream, integers, integers, integers_out); }, "f32 and f64");
  expect_throws<InvalidArgument>([&] { refine_boxes_backward(stream, wide, wide, wide, &wide_out, nullptr); }, "refine_boxes: box must");
  expect_throws<InvalidArgument>([&] { refine_boxes_backward(stream, other, ok, ok, &out, nullptr); }, "refine_boxes: dbox");
  expect_throws<InvalidArgument>([&] { refine_boxes_backward(stream, ok, ok, other, &out, nullptr); }, "refine_boxes: reference");
  expect_throws<InvalidArgument>([&] { refine_boxes_backward(stream, ok, ok, ok, &bad, nullptr); }, "refine_boxes: ddelta");
  expect_throws<InvalidArgument>([&] { refine_boxes_backward(stream, ok, ok, ok, nullptr, &bad); }, "refine_boxes: dreference");
}
