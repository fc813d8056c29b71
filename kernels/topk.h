#pragma once
#include "runtime/stream.h"

namespace detr::kernels {

/// y[r] = largest of x[r, :]; NaN counts as larger than anything. x (..., C), see Note [Element types], C >= 1; y (...) out, like x.
void max_last(const Stream& stream, const Tensor& x, Tensor& y);

/// The k largest of each row in descending order; of equal values the lower index comes first; NaN counts as larger than
/// anything. x (R, M), see Note [Element types]; values (R, k) out, like x; indices (R, k) i64 out. Throws InvalidArgument unless
/// 0 <= k <= M. Exact, so the same on every device. On CUDA a k up to 1024 is sorted by the block that found it; above, the time of
/// the sort grows with k squared.
void topk(const Stream& stream, const Tensor& x, Tensor& values, Tensor& indices);

namespace cpu {
extern decltype(kernels::max_last) max_last;
extern decltype(kernels::topk) topk;
}  // namespace cpu
namespace cuda {
extern decltype(kernels::max_last) max_last;
extern decltype(kernels::topk) topk;
}  // namespace cuda
}  // namespace detr::kernels
