#pragma once
#include "kernels/activation.h"
#include "kernels/conv2d.h"

namespace detr::kernels::cuda {

/// Enqueues y = act(conv(x, weight) + shift + residual) as one kernel of cuDNN. False where it has no deterministic engine for that;
/// then nothing is enqueued. Arguments as in conv2d_shift_forward.
bool try_fused_forward(const Stream& stream, const Tensor& x, const Tensor& weight, const Tensor& shift, const Tensor* residual, Activation activation,
                       const Conv2dOptions& options, const Tensor& y);

/// Enqueues dx = x <= 0 ? 0 : conv2d's gradient + (adds ? dx : 0) in the same way. Arguments as in conv2d_backward.
bool try_fused_data_gradient(const Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& weight, bool adds, const Conv2dOptions& options, const Tensor& dx);

}  // namespace detr::kernels::cuda
