#include "autograd/attention.h"

#include "kernels/attention.h"
#include "runtime/error.h"

namespace detr {

Variable attention(Context& ctx, const Variable& q, const Variable& k, const Variable& v, std::int64_t heads, const Tensor& groups) {
  DETR_CHECK(q.value().rank() == 3, "attention: q must be (N, Tq, A d), got ", q.value());
  Tensor out = ctx.empty_like(q.value());
  Tensor lse = ctx.empty({q.dim(0), heads, q.dim(1)}, wide_dtype(q.value().dtype()));
  kernels::attention_forward(ctx.stream(), q.value(), k.value(), v.value(), heads, groups.defined() ? &groups : nullptr, out, lse);
  return ctx.record("attention", {q, k, v}, out,
                    [q = q.value(), k = k.value(), v = v.value(), out, lse, heads, groups](Context& c, const Tensor& dout, Wanted want) {
                      kernels::attention_backward(c.stream(), dout, q, k, v, out, lse, heads, groups.defined() ? &groups : nullptr,
                                                  want[0], want[1], want[2]);
                    });
}

Variable deformable_attention(Context& ctx, const Variable& value, const Variable& offsets, const Variable& logits,
                              const Tensor& reference, const kernels::DeformableOptions& options) {
  DETR_CHECK(value.value().rank() == 3 && offsets.value().rank() == 3,
             "deformable_attention: value must be (N, S, A d) and offsets (N, Q, A P 2), got ", value.value(), " and ", offsets.value());
  Tensor out = ctx.empty({value.dim(0), offsets.dim(1), value.dim(2)}, value.value().dtype());
  kernels::deformable_attention_forward(ctx.stream(), value.value(), offsets.value(), logits.value(), reference, options, out);
  return ctx.record("deformable_attention", {value, offsets, logits}, out,
                    [value = value.value(), offsets = offsets.value(), logits = logits.value(), reference, options](
                        Context& c, const Tensor& dout, Wanted want) {
                      kernels::deformable_attention_backward(c.stream(), dout, value, offsets, logits, reference, options, want[0],
                                                             want[1], want[2]);
                    });
}

}  // namespace detr
