#include "kernels/boxes.h"

#include <cmath>
#include <limits>
#include <utility>

#include "tests/gpu.h"
#include "tests/kernels/values.h"

using namespace detr;
using namespace detr::test;

namespace {

/// One rounding to the dtype, and an exponent of up to 13 computed in f32: 13 and some units in the last place.
double tolerance(DType dtype) { return 2.1 * roundoff(dtype) + 40 * roundoff(DType::f32); }

Tensor forward(const Tensor& delta, const Tensor& reference) {
  Guarded box(delta.shape(), delta.dtype());
  kernels::refine_boxes_forward(gpu(), delta, reference, box.tensor);
  return box.values();
}

struct Gradients {
  Tensor ddelta, dreference;   // undefined where not wanted
};

Gradients backward(const Tensor& dbox, const Tensor& box, const Tensor& reference, bool want_delta, bool want_reference) {
  Guarded ddelta(box.shape(), box.dtype()), dreference(box.shape(), box.dtype());
  kernels::refine_boxes_backward(gpu(), dbox, box, reference, want_delta ? &ddelta.tensor : nullptr, want_reference ? &dreference.tensor : nullptr);
  const Gradients all = {ddelta.values(), dreference.values()};
  for (const auto& [wanted, values] : {std::pair(want_delta, all.ddelta), std::pair(want_reference, all.dreference)})
    if (!wanted && values.numel()) CHECK(std::isnan(values.data<double>()[0]));   // not written
  return {want_delta ? all.ddelta : Tensor(), want_reference ? all.dreference : Tensor()};
}

/// In [-0.2, 1.2): inside and beyond the clamps.
Tensor references(const Shape& shape, DType dtype) {
  Tensor x = random(shape, DType::f64, 2);
  for (double& value : x.span<double>()) value = 0.5 + 0.7 * value;
  return rounded(x, dtype);
}

}  // namespace

TEST_CASE("refine_boxes on CUDA: agrees with the CPU, for all subsets of gradients", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  const Stream cpu = Stream::cpu(2);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const Shape& shape : {Shape{0, 4}, Shape{4}, Shape{1, 4}, Shape{31, 4}, Shape{33, 4}, Shape{4, 500, 4}}) {
      INFO(dtype << shape);
      const Tensor delta = rounded(random(shape, DType::f64, 1), dtype),
          reference = references(shape, dtype), dbox = rounded(random(shape, DType::f64, 3), dtype);
      const Tensor gdelta = on_gpu(delta, dtype), greference = on_gpu(reference, dtype), gdbox = on_gpu(dbox, dtype);
      Tensor box = host_zeros(shape, DType::f64), ddelta = host_zeros(shape, DType::f64), dreference = host_zeros(shape, DType::f64);
      kernels::refine_boxes_forward(cpu, delta, reference, box);
      const Tensor got = forward(gdelta, greference);
      expect_near(got, box, tolerance(dtype));
      expect_same_bits(forward(gdelta, greference), got);

      const Tensor box_seen = rounded(box, dtype), gbox = on_gpu(box, dtype);
      kernels::refine_boxes_backward(cpu, dbox, box_seen, reference, &ddelta, &dreference);
      const Gradients full = backward(gdbox, gbox, greference, true, true);
      expect_near(full.ddelta, ddelta, tolerance(dtype), 1e-3);
      expect_near(full.dreference, dreference, tolerance(dtype), 1e-3);
      for (int subset = 0; subset < 4; ++subset) {
        const Gradients some = backward(gdbox, gbox, greference, (subset & 1) != 0, (subset & 2) != 0);
        if (subset & 1) expect_same_bits(some.ddelta, full.ddelta);
        if (subset & 2) expect_same_bits(some.dreference, full.dreference);
      }
    }
  }
}

TEST_CASE("refine_boxes on CUDA: at and beyond the clamps", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  const Stream cpu = Stream::cpu(1);
  const double inf = std::numeric_limits<double>::infinity(), nan = std::nan("");
  // References on both sides of the clamps; 1e-5 itself is another number in f32 and in f64, so it is left out.
  const Tensor reference = host_tensor<double>({3, 4}, std::vector<double>{0.5, 0, 1, -3, 7, 1.1e-5, 0.9e-5, 0.99998, 0.5, 0.5, 1, nan});
  const Tensor delta = host_tensor<double>({3, 4}, std::vector<double>{0, 0, 0, 2, -1, 0, 0, 0, -inf, 1e30, inf, 0});
  const Tensor dbox = host_tensor<double>({3, 4}, std::vector<double>{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12});
  Tensor box = host_zeros({3, 4}, DType::f64), ddelta = host_zeros({3, 4}, DType::f64), dreference = host_zeros({3, 4}, DType::f64);
  const Tensor exact = rounded(reference, DType::f32);
  kernels::refine_boxes_forward(cpu, delta, exact, box);
  expect_near(forward(on_gpu(delta, DType::f32), on_gpu(exact, DType::f32)), box, tolerance(DType::f32));
  kernels::refine_boxes_backward(cpu, dbox, rounded(box, DType::f32), exact, &ddelta, &dreference);
  const Gradients got = backward(on_gpu(dbox, DType::f32), on_gpu(box, DType::f32), on_gpu(exact, DType::f32), true, true);
  expect_near(got.ddelta, ddelta, tolerance(DType::f32), 1e-6);
  expect_near(got.dreference, dreference, tolerance(DType::f32), 1e-6);
}
