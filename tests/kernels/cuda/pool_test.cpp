#include "kernels/pool.h"

#include <cmath>
#include <limits>

#include "tests/gpu.h"
#include "tests/kernels/values.h"

using namespace detr;
using namespace detr::test;

namespace {

using Op = std::function<void(const Stream&, Tensor&)>;   // with its inputs bound, to one output

constexpr DType kDtypes[] = {DType::f32, DType::bf16};

/// Sums of at most four terms in f32, rounded once.
double tolerance(DType dtype) { return 2.1 * roundoff(dtype) + 4 * roundoff(DType::f32); }

/// Empty maps, single cells and rows, odd and even sizes, one pack of channels or several, none that fits, and a map of the network's.
const std::vector<Shape> kShapes = {{0, 4, 4, 8}, {2, 0, 3, 8}, {1, 4, 4, 0}, {1, 1, 1, 1}, {1, 1, 7, 8}, {3, 2, 1, 16}, {2, 5, 4, 3},
                                    {2, 7, 9, 33}, {1, 31, 33, 16}, {2, 6, 31, 31}, {2, 40, 40, 256}};

Shape halved(const Shape& x) { return {x[0], (x[1] + 1) / 2, (x[2] + 1) / 2, x[3]}; }
Shape doubled(const Shape& x) { return {x[0], 2 * x[1], 2 * x[2], x[3]}; }

/// Multiples of 1/4 in [-1, 1], so that windows have ties; both dtypes hold them exactly.
Tensor levels(const Shape& shape, std::uint64_t seed) {
  Tensor x = random(shape, DType::f64, seed);
  for (double& value : x.span<double>()) value = std::round(4 * value) / 4;
  return x;
}

Tensor values(const Shape& shape, DType dtype, std::uint64_t seed) { return rounded(random(shape, DType::f64, seed), dtype); }

/// A copy on the GPU that starts one element into its memory, so that no 16-byte access fits.
Tensor shifted(const Tensor& tensor) {
  Tensor copy = gpu().empty({tensor.numel() + 1}, tensor.dtype()).view(1, tensor.shape());
  gpu().copy(tensor, copy);
  return copy;
}

Tensor output(const Shape& shape, DType dtype, const Op& op) {
  Guarded y(shape, dtype);
  op(gpu(), y.tensor);
  return y.values();
}

/// The output in aligned memory, twice, and in memory that starts at an odd element: the same bits.
Tensor outputs(const Shape& shape, DType dtype, const Op& op) {
  const Tensor result = output(shape, dtype, op);
  expect_same_bits(output(shape, dtype, op), result);
  Guarded memory({shape.numel() + 1}, dtype);
  Tensor odd = memory.tensor.view(1, shape);
  op(gpu(), odd);
  CHECK(std::isnan(memory.values().data<double>()[0]));
  expect_same_bits(from_gpu(odd), result);
  return result;
}

Tensor oracle(const Shape& shape, const Op& op) {
  Tensor y = host_zeros(shape, DType::f64);
  op(Stream::cpu(2), y);
  return y;
}

}  // namespace

TEST_CASE("max_pool on CUDA: agrees with the CPU, ties included", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  for (const DType dtype : kDtypes) {
    for (const Shape& shape : kShapes) {
      INFO(dtype << shape);
      const Shape small = halved(shape);
      const Tensor x = levels(shape, 1), dy = values(small, dtype, 2), gx = on_gpu(x, dtype), gdy = on_gpu(dy, dtype);
      const Tensor y = oracle(small, [&](const Stream& s, Tensor& out) { kernels::max_pool_forward(s, x, out); });
      const Tensor dx = oracle(shape, [&](const Stream& s, Tensor& out) { kernels::max_pool_backward(s, dy, x, &out); });
      expect_near(outputs(small, dtype, [&](const Stream& s, Tensor& out) { kernels::max_pool_forward(s, gx, out); }), y, 0, 0);
      const Tensor got = outputs(shape, dtype, [&](const Stream& s, Tensor& out) { kernels::max_pool_backward(s, gdy, gx, &out); });
      expect_near(got, dx, tolerance(dtype));
      const Tensor odd_x = shifted(gx), odd_dy = shifted(gdy);
      expect_near(output(small, dtype, [&](const Stream& s, Tensor& out) { kernels::max_pool_forward(s, odd_x, out); }), y, 0, 0);
      expect_same_bits(output(shape, dtype, [&](const Stream& s, Tensor& out) { kernels::max_pool_backward(s, gdy, odd_x, &out); }), got);
      expect_same_bits(output(shape, dtype, [&](const Stream& s, Tensor& out) { kernels::max_pool_backward(s, odd_dy, gx, &out); }), got);
    }
  }
}

