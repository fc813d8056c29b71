#pragma once
#include "runtime/stream.h"

namespace detr::kernels {

/// Layer normalisation of a sum over the last dimension (post-norm block of a transformer):
///   s = x + residual,   y = (s - mean) * rstd * weight + bias,   rstd = 1 / sqrt(var + eps)
///
/// x            (..., D)  f32 or f64; R >= 0 rows of D >= 1
/// residual     (..., D)  or null: then s is x
/// weight, bias (D)       dtype of x
/// eps                    > 0, in units of s squared
/// sum          (..., D)  out, s; null exactly where residual is
/// y            (..., D)  out
/// mean, rstd   (R)       out, dtype of x; kept for backward
///
/// Sums in double, in a fixed order. Throws InvalidArgument if a shape, dtype or device disagrees.
/// Ba, Kiros and Hinton 2016, "Layer Normalization", arXiv:1607.06450, eq. 3.
void layer_norm_forward(const Stream& stream, const Tensor& x, const Tensor* residual, const Tensor& weight, const Tensor& bias,
                        double eps, Tensor* sum, Tensor& y, Tensor& mean, Tensor& rstd);

/// Backward of the above, for any subset of wanted gradients; null is neither computed nor written, others are overwritten.
/// `sum` is s. The gradients of x and of residual are both ds (..., D), so there is one; dweight, dbias (D).
void layer_norm_backward(const Stream& stream, const Tensor& dy, const Tensor& sum, const Tensor& weight, const Tensor& mean,
                         const Tensor& rstd, Tensor* ds, Tensor* dweight, Tensor* dbias);

namespace cpu {
extern decltype(kernels::layer_norm_forward) layer_norm_forward;
extern decltype(kernels::layer_norm_backward) layer_norm_backward;
}  // namespace cpu
}  // namespace detr::kernels
