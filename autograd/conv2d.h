#pragma once
#include "autograd/context.h"
#include "kernels/conv2d.h"

namespace detr {

/// Convolution without bias, channels last. Shapes: kernels/conv2d.h.
Variable conv2d(Context& ctx, const Variable& x, const Variable& weight, const kernels::Conv2dOptions& options);

}  // namespace detr
