#pragma once
#include "kernels/activation.h"
#include "kernels/conv2d.h"

namespace detr::kernels::cuda {

/// The first layer: pictures x (N, H, W, 3) in bf16, a weight (O, 3, 3, 3) with O in 32s, stride 2, padding 1, W in 8s. cuDNN wants 8 channels
/// of them, in a copy, and takes four to six times as long. Enqueues y = act(conv(x, weight) + shift), rounded once; shift (O) f32 or null, activation
/// none or relu. False where the layer is another; then nothing is enqueued.
bool try_pictures_forward(const Stream& stream, const Tensor& x, const Tensor& weight, const Tensor* shift, Activation activation, const Conv2dOptions& options,
                          const Tensor& y);

}  // namespace detr::kernels::cuda
