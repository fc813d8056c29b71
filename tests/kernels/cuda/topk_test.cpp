#include "kernels/topk.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/gpu.h"
#include "tests/kernels/values.h"
#include "tests/small.h"

using namespace detr;
using namespace detr::test;

namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

const Stream& host() {
  static const Stream stream = Stream::cpu(2);
  return stream;
}

enum class Kind { spread, ties, equal, scores };

/// Values rounded to the dtype. spread: in [-1, 1); ties: few distinct ones with zeros of both signs, infinities and NaN; equal: all the
/// same; scores: logits of a classifier, close to each other with a few outliers.
Tensor inputs(const Shape& shape, DType dtype, Kind kind) {
  Tensor x = random(shape, DType::f64, 5);
  for (double& v : x.span<double>()) {
    if (kind == Kind::ties) v = v > 0.98 ? kNaN : v > 0.95 ? kInf : v < -0.9 ? -kInf : v < -0.7 ? -0.0 : std::floor(v * 20);
    if (kind == Kind::equal) v = -2;
    if (kind == Kind::scores) v = -4.6 + (v > 0.99 ? 3 * v : 0.1 * v);
  }
  return rounded(x, dtype);
}

void check_topk(std::int64_t R, std::int64_t M, std::int64_t k, DType dtype, Kind kind) {
  INFO("rows " << R << " of " << M << " k " << k << ' ' << dtype << " kind " << static_cast<int>(kind));
  const Tensor x = inputs({R, M}, dtype, kind), x_gpu = on_gpu(x, dtype);
  Tensor values = host_zeros({R, k}, DType::f64), indices = host_zeros({R, k}, DType::i64);
  kernels::topk(host(), x, values, indices);
  Guarded values_gpu({R, k}, dtype), indices_gpu({R, k}, DType::i64), values_again({R, k}, dtype), indices_again({R, k}, DType::i64);
  kernels::topk(gpu(), x_gpu, values_gpu.tensor, indices_gpu.tensor);
  kernels::topk(gpu(), x_gpu, values_again.tensor, indices_again.tensor);
  expect_same_bits(indices_gpu.values(), indices);   // the order is total: nothing is left to rounding
  expect_near(values_gpu.values(), values, 0);
  expect_same_bits(indices_again.values(), indices);
  expect_same_bits(values_again.values(), values_gpu.values());
}

void check_max_last(const Shape& shape, DType dtype, Kind kind, std::int64_t shift = 0) {
  INFO(shape << ' ' << dtype << " kind " << static_cast<int>(kind) << " shift " << shift);
  const Tensor x = inputs(shape, dtype, kind);
  const Shape rows(shape.dims().first(static_cast<std::size_t>(shape.rank() - 1)));
  Tensor y = host_zeros(rows, DType::f64);
  kernels::max_last(host(), x, y);
  Tensor memory = gpu().empty({x.numel() + shift}, dtype), x_gpu = memory.view(shift, shape);
  if (x.numel()) gpu().copy(on_gpu(x, dtype), x_gpu);
  Guarded y_gpu(rows, dtype), again(rows, dtype);
  kernels::max_last(gpu(), x_gpu, y_gpu.tensor);
  kernels::max_last(gpu(), x_gpu, again.tensor);
  expect_near(y_gpu.values(), y, 0);
  expect_same_bits(again.values(), y_gpu.values());
}

}  // namespace

TEST_CASE("topk: CUDA agrees with the CPU", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const Kind kind : {Kind::spread, Kind::ties, Kind::equal, Kind::scores}) {
      check_topk(2, 1024, 1024, dtype, kind);   // the largest sorted at once
      check_topk(2, 1025, 1025, dtype, kind);   // sorted by a second kernel
      check_topk(2, 8400, 300, dtype, kind);
      check_topk(3, 33, 31, dtype, kind);
      if (small_tests()) continue;
      for (const std::int64_t count : {1, 31, 33, 1023, 1025, 3000}) {
        for (const std::int64_t k : {1, 31, 33, 300}) check_topk(3, count, std::min(k, count), dtype, kind);
      }
      check_topk(3, 5000, 2049, dtype, kind);
      check_topk(2, 24000, 300, dtype, kind);
    }
    check_topk(0, 5, 2, dtype, Kind::spread);
    check_topk(3, 5, 0, dtype, Kind::spread);
    check_topk(2, 0, 0, dtype, Kind::spread);
    check_topk(133, 40, 7, dtype, Kind::ties);
  }
}

TEST_CASE("topk: CUDA orders NaN, infinities and both zeros", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  const Tensor x = host_tensor<double>({2, 6}, {1, kNaN, 3, 3, -kInf, kNaN, 0.0, -0.0, kInf, -1, 0.0, 2});
  const Tensor wanted = host_tensor<std::int64_t>({2, 6}, std::vector<std::int64_t>{1, 5, 2, 3, 0, 4, 2, 5, 0, 1, 4, 3});
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Guarded values({2, 6}, dtype), indices({2, 6}, DType::i64);
    kernels::topk(gpu(), on_gpu(x, dtype), values.tensor, indices.tensor);
    expect_same_bits(indices.values(), wanted);
    CHECK(std::signbit(values.values().data<double>()[9]));   // the value itself, not one equal to it
  }
}

TEST_CASE("topk: CUDA ranks a NaN with its sign set like any other", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  Tensor x = host_tensor<double>({1, 3}, {5, -kNaN, 7});
  Guarded values({1, 2}, DType::f32), indices({1, 2}, DType::i64), largest({1}, DType::f32);
  const Tensor x_gpu = on_gpu(x, DType::f32);
  kernels::topk(gpu(), x_gpu, values.tensor, indices.tensor);
  CHECK(values_of(indices.values()) == std::vector<double>{1, 2});
  kernels::max_last(gpu(), x_gpu, largest.tensor);
  CHECK(std::isnan(largest.values().data<double>()[0]));
}

TEST_CASE("max_last: CUDA agrees with the CPU", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const Kind kind : {Kind::spread, Kind::ties, Kind::equal}) {
      for (const std::int64_t width : {1, 2, 3, 8, 31, 32, 33, 40, 80, 91, 365, 1000, 4104}) {
        for (const std::int64_t rows : {1, 31, 33, 301}) check_max_last({rows, width}, dtype, kind);
      }
      check_max_last({3, 33, 80}, dtype, kind, 1);
    }
    check_max_last({0, 80}, dtype, Kind::spread);
    check_max_last({80}, dtype, Kind::spread);
    check_max_last({2, 8400, 80}, dtype, Kind::scores);
  }
}
