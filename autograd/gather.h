#pragma once
#include "autograd/context.h"

namespace detr {

/// Rows of each image by index, zeros where `valid` (T, u8; may be undefined) is 0. Shapes: kernels/gather.h.
Variable gather_rows(Context& ctx, const Variable& x, const Tensor& index, const Tensor& valid);

/// Rows of a table by index (any shape, i64). `padding_row` gets no gradient; -1: none.
Variable embedding(Context& ctx, const Variable& table, const Tensor& index, std::int64_t padding_row);

}  // namespace detr
