#pragma once
#include "runtime/stream.h"

namespace detr::kernels {

/// Group of an ordinary query and of a padding slot; a denoising slot has its group's number, >= 0.
inline constexpr std::int64_t kOrdinaryQuery = -1;
inline constexpr std::int64_t kPaddingSlot = -2;

/// Multi-head scaled dot-product attention with the denoising mask:
///   out = softmax(q k^T / sqrt(d), over allowed keys) v, for each head
///
/// q          (N, Tq, A d)  x's dtype as in Note [Element types]; head a owns channels [a d, (a + 1) d)
/// k, v       (N, Tk, A d)
/// heads      A >= 1, divides the width
/// groups     (T) i64 or null, then Tq = Tk = T. Query i may look at key j unless j is a padding slot, or j is in a denoising
///            group and i is not in that same group. A query without any allowed key (a padding slot looks at nothing) gives 0.
///            What lies in a padding slot, even NaN, takes no part. Null: everything is allowed. Groups are below 2^31.
/// out        (N, Tq, A d)  out
/// lse        (N, A, Tq)    out, wide; log of the softmax's denominator incl. the row maximum; kept for backward; 0 for a query
///                          without keys
///
/// Softmax statistics in the compute dtype, sums in a fixed order: same bits on every run. CUDA: d <= 128. In bf16 the weights (and in
/// backward their scores' gradients) are rounded to bf16 as operands of tensor cores; scores, exponentials and sums are in f32.
/// Throws InvalidArgument if a shape, dtype or device disagrees.
/// Vaswani et al. 2017, arXiv:1706.03762; mask: Li et al. 2022, "DN-DETR", arXiv:2203.01305, eq. 6.
void attention_forward(const Stream& stream, const Tensor& q, const Tensor& k, const Tensor& v, std::int64_t heads,
                       const Tensor* groups, Tensor& out, Tensor& lse);

/// Backward of the above, for any subset of wanted gradients; null is neither computed nor written, others are overwritten. The
/// weights are recomputed from lse. Gradients of padding slots are 0.
/// dout, dq   (N, Tq, A d)  x's dtype
/// dk, dv     (N, Tk, A d)
void attention_backward(const Stream& stream, const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                        const Tensor& lse, std::int64_t heads, const Tensor* groups, Tensor* dq, Tensor* dk, Tensor* dv);

namespace cpu {
extern decltype(kernels::attention_forward) attention_forward;
extern decltype(kernels::attention_backward) attention_backward;
}  // namespace cpu
namespace cuda {
extern decltype(kernels::attention_forward) attention_forward;
extern decltype(kernels::attention_backward) attention_backward;
}  // namespace cuda
}  // namespace detr::kernels
