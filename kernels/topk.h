#pragma once
#include "runtime/stream.h"

namespace detr::kernels {

/// y[r] = largest of x[r, :]; NaN counts as larger than anything. x (..., C) f32 or f64, C >= 1; y (...) out.
void max_last(const Stream& stream, const Tensor& x, Tensor& y);

/// The k largest of each row in descending order; of equal values the lower index comes first; NaN counts as larger than
/// anything. x (R, M) f32 or f64; values (R, k) out, like x; indices (R, k) i64 out. Throws InvalidArgument unless 0 <= k <= M.
void topk(const Stream& stream, const Tensor& x, Tensor& values, Tensor& indices);

namespace cpu {
extern decltype(kernels::max_last) max_last;
extern decltype(kernels::topk) topk;
}  // namespace cpu
}  // namespace detr::kernels
