#include "kernels/attention.h"

#include "kernels/dispatch.h"

namespace detr::kernels {
namespace {

void check_inputs(const Tensor& q, const Tensor& k, const Tensor& v, std::int64_t heads, const Tensor* groups) {
  DETR_CHECK(q.rank() == 3, "attention: q must be (N, Tq, A d), got ", q);
  DETR_CHECK(heads >= 1, "attention: heads must be >= 1, got ", heads);
  DETR_CHECK(q.dim(2) >= 1 && q.dim(2) % heads == 0, "attention: the width of q must be a multiple of ", heads, " heads, got ", q);
  DETR_CHECK(k.rank() == 3, "attention: k must be (N, Tk, A d), got ", k);
  expect_like(q, "attention: k", k, {q.dim(0), k.dim(1), q.dim(2)});
  expect_like(q, "attention: v", v, k.shape());
  if (!groups) return;
  DETR_CHECK(k.dim(1) == q.dim(1), "attention: with groups Tk must be Tq = ", q.dim(1), ", got ", k.dim(1));
  expect_tensor(q, "attention: groups", *groups, {q.dim(1)}, DType::i64);
}

}  // namespace

void attention_forward(const Stream& stream, const Tensor& q, const Tensor& k, const Tensor& v, std::int64_t heads,
                       const Tensor* groups, Tensor& out, Tensor& lse) {
  check_inputs(q, k, v, heads, groups);
  expect_like(q, "attention: out", out, q.shape());
  expect_wide(q, "attention: lse", lse, {q.dim(0), heads, q.dim(1)});
  DETR_DISPATCH(q.device(), attention_forward, stream, q, k, v, heads, groups, out, lse);
}

void attention_backward(const Stream& stream, const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                        const Tensor& lse, std::int64_t heads, const Tensor* groups, Tensor* dq, Tensor* dk, Tensor* dv) {
  check_inputs(q, k, v, heads, groups);
  expect_like(q, "attention: dout", dout, q.shape());
  expect_like(q, "attention: out", out, q.shape());
  expect_wide(q, "attention: lse", lse, {q.dim(0), heads, q.dim(1)});
  expect_like(q, "attention: dq", dq, q.shape());
  expect_like(q, "attention: dk", dk, k.shape());
  expect_like(q, "attention: dv", dv, k.shape());
  DETR_DISPATCH(q.device(), attention_backward, stream, dout, q, k, v, out, lse, heads, groups, dq, dk, dv);
}

}  // namespace detr::kernels
