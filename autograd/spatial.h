#pragma once
#include <span>

#include "autograd/context.h"

namespace detr {

/// Max pooling 3 x 3, stride 2, padding 1; average pooling 2 x 2, stride 2, ceil mode; nearest upsampling by two.
/// Shapes: kernels/pool.h.
Variable max_pool(Context& ctx, const Variable& x);
Variable avg_pool(Context& ctx, const Variable& x);
Variable upsample(Context& ctx, const Variable& x);

/// Concatenation along dimension `axis` (>= 0).
Variable concatenate(Context& ctx, std::span<const Variable> inputs, int axis);

/// The same memory in another shape of equal size.
Variable reshape(Context& ctx, const Variable& x, const Shape& shape);

}  // namespace detr
