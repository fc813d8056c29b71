#pragma once
#include "runtime/stream.h"

namespace detr::kernels {

/// Shape of the output: that of x with its last dimension replaced by O.
/// Throws InvalidArgument if x is not (..., I) or weight not (O, I).
Shape linear_shape(const Shape& x, const Shape& weight);

/// Affine map of the last dimension: y = x W^T + b.
///
/// x       (..., I)  f32 or f64, on CUDA f32 or bf16 (Note [Element types] in kernels/dispatch.h); R >= 0 rows
/// weight  (O, I)    dtype of x
/// bias    (O)       or null
/// y       (..., O)  out, shape linear_shape(...)
///
/// Products by Eigen on fixed blocks of rows: same bits for any number of threads. On CUDA by cuBLASLt, sums in f32 without TF32.
/// Throws InvalidArgument if a shape, dtype or device disagrees.
void linear_forward(const Stream& stream, const Tensor& x, const Tensor& weight, const Tensor* bias, Tensor& y);

/// Backward of the above, for any subset of wanted gradients; null is neither computed nor written.
/// dx = dy W, dweight = dy^T x, dbias = column sums of dy (in double on the CPU; on CUDA in f32 over at most a few hundred rows,
/// these in double). Overwritten; dx is added to what is there if `add_dx`, rounded once.
void linear_backward(const Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& weight, Tensor* dx, Tensor* dweight,
                     Tensor* dbias, bool add_dx = false);

namespace cpu {
extern decltype(kernels::linear_forward) linear_forward;
extern decltype(kernels::linear_backward) linear_backward;
}  // namespace cpu
namespace cuda {
extern decltype(kernels::linear_forward) linear_forward;
extern decltype(kernels::linear_backward) linear_backward;
}  // namespace cuda
}  // namespace detr::kernels
