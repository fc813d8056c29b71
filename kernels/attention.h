#pragma once
#include "runtime/stream.h"

namespace detr::kernels {

/// Group of an ordinary query and of a padding slot; a denoising slot has its group's number, >= 0.
inline constexpr std::int64_t kOrdinaryQuery = -1;
inline constexpr std::int64_t kPaddingSlot = -2;

/// Multi-head scaled dot-product attention with the denoising mask:
///   out = softmax(q k^T / sqrt(d), over allowed keys) v, for each head
///
/// q          (N, Tq, A d)  f32 or f64; head a owns channels [a d, (a + 1) d)
/// k, v       (N, Tk, A d)
/// heads      A >= 1, divides the width
/// groups     (T) i64 or null, then Tq = Tk = T. Query i may look at key j unless j is a padding slot, or j is in a denoising
///            group and i is not in that same group. A query without any allowed key (a padding slot looks at nothing) gives 0.
///            What lies in a padding slot, even NaN, takes no part. Null: everything is allowed.
/// out        (N, Tq, A d)  out
/// lse        (N, A, Tq)    out, log of the softmax's denominator incl. the row maximum; kept for backward; 0 for a query
///                          without keys
///
/// Softmax statistics in the compute dtype, sums in a fixed order. Throws InvalidArgument if a shape, dtype or device disagrees.
/// Vaswani et al. 2017, arXiv:1706.03762; mask: Li et al. 2022, "DN-DETR", arXiv:2203.01305, eq. 6.
void attention_forward(const Stream& stream, const Tensor& q, const Tensor& k, const Tensor& v, std::int64_t heads,
                       const Tensor* groups, Tensor& out, Tensor& lse);

/// Backward of the above, for any subset of wanted gradients; null is neither computed nor written, others are overwritten.
void attention_backward(const Stream& stream, const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                        const Tensor& lse, std::int64_t heads, const Tensor* groups, Tensor* dq, Tensor* dk, Tensor* dv);

namespace cpu {
extern decltype(kernels::attention_forward) attention_forward;
extern decltype(kernels::attention_backward) attention_backward;
}  // namespace cpu
}  // namespace detr::kernels
