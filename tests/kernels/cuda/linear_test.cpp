#include "kernels/linear.h"

#include <cmath>

#include "tests/gpu.h"
#include "tests/kernels/values.h"
#include "tests/small.h"

using namespace detr;
using namespace detr::test;

namespace {

struct Case {
  std::int64_t rows, in, out;
};

/// Forward and all subsets of gradients against the CPU in f64.
void expect_agreement(const Case& c, DType dtype) {
  INFO("rows " << c.rows << ", in " << c.in << ", out " << c.out << ", " << dtype);
  const Tensor x = random({c.rows, c.in}, DType::f64, 1), weight = random({c.out, c.in}, DType::f64, 2), bias = random({c.out}, DType::f64, 3);
  const Tensor dy = random({c.rows, c.out}, DType::f64, 4);
  const Stream cpu = Stream::cpu(2);
  const Tensor xs = rounded(x, dtype), ws = rounded(weight, dtype), bs = rounded(bias, dtype), dys = rounded(dy, dtype);
  Tensor y = host_zeros(dy.shape(), DType::f64), dx = host_zeros(x.shape(), DType::f64), dw = host_zeros(weight.shape(), DType::f64), db = host_zeros(bias.shape(), DType::f64);
  kernels::linear_forward(cpu, xs, ws, &bs, y);
  kernels::linear_backward(cpu, dys, xs, ws, &dx, &dw, &db);

  const Tensor gx = on_gpu(x, dtype), gw = on_gpu(weight, dtype), gb = on_gpu(bias, dtype), gdy = on_gpu(dy, dtype);
  // Terms up to 1 in size: n of them, each rounded in f32, walk at most about n 2^-24; a bf16 result is rounded once more.
  const auto tolerance = [&](std::int64_t terms, DType result) { return 4 * static_cast<double>(terms + 1) * roundoff(DType::f32) + roundoff(result); };
  for (const bool with_bias : {true, false}) {
    Guarded gy(dy.shape(), dtype);
    kernels::linear_forward(gpu(), gx, gw, with_bias ? &gb : nullptr, gy.tensor);
    if (!with_bias) kernels::linear_forward(cpu, xs, ws, nullptr, y);
    // Some of the library's kernels round the product before they add the bias.
    expect_near(gy.values(), y, tolerance(c.in, dtype) + (with_bias ? roundoff(dtype) : 0));
  }
  std::vector<Tensor> full;
  for (int subset = 7; subset >= 0; --subset) {
    Guarded gdx(x.shape(), dtype), gdw(weight.shape(), DType::f32), gdb(bias.shape(), DType::f32);
    const bool wants[] = {(subset & 1) != 0, (subset & 2) != 0, (subset & 4) != 0};
    kernels::linear_backward(gpu(), gdy, gx, gw, wants[0] ? &gdx.tensor : nullptr, wants[1] ? &gdw.tensor : nullptr, wants[2] ? &gdb.tensor : nullptr);
    const std::vector<Tensor> values = {gdx.values(), gdw.values(), gdb.values()};
    if (subset == 7) {
      full = values;
      expect_near(full[0], dx, tolerance(c.out, dtype));
      expect_near(full[1], dw, tolerance(c.rows, DType::f32));
      expect_near(full[2], db, tolerance(c.rows, DType::f32));
    }
    for (std::size_t i = 0; i < 3; ++i) {
      if (wants[i]) expect_same_bits(values[i], full[i]);
      else for (const double v : values_of(values[i])) REQUIRE(std::isnan(v));
    }
  }

  // Added to what is there, rounded once.
  Guarded sum(x.shape(), dtype);
  const Tensor before = random(x.shape(), DType::f64, 5);
  gpu().copy(on_gpu(before, dtype), sum.tensor);
  gpu().wait();
  kernels::linear_backward(gpu(), gdy, gx, gw, &sum.tensor, nullptr, nullptr, true);
  Tensor wanted = rounded(before, dtype);
  for (std::int64_t i = 0; i < wanted.numel(); ++i) wanted.data<double>()[i] += dx.data<double>()[i];
  expect_near(sum.values(), wanted, tolerance(c.out, dtype) + roundoff(dtype));
}

std::vector<Case> real_cases() { return {{500, 256, 288}, {3000, 256, 80}, {5000, 4, 512}}; }

/// A case for each dtype, and one without products: where a tool fails in a library's kernel, the others are looked at all the same.
void expect_agreement(DType dtype) {
  for (const Case& c : {Case{1, 1, 1}, Case{0, 3, 2}, Case{3, 0, 2}, Case{3, 2, 0}, Case{31, 33, 7}, Case{33, 31, 3}}) expect_agreement(c, dtype);
  if (small_tests()) return;   // of our kernels only dbias is in them, which is tested by itself
  for (const Case& c : real_cases()) expect_agreement(c, dtype);
}

}  // namespace

TEST_CASE("linear on CUDA: against the CPU in f32", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  expect_agreement(DType::f32);
}

TEST_CASE("linear on CUDA: against the CPU in bf16", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  expect_agreement(DType::bf16);
}

TEST_CASE("linear on CUDA: dbias by itself, in one chunk of rows and in several", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  std::vector<Case> cases = real_cases();
  for (const std::int64_t out : {1, 3, 8, 31, 33, 64, 72}) cases.push_back({4097, 2, out});   // widths with one thread across and more, vectors or not
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const Case& c : cases) {
      INFO("rows " << c.rows << ", out " << c.out << ", " << dtype);
      const Tensor x = host_zeros({c.rows, c.in}, DType::f64), weight = host_zeros({c.out, c.in}, DType::f64), dy = rounded(random({c.rows, c.out}, DType::f64, 4), dtype);
      Tensor db = host_zeros({c.out}, DType::f64);
      kernels::linear_backward(Stream::cpu(2), dy, x, weight, nullptr, nullptr, &db);
      const Tensor gx = on_gpu(x, dtype), gw = on_gpu(weight, dtype), gdy = on_gpu(dy, dtype);
      Guarded first({c.out}, DType::f32), second({c.out}, DType::f32);
      for (Guarded* y : {&first, &second}) kernels::linear_backward(gpu(), gdy, gx, gw, nullptr, nullptr, &y->tensor);
      expect_near(first.values(), db, 4 * static_cast<double>(c.rows + 1) * roundoff(DType::f32));
      expect_same_bits(second.values(), first.values());
    }
  }
}
