#pragma once
#include "autograd/context.h"
#include "kernels/activation.h"
#include "kernels/conv2d.h"

namespace detr {

/// Convolution without bias, channels last. Shapes: kernels/conv2d.h.
Variable conv2d(Context& ctx, const Variable& x, const Variable& weight, const kernels::Conv2dOptions& options);

/// Convolution and a batch norm whose statistics are constants, as one: y = act(norm(conv(x, weight)) + residual), see
/// kernels/conv2d_norm.h. `exact` is the weight in f32 (or f64), from which the folded one is made. residual may be undefined;
/// activation none or relu. The norm's four tensors have no gradient.
struct ConstantNorm {
  Tensor weight, bias, mean, var;
  double eps = 1e-5;
};
Variable conv2d_norm(Context& ctx, const Variable& x, const Variable& weight, const Tensor& exact, const ConstantNorm& norm, const Variable& residual,
                     kernels::Activation activation, const kernels::Conv2dOptions& options);

}  // namespace detr
