#pragma once
#include "kernels/activation.h"
#include "kernels/conv2d.h"

namespace detr::kernels {

/// A batch norm whose statistics are constants, folded into the convolution before it:
///   scale = norm_weight / sqrt(var + eps),   folded[o] = scale[o] weight[o],   shift = norm_bias - mean scale
/// so that norm(conv(x, weight)) = conv(x, folded) + shift.
///
/// weight                              (O, kh, kw, I)  f32 or f64, never bf16
/// norm_weight, norm_bias, mean, var   (O)             dtype of weight
/// folded                              (O, kh, kw, I)  out, of weight's dtype, or bf16 from f32 (rounded once)
/// scale, shift                        (O)             out, dtype of weight
/// Throws InvalidArgument if a shape, dtype or device disagrees.
void fold_norm(const Stream& stream, const Tensor& weight, const Tensor& norm_weight, const Tensor& norm_bias, const Tensor& mean,
               const Tensor& var, double eps, Tensor& folded, Tensor& scale, Tensor& shift);

/// y = act(conv(x, weight) + shift + residual), rounded once on CUDA.
///
/// x, weight, options  as in conv2d_forward
/// shift               (O)     wide
/// residual            like y  or null
/// activation          none or relu
void conv2d_shift_forward(const Stream& stream, const Tensor& x, const Tensor& weight, const Tensor& shift, const Tensor* residual,
                          Activation activation, const Conv2dOptions& options, Tensor& y);

/// x[o] *= scale[o]: the gradient of an unfolded weight from that of a folded one. x (O, ...) and scale (O), f32 or f64.
void scale_rows(const Stream& stream, const Tensor& scale, Tensor& x);

namespace cpu {
extern decltype(kernels::fold_norm) fold_norm;
extern decltype(kernels::conv2d_shift_forward) conv2d_shift_forward;
extern decltype(kernels::scale_rows) scale_rows;
}  // namespace cpu
namespace cuda {
extern decltype(kernels::fold_norm) fold_norm;
extern decltype(kernels::conv2d_shift_forward) conv2d_shift_forward;
extern decltype(kernels::scale_rows) scale_rows;
}  // namespace cuda
}  // namespace detr::kernels
