#pragma once
#include <span>

#include "autograd/context.h"
#include "kernels/activation.h"

namespace detr {

/// Element by element; Activation::none returns x itself.
Variable activation(Context& ctx, const Variable& x, kernels::Activation kind);

/// a + b, where the shape of b is that of a or a suffix of it.
Variable add(Context& ctx, const Variable& a, const Variable& b);

/// x in another dtype; x itself where it has it already.
Variable cast(Context& ctx, const Variable& x, DType dtype);

/// Sum of all elements of all inputs, (1). Inputs of one dtype, at least one.
Variable sum(Context& ctx, std::span<const Variable> inputs);

}  // namespace detr
