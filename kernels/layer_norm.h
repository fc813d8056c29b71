#pragma once
#include "runtime/stream.h"

namespace detr::kernels {

/// Layer normalisation of a sum over the last dimension (post-norm block of a transformer):
///   s = x + residual,   y = (s - mean) * rstd * weight + bias,   rstd = 1 / sqrt(var + eps)
///
/// x            (..., D)  R >= 0 rows of D >= 1. CPU: f32, f64; CUDA: f32, bf16
/// residual     (..., D)  or null: then s is x
/// weight, bias (D)       wide, see Note [Element types]
/// eps                    > 0, in units of s squared
/// sum          (..., D)  out, s rounded to x's dtype, which is what the rest is made of; null exactly where residual is
/// y            (..., D)  out
/// mean, rstd   (R)       out, wide; kept for backward
///
/// Sums in double (CUDA: in float, the variance around the mean), in a fixed order: same bits on every run. Fit for capture.
/// Throws InvalidArgument if a shape, dtype or device disagrees.
/// Ba, Kiros and Hinton 2016, "Layer Normalization", arXiv:1607.06450, eq. 3.
void layer_norm_forward(const Stream& stream, const Tensor& x, const Tensor* residual, const Tensor& weight, const Tensor& bias,
                        double eps, Tensor* sum, Tensor& y, Tensor& mean, Tensor& rstd);

/// Backward of the above, for any subset of wanted gradients; null is neither computed nor written, others are overwritten.
/// `sum` is s. The gradients of x and of residual are both ds (..., D), so there is one; dweight, dbias (D), wide. On CUDA the sums
/// over rows are in float over up to a few hundred rows, and the rest in double.
void layer_norm_backward(const Stream& stream, const Tensor& dy, const Tensor& sum, const Tensor& weight, const Tensor& mean,
                         const Tensor& rstd, Tensor* ds, Tensor* dweight, Tensor* dbias);

namespace cpu {
extern decltype(kernels::layer_norm_forward) layer_norm_forward;
extern decltype(kernels::layer_norm_backward) layer_norm_backward;
}  // namespace cpu
namespace cuda {
extern decltype(kernels::layer_norm_forward) layer_norm_forward;
extern decltype(kernels::layer_norm_backward) layer_norm_backward;
}  // namespace cuda
}  // namespace detr::kernels
