#include "kernels/step_report.h"

#include "kernels/pointwise.h"
#include "tests/kernels/values.h"

using namespace detr;
using namespace detr::test;

TEST_CASE("step_report: collect", "[cpu]") {
  const Stream stream = Stream::cpu(1);
  const std::vector<Tensor> inputs = {host_tensor<float>({2}, std::vector<float>{1.5F, -2}), host_tensor<std::int64_t>({1, 2}, std::vector<std::int64_t>{-1, 7}),
                                      host_zeros({0}, DType::f64), host_tensor<double>({}, std::vector<double>{0.1})};
  Tensor y = poisoned({5}, DType::f64), wrong = host_zeros({4}, DType::f64);
  kernels::collect(stream, inputs, y);
  CHECK(values_of(y) == std::vector<double>{1.5, -2, -1, 7, 0.1});
  expect_throws<InvalidArgument>([&] { kernels::collect(stream, inputs, wrong); }, "collect: y must be f64(5), got f64(4)");
  expect_throws<InvalidArgument>([&] { kernels::collect(stream, std::vector<Tensor>{host_zeros({5}, DType::u8)}, y); }, "collect: inputs must be f32, f64 or i64, got u8(5)");
}

TEST_CASE("step_report: first element that is not finite", "[cpu]") {
  const Stream stream = Stream::cpu(1);
  const double inf = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
  Tensor half = host_zeros({4}, DType::bf16), first = host_zeros({5}, DType::i64), wrong = host_zeros({4}, DType::i64);
  kernels::cast(stream, host_tensor<float>({4}, std::vector<float>{0, 3e38F, -3.4e38F, 1}), half);   // the third rounds to -inf
  const std::vector<Tensor> inputs = {host_tensor<double>({2, 2}, std::vector<double>{1, 2, nan, inf}), host_tensor<double>({2}, std::vector<double>{1e308, -1}),
                                      host_tensor<float>({2}, std::vector<float>{static_cast<float>(inf), 0}), half, host_zeros({0}, DType::f32)};
  kernels::first_not_finite(stream, inputs, first);
  CHECK(values_of(first) == std::vector<double>{2, -1, 0, 2, -1});
  expect_throws<InvalidArgument>([&] { kernels::first_not_finite(stream, inputs, wrong); }, "first_not_finite: first must be i64(5), got i64(4)");
  expect_throws<InvalidArgument>([&] { kernels::first_not_finite(stream, std::vector<Tensor>{wrong}, wrong); }, "first_not_finite: inputs must be floating, got i64(4)");
}
