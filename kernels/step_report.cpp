#include "kernels/step_report.h"

#include "kernels/dispatch.h"

namespace detr::kernels {

void collect(const Stream& stream, std::span<const Tensor> inputs, Tensor& y) {
  std::int64_t total = 0;
  for (const Tensor& input : inputs) {
    DETR_CHECK(input.defined() && (input.dtype() == DType::f32 || input.dtype() == DType::f64 || input.dtype() == DType::i64),
               "collect: inputs must be f32, f64 or i64, got ", input);
    expect_tensor(y, "collect: input", input, input.shape(), input.dtype());
    total += input.numel();
  }
  expect_tensor(y, "collect: y", y, {total}, DType::f64);
  DETR_DISPATCH(y.device(), collect, stream, inputs, y);
}

void first_not_finite(const Stream& stream, std::span<const Tensor> inputs, Tensor& first) {
  for (const Tensor& input : inputs) {
    DETR_CHECK(input.defined() && (input.dtype() == DType::f32 || input.dtype() == DType::f64 || input.dtype() == DType::bf16),
               "first_not_finite: inputs must be floating, got ", input);
    expect_tensor(first, "first_not_finite: input", input, input.shape(), input.dtype());
  }
  expect_tensor(first, "first_not_finite: first", first, {std::ssize(inputs)}, DType::i64);
  DETR_DISPATCH(first.device(), first_not_finite, stream, inputs, first);
}

}  // namespace detr::kernels
