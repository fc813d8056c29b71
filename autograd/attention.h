#pragma once
#include "autograd/context.h"
#include "kernels/deformable_attention.h"

namespace detr {

/// Multi-head attention on projected queries, keys and values; `groups` (T, i64) may be undefined. Shapes: kernels/attention.h.
Variable attention(Context& ctx, const Variable& q, const Variable& k, const Variable& v, std::int64_t heads, const Tensor& groups);

/// Multi-scale deformable attention; the reference boxes are constants. Shapes: kernels/deformable_attention.h.
Variable deformable_attention(Context& ctx, const Variable& value, const Variable& offsets, const Variable& logits,
                              const Tensor& reference, const kernels::DeformableOptions& options);

}  // namespace detr
