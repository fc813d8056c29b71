#include "kernels/topk.h"

#include "kernels/dispatch.h"

namespace detr::kernels {

void max_last(const Stream& stream, const Tensor& x, Tensor& y) {
  DETR_CHECK(x.rank() >= 1 && x.dim(-1) >= 1, "max_last: x must be (..., C) with C >= 1, got ", x);
  expect_like(x, "max_last: y", y, Shape(x.shape().dims().first(static_cast<std::size_t>(x.rank() - 1))));
  DETR_DISPATCH(x.device(), max_last, stream, x, y);
}

void topk(const Stream& stream, const Tensor& x, Tensor& values, Tensor& indices) {
  DETR_CHECK(x.rank() == 2, "topk: x must be (R, M), got ", x);
  DETR_CHECK(values.rank() == 2, "topk: values must be (R, k), got ", values);
  const std::int64_t k = values.dim(1);
  DETR_CHECK(k <= x.dim(1), "topk: k must be at most M = ", x.dim(1), ", got ", k);
  expect_like(x, "topk: values", values, {x.dim(0), k});
  expect_tensor(x, "topk: indices", indices, {x.dim(0), k}, DType::i64);
  DETR_DISPATCH(x.device(), topk, stream, x, values, indices);
}

}  // namespace detr::kernels
