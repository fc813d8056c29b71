#include "kernels/conv2d.h"

#include <cmath>

#include "tests/gpu.h"
#include "tests/kernels/values.h"

using namespace detr;
using namespace detr::test;

namespace {

struct Case {
  Shape x, weight;
  kernels::Conv2dOptions options;
};

void expect_agreement(const Case& c, DType dtype) {
  INFO("x " << c.x << ", weight " << c.weight << ", stride " << c.options.stride << ", padding " << c.options.padding << ", " << dtype);
  const Shape out = kernels::conv2d_shape(c.x, c.weight, c.options);
  const Tensor x = random(c.x, DType::f64, 1), weight = random(c.weight, DType::f64, 2), dy = random(out, DType::f64, 3);
  const Stream cpu = Stream::cpu(2);
  const Tensor xs = rounded(x, dtype), ws = rounded(weight, dtype), dys = rounded(dy, dtype);
  Tensor y = host_zeros(out, DType::f64), dx = host_zeros(c.x, DType::f64), dw = host_zeros(c.weight, DType::f64);
  kernels::conv2d_forward(cpu, xs, ws, c.options, y);
  kernels::conv2d_backward(cpu, dys, xs, ws, c.options, &dx, &dw);

  const Tensor gx = on_gpu(x, dtype), gw = on_gpu(weight, dtype), gdy = on_gpu(dy, dtype);
  // As for a matrix product; in f32 Winograd's transforms may cost a few digits more.
  const auto tolerance = [&](std::int64_t terms, DType result) { return 16 * static_cast<double>(terms + 1) * roundoff(DType::f32) + roundoff(result); };
  const std::int64_t window = c.weight[1] * c.weight[2];
  for (int run = 0; run < 2; ++run) {
    Guarded gy(out, dtype);
    kernels::conv2d_forward(gpu(), gx, gw, c.options, gy.tensor);
    expect_near(gy.values(), y, tolerance(window * c.weight[3], dtype));
  }
  std::vector<Tensor> full;
  for (int subset = 3; subset >= 0; --subset) {
    Guarded gdx(c.x, dtype), gdw(c.weight, DType::f32);
    const bool wants[] = {(subset & 1) != 0, (subset & 2) != 0};
    kernels::conv2d_backward(gpu(), gdy, gx, gw, c.options, wants[0] ? &gdx.tensor : nullptr, wants[1] ? &gdw.tensor : nullptr);
    const std::vector<Tensor> values = {gdx.values(), gdw.values()};
    if (subset == 3) {
      full = values;
      expect_near(full[0], dx, tolerance(window * c.weight[0], dtype));
      expect_near(full[1], dw, tolerance(out[0] * out[1] * out[2], dtype));   // rounded to bf16 on the way, but for 1 x 1 kernels
    }
    for (std::size_t i = 0; i < 2; ++i) {
      if (wants[i]) expect_same_bits(values[i], full[i]);
      else for (const double v : values_of(values[i])) REQUIRE(std::isnan(v));
    }
  }

  // Added to what is there, rounded once.
  Guarded sum(c.x, dtype);
  const Tensor before = random(c.x, DType::f64, 5);
  gpu().copy(on_gpu(before, dtype), sum.tensor);
  gpu().wait();
  kernels::conv2d_backward(gpu(), gdy, gx, gw, c.options, &sum.tensor, nullptr, true);
  Tensor wanted = rounded(before, dtype);
  for (std::int64_t i = 0; i < wanted.numel(); ++i) wanted.data<double>()[i] += dx.data<double>()[i];
  expect_near(sum.values(), wanted, tolerance(window * c.weight[0], dtype) + roundoff(dtype));
}

}  // namespace

TEST_CASE("conv2d on CUDA: against the CPU", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  const std::vector<Case> cases = {
      {{1, 1, 1, 8}, {8, 1, 1, 8}, {1, 0}},          {{2, 31, 33, 16}, {24, 3, 3, 16}, {1, 1}}, {{1, 33, 31, 64}, {32, 3, 3, 64}, {2, 1}},
      {{2, 64, 64, 3}, {32, 3, 3, 3}, {2, 1}},       {{2, 20, 20, 256}, {64, 1, 1, 256}, {1, 0}}, {{1, 10, 10, 32}, {64, 1, 1, 32}, {2, 0}},
      {{1, 40, 40, 128}, {128, 3, 3, 128}, {1, 1}},  {{1, 5, 6, 5}, {7, 3, 3, 5}, {1, 1}},        {{0, 4, 4, 8}, {8, 3, 3, 8}, {1, 1}},
  };
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const Case& c : cases) expect_agreement(c, dtype);
  }
}