TEST_CASE("max_pool on CUDA: infinities and NaN, and a gradient that goes to the first of equal cells", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  const double inf = std::numeric_limits<double>::infinity(), nan = std::nan("");
  const double special[] = {-inf, nan, inf, -3, nan, 0};
  for (const DType dtype : kDtypes) {
    for (const std::int64_t C : {1, 8}) {
      for (int stride = 1; stride <= 5; ++stride) {   // different neighbours; 1 and 5 make most windows hold a NaN
        Tensor x = host_zeros({2, 5, 6, C}, DType::f64);
        for (std::int64_t i = 0; i < x.numel(); ++i) x.data<double>()[i] = i % 11 < 4 ? special[i * stride % 6] : -inf;
        const Tensor gx = on_gpu(x, dtype), dy = values({2, 3, 3, C}, dtype, 3), gdy = on_gpu(dy, dtype);
        const Tensor y = oracle(dy.shape(), [&](const Stream& s, Tensor& out) { kernels::max_pool_forward(s, x, out); });
        const Tensor dx = oracle(x.shape(), [&](const Stream& s, Tensor& out) { kernels::max_pool_backward(s, dy, x, &out); });
        expect_near(outputs(y.shape(), dtype, [&](const Stream& s, Tensor& out) { kernels::max_pool_forward(s, gx, out); }), y, 0, 0);
        expect_near(outputs(dx.shape(), dtype,
            [&](const Stream& s, Tensor& out) { kernels::max_pool_backward(s, gdy, gx, &out); }), dx, tolerance(dtype));
      }
    }
  }
}

TEST_CASE("avg_pool on CUDA: agrees with the CPU", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  for (const DType dtype : kDtypes) {
    for (const Shape& shape : kShapes) {
      INFO(dtype << shape);
      const Shape small = halved(shape);
      const Tensor x = values(shape, dtype, 4), dy = values(small, dtype, 5), gx = on_gpu(x, dtype), gdy = on_gpu(dy, dtype);
      const Tensor y = oracle(small, [&](const Stream& s, Tensor& out) { kernels::avg_pool_forward(s, x, out); });
      const Tensor dx = oracle(shape, [&](const Stream& s, Tensor& out) { kernels::avg_pool_backward(s, dy, &out); });
      expect_near(outputs(small, dtype, [&](const Stream& s, Tensor& out) { kernels::avg_pool_forward(s, gx, out); }), y, tolerance(dtype));
      // A quarter, half or whole of dy is exact.
      expect_same_bits(outputs(shape, dtype, [&](const Stream& s, Tensor& out) { kernels::avg_pool_backward(s, gdy, &out); }), dx);
    }
  }
}

TEST_CASE("upsample on CUDA: agrees with the CPU", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  for (const DType dtype : kDtypes) {
    for (const Shape& shape : kShapes) {
      INFO(dtype << shape);
      const Shape large = doubled(shape);
      const Tensor x = values(shape, dtype, 6), dy = values(large, dtype, 7), gx = on_gpu(x, dtype), gdy = on_gpu(dy, dtype);
      const Tensor y = oracle(large, [&](const Stream& s, Tensor& out) { kernels::upsample_forward(s, x, out); });
      const Tensor dx = oracle(shape, [&](const Stream& s, Tensor& out) { kernels::upsample_backward(s, dy, &out); });
      expect_same_bits(outputs(large, dtype, [&](const Stream& s, Tensor& out) { kernels::upsample_forward(s, gx, out); }), y);
      expect_near(outputs(shape, dtype, [&](const Stream& s, Tensor& out) { kernels::upsample_backward(s, gdy, &out); }), dx, tolerance(dtype));
    }
  }
}

TEST_CASE("pool on CUDA: nothing wanted, and dtypes", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  const Tensor x = gpu().zeros({1, 2, 2, 8}, DType::f32), dy = gpu().zeros({1, 1, 1, 8}, DType::f32);
  CHECK_NOTHROW(kernels::max_pool_backward(gpu(), dy, x, nullptr));
  CHECK_NOTHROW(kernels::avg_pool_backward(gpu(), dy, nullptr));
  CHECK_NOTHROW(kernels::upsample_backward(gpu(), dy, nullptr));
  const Tensor wide = gpu().empty({1, 2, 2, 8}, DType::f64);
  Tensor y = gpu().empty({1, 1, 1, 8}, DType::f64);
  expect_throws<InvalidArgument>([&] { kernels::max_pool_forward(gpu(), wide, y); }, "max_pool: CUDA computes in f32 and bf16");
}
