#pragma once
#include "runtime/stream.h"
#include "tests/support.h"

namespace detr::test {

/// Whether there is a GPU and code for it. Throws instead of saying no where the environment variable DETR_REQUIRE_GPU is set, so
/// that a GPU job cannot pass by skipping.
bool cuda_available();

/// The process's CUDA stream for tests.
const Stream& gpu();

/// A floating host tensor with its values rounded to `dtype` (f32 or bf16), as f64: what the oracle is given.
Tensor rounded(const Tensor& host, DType dtype);
/// The tensor on the GPU: floating values rounded to `dtype`, i64 and u8 as they are.
Tensor on_gpu(const Tensor& host, DType dtype);
/// A tensor of the GPU on the host; floating values as f64. Waits.
Tensor from_gpu(const Tensor& tensor);

/// An output on the GPU, every byte 0xff (a NaN in f32 and bf16) and with guard words before and after.
class Guarded {
 public:
  Guarded(const Shape& shape, DType dtype);
  Tensor tensor;
  /// Checks the guard words and gives the values as from_gpu() does.
  Tensor values() const;

 private:
  Tensor memory_;
  std::int64_t begin_ = 0;
};

/// |got - wanted| <= tolerance max(|wanted|, largest |wanted| of the tensor times `floor`) for each element of two f64 host tensors;
/// infinities and NaN must agree.
void expect_near(const Tensor& got, const Tensor& wanted, double tolerance, double floor = 1);

/// Largest relative rounding error of a value of the dtype: 2^-24 for f32, 2^-8 for bf16.
inline double roundoff(DType dtype) { return dtype == DType::bf16 ? 1.0 / 256 : 1.0 / (1 << 24); }

}  // namespace detr::test
