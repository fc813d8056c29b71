#pragma once
#include "autograd/context.h"

namespace detr {

/// y = x W^T + b over the last dimension; `bias` may be undefined. Shapes: kernels/linear.h.
Variable linear(Context& ctx, const Variable& x, const Variable& weight, const Variable& bias);

}  // namespace detr
